"""What forwards cost by themselves, by how many tokens they read.

Everything is measured in one block, each thing once a pass and pass after pass, so that a change in the machine's load
meets all of them; figures are medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from transformers.generation import BaseStreamer

from ..engine import forward
from ..engine.forward import RowModel
from ..engine.graphs import CAPTURE_AFTER
from .timing import now


PASSES = 3
STEPS = 6  # tokens of a plain generation whose inter-token times are taken
CURVE_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of isolated forwards.

    Attributes:
        rows: Rows of the batch.
        context: Tokens of the longest row that the steps and forwards had behind them.
        plain_step: Plain `generate`, from one token to the next.
        forward: The loop's forward by how many tokens it reads, in all rows together.
        draft_step: The draft model's forward over one token a row; `None` without a draft model.
    """

    rows: int
    context: int
    plain_step: float
    forward: dict[int, float]
    draft_step: float | None = None


class ArrivalStreamer(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens arrive.

    Attributes:
        arrivals: Time (seconds since the streamer was made) and tokens a row of every `put` behind the prompt's.
    """

    def __init__(self, rows: int = 1) -> None:
        self.rows, self.began = rows, time.perf_counter()
        self.arrivals: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        """Note the time."""
        if self._prompt_seen:
            self.arrivals.append((time.perf_counter() - self.began, value.numel() // self.rows))
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def measure_costs(
    model: Any, inputs: Mapping[str, Any], answers: Sequence[Sequence[int]], tokens: Sequence[int],
    draft: Any = None, options: Mapping[str, Any] | None = None, passes: int = PASSES,
) -> Costs | None:  # fmt: skip
    """Measure isolated forwards around one batch of prompts.

    Args:
        model: The target.
        inputs: `input_ids` and `attention_mask`, padded on the left.
        answers: The tokens that plain decoding gave each row. Steps are measured in the middle of them.
        tokens: How many tokens, in all rows together, the forwards read; rounded up to whole rows.
        draft: The draft model, if there is one.
        options: More arguments of plain `generate`.
        passes: How often each is measured; the median counts.

    Returns:
        The costs, or `None` where the answers are too short to measure a step, or the model can't run in the loop.
    """
    half = max(map(len, answers)) // 2
    if 2 * half < STEPS or forward.unsupported_reason(model):
        return None
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    middle = torch.zeros(len(answers), half, dtype=ids.dtype, device=ids.device)
    for row, answer in enumerate(answers):
        middle[row, : len(answer)] = torch.tensor(answer[:half], device=ids.device)
    later = {
        "input_ids": torch.cat([ids, middle], 1),
        "attention_mask": torch.cat([mask, torch.ones_like(middle)], 1),
    }
    texts = real_tokens(later)
    sizes = sorted({len(texts) * max(-(-size // len(texts)), 1) for size in tokens})
    options = {"do_sample": False} | dict(options or {})
    with torch.no_grad():
        behind = _Behind(model, texts)
        measured: dict[str, Callable[[], float]] = {"plain_step": lambda: _plain_step(model, later, options)}
        for size in sizes:
            measured[f"forward {size}"] = partial(behind.forward, size // len(texts))
        if draft is not None and not forward.unsupported_reason(draft):
            draft_behind = _Behind(draft, _known(draft, texts))
            measured["draft_step"] = lambda: draft_behind.forward(1)
        # the first pass warms up; with graphs the next ones run eagerly, one captures, and one replays for the first time
        warm_up = 1 if behind.runner.fast is None else CAPTURE_AFTER + 2
        found = [{name: measure() for name, measure in measured.items()} for _ in range(warm_up + passes)]
    typical = {name: median(each[name] for each in found[warm_up:]) for name in measured}
    forwards = {size: typical.pop(f"forward {size}") for size in sizes}
    return Costs(rows=len(texts), context=max(map(len, texts)), forward=forwards, **typical)


class _Behind:
    """Forwards behind some texts; their tokens are never committed, so they can be repeated."""

    def __init__(self, model: Any, texts: list[list[int]]) -> None:
        self.model, self.texts = model, texts
        self.runner = RowModel(model, len(texts), max(map(len, texts)) + 64)
        self.runner.prefill(texts)

    def forward(self, width: int) -> float:
        """Seconds of a forward of `width` tokens a row."""
        block = torch.tensor([text[-1:] * width for text in self.texts], device=self.model.device)
        return _timed(self.model, lambda: self.runner.forward(block, [width] * len(self.texts)))


def _plain_step(model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """Seconds between two tokens of plain decoding."""
    streamer = ArrivalStreamer(len(inputs["input_ids"]))
    model.generate(**inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, streamer=streamer, **options)
    times = [seconds for seconds, _ in streamer.arrivals]
    return median(after - before for before, after in pairwise(times))


def _timed(model: Any, run: Callable[[], Any]) -> float:
    began = now(model.device)
    run()
    return now(model.device) - began


def real_tokens(inputs: Mapping[str, Any]) -> list[list[int]]:
    """The real tokens of each row."""
    rows = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [ids[keep.bool()].tolist() for ids, keep in rows]


def _known(draft: Any, texts: list[list[int]]) -> list[list[int]]:
    """The texts without ids that the draft model doesn't have."""
    size = draft.get_input_embeddings().num_embeddings
    return [[min(token, size - 1) for token in text] for text in texts]
