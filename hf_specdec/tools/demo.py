"""The demo: real prompts, decoded with speculation off and on, compared and timed.

Each prompt is decoded greedily several times, off and on in turns, so that a change in the machine's load meets both
sides. The text of both sides must be the same. Where half precision makes it differ, the report says whether the
target was undecided there: see `Difference`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.resources import files
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ..config import SpecConfig
from ..errors import SpecDecError
from .differences import Difference, find_difference
from .environment import cpu_name, package_versions
from .loading import LoadedModel, encode_prompt, load_model
from .timing import geometric_mean, now


if TYPE_CHECKING:
    from ..stats import SpecStats

SCHEMA_VERSION = 1
WARM_UP_TOKENS = 16

StepContext = Callable[[str], AbstractContextManager[None]]
Speculative = bool | str | SpecConfig


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt, where it comes from and its licence."""

    id: str
    title: str
    lang: str
    text: str
    license: str
    source: str


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both sides of one prompt. Times are medians of the trials; the speed-up is the median of each trial's ratio."""

    prompt: DemoPrompt
    text_off: str
    text_on: str
    num_tokens_off: int
    num_tokens_on: int
    tokens_per_second_off: float
    tokens_per_second_on: float
    speedup: float
    stats: dict[str, Any]
    difference: Difference | None

    @property
    def same_text(self) -> bool:
        """Whether both sides gave the same tokens."""
        return self.difference is None

    @property
    def ok(self) -> bool:
        """Whether both sides gave the same tokens, up to a near-tie."""
        return self.difference is None or self.difference.near_tie

    @property
    def verdict(self) -> str:
        """One line: "same text: yes", or "same text: no" and why."""
        return "same text: yes" if self.difference is None else f"same text: no ({self.difference})"

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain JSON types."""
        return asdict(self) | {"same_text": self.same_text, "ok": self.ok, "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All prompts of one run and the conditions they were measured under."""

    model: str
    drafter: str
    dtype: str
    device: str
    hardware: str
    threads: int
    max_new_tokens: int
    trials: int
    versions: dict[str, str | None]
    results: tuple[DemoResult, ...]
    draft_model: str | None = None

    @property
    def speedup(self) -> float:
        """Geometric mean of the prompts' speed-ups."""
        return geometric_mean([result.speedup for result in self.results])

    @property
    def ok(self) -> bool:
        """Whether every prompt gave the same text, up to near-ties."""
        return all(result.ok for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain JSON types."""
        summary = {"schema_version": SCHEMA_VERSION, "speedup": self.speedup, "ok": self.ok}
        return summary | asdict(self) | {"results": [result.to_dict() for result in self.results]}


def demo_prompts() -> tuple[DemoPrompt, ...]:
    """Return the prompts that ship with the package: chat, code editing, quoting, and mathematics in Chinese."""
    lines = files(__package__).joinpath("demo_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(_prompt_from_record(json.loads(line)) for line in lines)


def user_prompts(texts: Sequence[str]) -> tuple[DemoPrompt, ...]:
    """Wrap texts that a user gave."""
    return tuple(
        DemoPrompt(id=f"prompt/{number}", title=f"prompt {number}", lang="", text=text, license="", source="user")
        for number, text in enumerate(texts, start=1)
    )


def load_demo_model(model: str | None = None, *, dtype: str = "float32", device: str | None = None) -> LoadedModel:
    """Load the model to demonstrate with.

    Args:
        model: Local folder or Hub id; by default the chat model of `fetch_chat_model`.
        dtype: "float32" (same text, token by token), "bfloat16", "float16", or "auto".
        device: Where to run; by default CUDA where there is one, else the CPU.

    Raises:
        SpecDecError: If the dtype is unknown, or the model can't be fetched or loaded.
    """
    from .chat_model import fetch_chat_model

    return load_model(model or str(fetch_chat_model()), dtype=dtype, device=device)


def run_demo(
    loaded: LoadedModel,
    *,
    prompts: Sequence[DemoPrompt] | None = None,
    max_new_tokens: int = 96,
    trials: int = 2,
    drafter: str = "auto",
    draft_model: str | None = None,
    step: StepContext | None = None,
) -> DemoReport:
    """Decode prompts with speculation off and on, and compare text and speed.

    Args:
        loaded: What `load_demo_model` returned.
        prompts: What to decode; by default `demo_prompts()`.
        max_new_tokens: Most tokens a prompt.
        trials: How often each prompt is decoded on each side.
        drafter: Name of a drafter, or "auto".
        draft_model: Local folder or Hub id of a draft model.
        step: Called with a title, gives a context that lasts as long as that step; for progress bars.

    Raises:
        SpecDecError: If an argument is out of range, or the draft model can't be used.
    """
    prompts = demo_prompts() if prompts is None else prompts
    if not prompts or max_new_tokens < 1 or trials < 1:
        raise SpecDecError(
            "The demo needs at least one prompt, one new token and one trial; "
            f"got {len(prompts)}, {max_new_tokens} and {trials}."
        )
    step = step or (lambda title: nullcontext())
    speculative: Speculative = True if drafter == "auto" else drafter
    if draft_model is not None:
        speculative = SpecConfig(drafter=None if drafter == "auto" else drafter, draft_model=draft_model)
    with step("Warm up"):
        inputs = encode_prompt(loaded, prompts[0].text)
        _decode(loaded, inputs, False, WARM_UP_TOKENS)
        _decode(loaded, inputs, speculative, WARM_UP_TOKENS)
    results = []
    for prompt in prompts:
        with step(f"{prompt.title}: off and on, {trials} times"):
            results.append(compare(loaded, prompt, speculative, max_new_tokens, trials))
    on_gpu = loaded.model.device.type == "cuda"
    return DemoReport(
        model=loaded.name,
        drafter=drafter,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=str(loaded.model.device),
        hardware=torch.cuda.get_device_name(loaded.model.device) if on_gpu else cpu_name(),
        threads=torch.get_num_threads(),
        max_new_tokens=max_new_tokens,
        trials=trials,
        versions=package_versions(),
        results=tuple(results),
        draft_model=draft_model,
    )


def compare(
    loaded: LoadedModel, prompt: DemoPrompt, speculative: Speculative, max_new_tokens: int, trials: int
) -> DemoResult:
    """Decode one prompt off and on in turns, and compare."""
    inputs = encode_prompt(loaded, prompt.text)
    pairs = [
        (_decode(loaded, inputs, False, max_new_tokens), _decode(loaded, inputs, speculative, max_new_tokens))
        for _ in range(trials)
    ]
    (off, on), difference = _first_difference(loaded, inputs, pairs)
    if on.stats is None:
        raise SpecDecError("`hf_specdec.generate` returned no statistics. Report this with `hf-specdec env`.")
    return DemoResult(
        prompt=prompt,
        text_off=loaded.tokenizer.decode(off.tokens, skip_special_tokens=True),
        text_on=loaded.tokenizer.decode(on.tokens, skip_special_tokens=True),
        num_tokens_off=len(off.tokens),
        num_tokens_on=len(on.tokens),
        tokens_per_second_off=median(pair[0].tokens_per_second for pair in pairs),
        tokens_per_second_on=median(pair[1].tokens_per_second for pair in pairs),
        speedup=median(on.tokens_per_second / off.tokens_per_second for off, on in pairs),
        stats=on.stats.to_dict(),
        difference=difference,
    )


@dataclass(frozen=True, slots=True)
class _Decoded:
    """One run of one side."""

    tokens: list[int]
    seconds: float
    stats: SpecStats | None

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def _decode(loaded: LoadedModel, inputs: Any, speculative: Speculative, max_new_tokens: int) -> _Decoded:
    """Decode greedily and time it, prefill included."""
    import hf_specdec

    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    start = now(loaded.model.device)
    if speculative is False:
        output = loaded.model.generate(**inputs, **options)
    else:
        output = hf_specdec.generate(loaded.model, **inputs, **options, speculative=speculative)
    seconds = now(loaded.model.device) - start
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return _Decoded(tokens=tokens, seconds=seconds, stats=None if speculative is False else output.spec_stats)


def _first_difference(
    loaded: LoadedModel, inputs: Any, pairs: Sequence[tuple[_Decoded, _Decoded]]
) -> tuple[tuple[_Decoded, _Decoded], Difference | None]:
    """Return the first pair that differs, and where; else the last pair and `None`."""
    for pair in pairs:
        difference = find_difference(loaded.model, inputs["input_ids"], pair[0].tokens, pair[1].tokens)
        if difference is not None:
            return pair, difference
    return pairs[-1], None


def _prompt_from_record(record: dict[str, Any]) -> DemoPrompt:
    kept = {name: record[name] for name in ("id", "title", "lang", "license", "source")}
    return DemoPrompt(text=record["turns"][0], **kept)
