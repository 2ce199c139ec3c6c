"""Where target and draft live: a device map for the target that leaves room for the draft and for both caches.

Transformers' own solver places the target's layers, each together with its keys and values. What it doesn't know of (the
draft, the working memory, the caches of layers whose weights are offloaded) is added up behind it, device by device, and
where a device has too much the solver gets less of it and tries again. The numbers in a `Plan` are what was added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from accelerate.utils import convert_file_size_to_int
from torch import nn

from ..config import SpecConfig
from ..engine import compat
from ..errors import IncompatibleDraftError, PlacementError
from .plans import GIB, Device, DeviceUse, Plan, named, rank
from .quantised import OFFLOADED, spared
from .shapes import Load, Shape, shape_of


Memory: TypeAlias = dict[Device, int]

# of `from_pretrained`, by what is tried for it; balancing may leave room nowhere for the draft
STRATEGIES: dict[str, tuple[str | None, ...]] = {
    "auto": ("balanced", "sequential"),
    "balanced": ("balanced",),
    "balanced_low_0": ("balanced_low_0",),
    "sequential": ("sequential",),
}
SHARE = 0.9  # of an accelerator's free memory that is planned with; what is passed as `max_memory` is taken as it is
LOGIT_COPIES = 4  # where tokens are chosen: scores, both models' probabilities, and one for work


def plan(
    target: Any, draft: Any = None, *, max_memory: Mapping[Any, int | str] | None = None, batch: int = 1,
    context: int = 4096, device_map: Any = "auto", dtype: Any = None, draft_device: Any = None,
    quantization_config: Any = None, num_draft_tokens: int | None = None, draft_revision: str | None = None, **hub: Any,
) -> Plan:  # fmt: skip
    """Plan where a target and its draft go, from their configurations alone.

    The draft goes to the device of the target's output layer, whole. Weights go to the CPU or the disk only where
    `max_memory` has them and the accelerators are full.

    Args:
        target: A model, its configuration (an object, or the dict of a `config.json`), its Hub id or its local path.
        draft: The same for the draft; `None` plans without one.
        max_memory: Memory by device, in bytes or as in `{0: "24GiB", "cpu": "64GiB"}`; the devices need not exist.
            `None` means 90 % of what is free on this machine's accelerators, with what the models themselves have there if they
            are loaded, and the CPU.
        batch: Rows that there must be room for.
        context: Tokens of a row, prompt and output together, that there must be room for.
        device_map: `"auto"`, `"balanced"`, `"balanced_low_0"`, `"sequential"`, one device for all, or a whole map.
        dtype: Of the weights that aren't quantised; `None` and `"auto"` mean the saved one. The draft gets the target's.
        draft_device: Where the draft goes, if not to the target's output layer. Tokens travel between the two; where they
            are sampled or logits are processed, the draft's logits do too.
        quantization_config: How to quantise the target while it is loaded; a saved quantisation is known.
        num_draft_tokens: Most tokens drafted a round; `None` means the default, 16.
        draft_revision: Of the draft, where it is named by id.
        **hub: Passed to `AutoConfig.from_pretrained`, such as `local_files_only`.

    Raises:
        PlacementError: If it doesn't fit, with what is needed and what is there; if an argument is wrong.
        IncompatibleDraftError: If the draft's configuration can't be read.
    """
    load = Load(batch, context, SpecConfig(num_draft_tokens=num_draft_tokens).max_draft_tokens)
    whole = shape_of(target, load, dtype, quantization_config, **hub)
    small = None
    if draft is not None:
        own = {"revision": draft_revision, "trust_remote_code": False}
        small = _shape_of_draft(draft, load, whole.dtype, hub | own)
    memory = memory_of(max_memory, target, draft)
    if whole.quantization is not None:
        memory = spared(whole.quantization, memory)
    bench = _Bench(whole, small, load, memory, None if draft_device is None else _device(draft_device))
    if small is not None and bench.draft_device not in {None, *memory} - {"disk"}:
        raise PlacementError(
            f"`draft_device` is {draft_device!r}, and the memory there is: {_sizes(memory)}. "
            "Pass a device that has some, or give `max_memory` an entry for this one."
        )
    tries: list[Plan] = []
    for strategy in STRATEGIES.get(device_map, (None,)) if isinstance(device_map, str) else (None,):
        tries.append(bench.place(_given(device_map)) if strategy is None else bench.fit(strategy))
        if not bench.wrong(tries[-1]) and not tries[-1].offloaded:
            break
    fitting = [each for each in tries if not bench.wrong(each)]
    if not fitting:
        raise PlacementError(_refusal(bench, tries[-1]))
    return min(fitting, key=lambda each: each.offloaded)


def _shape_of_draft(draft: Any, load: Load, dtype: torch.dtype, hub: dict[str, Any]) -> Shape:
    try:
        return shape_of(draft, load, dtype, **hub)
    except (OSError, ValueError) as error:
        name = draft if isinstance(draft, str) else f"({type(draft).__name__})"
        raise IncompatibleDraftError(
            f"The draft model {name!r} can't be planned: {error} Pass the id or path of a causal language model."
        ) from error


@dataclass(frozen=True, slots=True)
class _Bench:
    """What there is to place, and where."""

    target: Shape
    draft: Shape | None
    load: Load
    memory: Memory
    draft_device: Device | None

    @property
    def allowed(self) -> Memory:
        """Memory that the target's weights may take: quantisers keep them off the CPU where there are accelerators."""
        rule = self.target.rule
        barred = OFFLOADED - rule.offload if rule is not None and set(self.memory) - OFFLOADED else frozenset[str]()
        return {device: size for device, size in self.memory.items() if device not in barred}

    def wrong(self, found: Plan) -> list[DeviceUse]:
        """The devices on which a plan puts too much, or what may not be there."""
        return [
            each
            for each in found.devices
            if each.free < 0 or (each.target_weights and each.device not in self.allowed)
        ]

    def fit(self, strategy: str) -> Plan:
        """The plan of a strategy; something of it is `wrong` if none fits."""
        budget = self.allowed
        while True:
            found = self.place(compat.infer_device_map(self.target.model, budget, strategy))
            lower = dict(budget)
            for each in found.devices:
                if each.free < 0 and each.device in budget:
                    placed = each.target_weights + sum(self.target.caches[index] for index in each.layers)
                    lower[each.device] = min(budget[each.device], max(0, placed + each.free))
            if lower == budget:
                return found
            budget = lower

    def place(self, device_map: dict[str, Device]) -> Plan:
        """Add up what a device map of the target puts where."""
        target, draft, load = self.target, self.draft, self.load
        main = min((each for each in device_map.values() if each not in OFFLOADED), key=rank, default="cpu")
        places = [*self.memory, *device_map.values(), main]
        uses = {device: DeviceUse(device, self.memory.get(device, 0)) for device in places}

        def add(device: Device, **sizes: int) -> None:
            uses[device] = replace(uses[device], **{name: getattr(uses[device], name) + sizes[name] for name in sizes})

        def runs_on(name: str) -> Device:
            place = _place_of(name, device_map)
            return main if place in OFFLOADED else place

        counted: set[tuple[int, Device]] = set()
        fetched: Counter[str] = Counter()
        for name, identity, size, is_cache in target.tensors:
            place = _place_of(name, device_map)
            if is_cache:
                add(runs_on(name), target_cache=size)
            elif (identity, place) not in counted:
                counted.add((identity, place))
                add(place, target_weights=size)
                fetched[name] += size if place != runs_on(name) else 0
        for index, name in enumerate(target.layers):
            place = _place_of(name, device_map)
            uses[place] = replace(uses[place], layers=(*uses[place].layers, index))
        head, start = runs_on(target.head), runs_on(target.embedding)
        at = None if draft is None else head if self.draft_device is None else self.draft_device
        live = dict.fromkeys(map(runs_on, target.layers), target.activations)
        if draft is not None and at is not None:
            add(at, draft_weights=draft.weights, draft_cache=sum(draft.caches))
            live[at] = max(live.get(at, 0), draft.activations + draft.logits)
        for device, size in live.items():
            add(device, working=size)
        add(main, working=max(fetched.values(), default=0))
        add(head, working=target.logits)
        add(start, working=LOGIT_COPIES * target.logits)
        devices = [each for device, each in uses.items() if device in self.memory or each.used]
        return Plan(
            target.name, None if draft is None else draft.name, device_map, at,
            tuple(sorted(devices, key=lambda use: rank(use.device))), load.batch, load.context,
        )  # fmt: skip


def _place_of(name: str, device_map: Mapping[str, Device]) -> Device:
    """The device of a module: that of the closest module around it that the map names."""
    around = name
    while around not in device_map:
        if not around:
            raise PlacementError(
                f"`device_map` says nothing of {name!r}. Give it an entry, or one for '' (all the rest)."
            )
        around = around.rpartition(".")[0]
    return device_map[around]


def memory_of(given: Mapping[Any, int | str] | None, *models: Any) -> Memory:
    """Bytes by device, accelerators first: what was given, else what this machine has free or these models have."""
    if given is None:
        free = compat.free_memory()
        sizes = {device: size if device in OFFLOADED else int(size * SHARE) for device, size in free.items()}
        for weight in chain.from_iterable(each.parameters() for each in models if isinstance(each, nn.Module)):
            device = _device(weight.device) if not weight.is_meta else "disk"
            if device in sizes and device not in OFFLOADED:  # a file's pages on the CPU count as free anyway
                sizes[device] += weight.nbytes
        return sizes
    try:
        found = {_device(device): convert_file_size_to_int(size) for device, size in given.items()}
    except (ValueError, AttributeError) as error:
        raise PlacementError(f"`max_memory` must be sizes by device, such as {{0: '24GiB'}}: {error}") from error
    if not any(size for device, size in found.items() if device != "disk"):
        raise PlacementError(f"`max_memory` has no memory to run on, got {given!r}.")
    return dict(sorted(found.items(), key=lambda item: rank(item[0])))


def _device(given: Any) -> Device:
    """A device as device maps name it."""
    if isinstance(given, int):
        return given
    if given == "disk":
        return "disk"
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise PlacementError(f"A device must be such as 0, 'cuda:0', 'cpu' or 'disk', got {given!r}.") from error
    kind: str = device.type
    return kind if kind in ("cpu", "mps") else int(device.index or 0)


def _given(device_map: Any) -> dict[str, Device]:
    if not isinstance(device_map, Mapping):
        device_map = {"": "cpu" if device_map is None else device_map}
    return {name: _device(device) for name, device in device_map.items()}


def _sizes(memory: Memory) -> str:
    return ", ".join(f"{named(device)} {size / GIB:.2f} GiB" for device, size in memory.items())


def _refusal(bench: _Bench, closest: Plan) -> str:
    """Why nothing fits, in numbers, and what to do."""
    target, draft, load = bench.target, bench.draft, bench.load
    least = bench.place({"": next(iter(bench.memory))}).devices  # spread out it takes more
    parts = [f"{target.weights / GIB:.2f} weights and {sum(target.caches) / GIB:.2f} cache of the target"]
    if draft is not None:
        parts.append(f"{draft.weights / GIB:.2f} and {sum(draft.caches) / GIB:.2f} of the draft {draft.name}")
    parts.append(f"{sum(each.working for each in least) / GIB:.2f} working memory")
    wrong = bench.wrong(closest)
    short = [
        f"{named(each.device)} would be {-each.free / GIB:.2f} GiB short"
        for each in wrong
        if each.device in bench.allowed
    ]
    left = sum(each.target_weights for each in wrong if each.device not in bench.allowed)
    if left:
        short.append(f"{left / GIB:.2f} GiB of weights would be left over")
    advice = ["a smaller `context` or `batch`"]
    if target.rule is None:
        advice.append("a quantised target (`quantization_config`)")
    if draft is not None:
        advice.append("another draft or none")
    if "cpu" in (OFFLOADED if target.rule is None else target.rule.offload) - set(bench.memory):
        advice.append("CPU offload (a 'cpu' entry in `max_memory`)")
    return (
        f"{target.name} doesn't fit: {sum(each.used for each in least) / GIB:.2f} GiB are needed at batch {load.batch} and context {load.context:,} "
        f"({', '.join(parts)}), and there are {_sizes(bench.memory)}; {' and '.join(short)}. Try {', or '.join(advice)}."
    )
