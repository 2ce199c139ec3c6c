"""What a plan of where target and draft live holds, and how it prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .quantised import OFFLOADED


Device: TypeAlias = int | str  # an accelerator's index, "mps", "cpu" or "disk", as in Accelerate's device maps

GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a plan puts on one device. Sizes are in bytes.

    Attributes:
        device: The device.
        memory: What may be used of it.
        layers: Indices of the target's decoder layers whose weights are on it.
        target_weights: The target's weights.
        target_cache: Keys and values of the target's layers that run on it.
        draft_weights: The draft's weights.
        draft_cache: The draft's keys and values.
        working: Allowance for activations, logits and weights on their way from CPU or disk.
    """

    device: Device
    memory: int
    layers: tuple[int, ...] = ()
    target_weights: int = 0
    target_cache: int = 0
    draft_weights: int = 0
    draft_cache: int = 0
    working: int = 0

    @property
    def used(self) -> int:
        """All of it."""
        return self.target_weights + self.target_cache + self.draft_weights + self.draft_cache + self.working

    @property
    def free(self) -> int:
        """What is left of `memory`; negative where it doesn't fit."""
        return self.memory - self.used


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a target and its draft will be. `str(plan)` is a table.

    Attributes:
        target: Name of the target.
        draft: Name of the draft, or `None`.
        device_map: The target's, to pass to `from_pretrained`.
        draft_device: Where the draft goes whole, or `None` without one.
        devices: What is on each device, in order.
        batch: Rows that there is room for.
        context: Tokens of a row, prompt and output together, that there is room for.
    """

    target: str
    draft: str | None
    device_map: dict[str, Device]
    draft_device: Device | None
    devices: tuple[DeviceUse, ...]
    batch: int
    context: int

    def on(self, device: Device) -> DeviceUse:
        """What is on a device.

        Raises:
            KeyError: If the plan doesn't know the device.
        """
        return {each.device: each for each in self.devices}[device]

    @property
    def offloaded(self) -> int:
        """Bytes of the target's weights that must be fetched from CPU or disk in every forward."""
        places = [each.device for each in self.devices if each.target_weights]
        slow = OFFLOADED if set(places) - OFFLOADED else {"disk"}
        return sum(each.target_weights for each in self.devices if each.device in slow)

    def table(self) -> str:
        """The plan in GiB, at most 80 columns wide."""
        draft = "no draft" if self.draft is None else f"draft  {self.draft} on {named(self.draft_device)}"
        rows = [f"target {self.target}", draft, f"room for batch {self.batch}, context {self.context:,}; sizes in GiB"]
        names = ("weights", "cache", "draft", "cache", "working", "free", "of")
        rows.append(f"{'device':<8}{'layers':<10}" + "".join(f"{name:>8}" for name in names))
        for each in self.devices:
            sizes = (
                each.target_weights, each.target_cache, each.draft_weights, each.draft_cache, each.working,
                each.free, each.memory,
            )  # fmt: skip
            cells = "".join(f"{size / GIB:>8.2f}" for size in sizes)
            rows.append(f"{named(each.device):<8}{_span(each.layers):<10}{cells}")
        return "\n".join(rows)

    def __str__(self) -> str:
        return self.table()


def rank(device: Device) -> tuple[int, int]:
    """The order of devices: accelerators, then what is slower."""
    return (0, device) if isinstance(device, int) else (1 + ("mps", "cpu", "disk").index(device), 0)


def named(device: Device | None) -> str:
    """A device as users are told of it."""
    return f"GPU {device}" if isinstance(device, int) else str(device)


def _span(layers: tuple[int, ...]) -> str:
    """Layers 0, 1, 2, 5 as `0–2, 5`; several ranges as how many."""
    ends = [index for index in layers if index + 1 not in layers]
    starts = [index for index in layers if index - 1 not in layers]
    if len(ends) > 1:
        return f"{len(layers)} of them"
    return "–".join(map(str, dict.fromkeys((*starts, *ends))))
