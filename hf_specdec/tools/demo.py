"""The demo: real prompts, decoded with speculation off and on, compared and timed.

Each prompt is decoded greedily several times, off and on in turns, so that a change in the machine's load meets both
sides. The text of both sides must be the same. Where half precision makes it differ, the report says whether the
target was undecided there: see `Difference`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.resources import files
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SpecDecError
from .environment import cpu_name, package_versions
from .loading import LoadedModel, encode_prompt, load_model


if TYPE_CHECKING:
    from ..stats import SpecStats

SCHEMA_VERSION = 1
WARM_UP_TOKENS = 16
HALF_PRECISION = (torch.bfloat16, torch.float16)
# The gap below which two logits count as a near-tie, at least; rounding in a block of tokens differs from one by one.
NEAR_TIE_FLOOR_HALF = 0.05
NEAR_TIE_FLOOR_FLOAT32 = 1e-4

StepContext = Callable[[str], AbstractContextManager[None]]


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
class Difference:
    """The first place where the two sides differ.

    Attributes:
        index: Index of the token, the prompt not counted.
        token_off: The token without speculation; `None` if that side had ended.
        token_on: The token with speculation; `None` if that side had ended.
        gap: The target's highest logit there minus that of `token_on`, from one plain forward over the text without
            speculation; 0 where that forward agrees with speculation, `None` if one side had ended.
        band: Largest gap that rounding explains: max(0.05, 2 units in the last place of the highest logit), 0.05
            being 0.0001 in float32.
    """

    index: int
    token_off: int | None
    token_on: int | None
    gap: float | None
    band: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap is not None and self.gap <= self.band

    def __str__(self) -> str:
        if self.gap is None:
            return f"one side ended at token {self.index}"
        kind = "near-tie" if self.near_tie else "not a near-tie"
        return f"{kind} at token {self.index}, gap {self.gap:.2g}"


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

    @property
    def speedup(self) -> float:
        """Geometric mean of the prompts' speed-ups."""
        return math.exp(sum(math.log(result.speedup) for result in self.results) / len(self.results))

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
    step: StepContext | None = None,
) -> DemoReport:
    """Decode prompts with speculation off and on, and compare text and speed.

    Args:
        loaded: What `load_demo_model` returned.
        prompts: What to decode; by default `demo_prompts()`.
        max_new_tokens: Most tokens a prompt.
        trials: How often each prompt is decoded on each side.
        drafter: Name of a drafter, or "auto".
        step: Called with a title, gives a context that lasts as long as that step; for progress bars.

    Raises:
        SpecDecError: If an argument is out of range.
    """
    prompts = demo_prompts() if prompts is None else prompts
    if not prompts or max_new_tokens < 1 or trials < 1:
        raise SpecDecError(
            "The demo needs at least one prompt, one new token and one trial; "
            f"got {len(prompts)}, {max_new_tokens} and {trials}."
        )
    step = step or (lambda title: nullcontext())
    speculative = True if drafter == "auto" else drafter
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
    )


def compare(
    loaded: LoadedModel, prompt: DemoPrompt, speculative: bool | str, max_new_tokens: int, trials: int
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


def find_difference(model: Any, prompt_ids: torch.Tensor, off: Sequence[int], on: Sequence[int]) -> Difference | None:
    """Return the first difference between two continuations of a prompt, `None` if they are equal.

    Args:
        model: The target.
        prompt_ids: The prompt, `[1, T]`.
        off: Tokens decoded without speculation.
        on: Tokens decoded with it.
    """
    if list(off) == list(on):
        return None
    shorter = min(len(off), len(on))
    index = next((i for i in range(shorter) if off[i] != on[i]), shorter)
    token_off = off[index] if index < len(off) else None
    token_on = on[index] if index < len(on) else None
    prefix = torch.cat([prompt_ids, prompt_ids.new_tensor([list(off[:index])])], dim=1)
    with torch.inference_mode():
        logits = model(prefix).logits[0, -1].float()  # [V]
    highest = logits.max().item()
    gap = None if token_on is None or token_off is None else highest - logits[token_on].item()
    return Difference(index=index, token_off=token_off, token_on=token_on, gap=gap, band=near_tie_band(model, highest))


def near_tie_band(model: Any, highest_logit: float) -> float:
    """Return the gap that rounding in the model's dtype explains next to a logit of this size."""
    unit = torch.finfo(model.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(highest_logit), 1e-6)))
    floor = NEAR_TIE_FLOOR_HALF if model.dtype in HALF_PRECISION else NEAR_TIE_FLOOR_FLOAT32
    return max(floor, 2 * unit)


@dataclass(frozen=True, slots=True)
class _Decoded:
    """One run of one side."""

    tokens: list[int]
    seconds: float
    stats: SpecStats | None

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def _decode(loaded: LoadedModel, inputs: Any, speculative: bool | str, max_new_tokens: int) -> _Decoded:
    """Decode greedily and time it, prefill included."""
    import hf_specdec

    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    start = _now(loaded.model.device)
    if speculative is False:
        output = loaded.model.generate(**inputs, **options)
    else:
        output = hf_specdec.generate(loaded.model, **inputs, **options, speculative=speculative)
    seconds = _now(loaded.model.device) - start
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


def _now(device: torch.device) -> float:
    """Read the clock when the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _prompt_from_record(record: dict[str, Any]) -> DemoPrompt:
    kept = {name: record[name] for name in ("id", "title", "lang", "license", "source")}
    return DemoPrompt(text=record["turns"][0], **kept)
