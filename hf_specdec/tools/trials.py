"""Runs of several methods on the same prompts, in turns.

One prompt (or batch of prompts) is decoded plain, A, plain, B, plain, A, plain, B, plain …: every run of a method has a
plain run right before and right behind it, and is compared with the mean of these two. A machine that becomes slower or
faster meanwhile so meets both sides. The plain runs also tell how much the machine's own speed varies: their spread
decides whether a ratio means anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import hf_specdec

from ..config import SpecConfig
from ..drafters import draft_model, recycling
from ..engine import length
from ..stats import StepEvent
from .costs import ArrivalStreamer
from .differences import Difference, find_difference
from .loading import LoadedModel, end_tokens, pad_token
from .timing import now, relative_spread


SWITCH = "HF_SPECDEC_DISABLE"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to decode.

    Attributes:
        name: Its name in tables.
        speculative: What our loop is given as `speculative=`; `None` is Transformers' own loop.
        options: More arguments for `generate`.
    """

    name: str
    speculative: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether it runs our loop."""
        return self.speculative is not None


PLAIN = Method("plain")


@dataclass(frozen=True, slots=True)
class Run:
    """One call of `generate`.

    Attributes:
        seconds: Wall time, prompt included.
        tokens: New tokens of each row, up to and with its end token.
        arrivals: For each row when tokens arrived, in seconds from the start, and how many at once.
        events: The rounds of our loop, the prefill first.
        forward_seconds: What the forwards of these rounds took when they were replayed alone; `None` if they weren't.
        stats: Our loop's statistics, as plain JSON types.
    """

    seconds: float
    tokens: tuple[tuple[int, ...], ...]
    arrivals: tuple[tuple[tuple[float, int], ...], ...] = ()
    events: tuple[StepEvent, ...] = ()
    stats: Mapping[str, Any] | None = None
    forward_seconds: float | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.tokens))

    @property
    def seconds_per_token(self) -> float:
        """Wall time ÷ new tokens of all rows."""
        return self.seconds / max(self.num_tokens, 1)

    @property
    def first_token(self) -> float | None:
        """Seconds to the first token; `None` where no arrivals were seen."""
        return min((row[0][0] for row in self.arrivals if row), default=None)

    @property
    def block_gaps(self) -> list[float]:
        """Seconds from one arrival to the next, of every row."""
        return [after[0] - before[0] for row in self.arrivals for before, after in pairwise(row)]

    @property
    def token_gaps(self) -> list[float]:
        """Seconds from one token to the next, of every row: 0 between tokens that arrive at once."""
        gaps: list[float] = []
        for row in self.arrivals:
            gaps += [0.0] * (row[0][1] - 1) if row else []
            for before, after in pairwise(row):
                gaps += [after[0] - before[0], *[0.0] * (after[1] - 1)]
        return gaps


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of a method, and the index of the plain run before it; the next plain run came right behind."""

    before: int
    run: Run


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt or one batch of prompts, decoded by every method.

    Attributes:
        batch: Rows.
        category: The prompts' category.
        prompts: Their ids.
        prompt_tokens: Their lengths.
        plain: The plain runs, in order.
        trials: The runs of each method that didn't fail.
        differences: For each method and row the first difference from plain decoding, `None` where there is none.
    """

    batch: int
    category: str
    prompts: tuple[str, ...]
    prompt_tokens: tuple[int, ...]
    plain: tuple[Run, ...]
    trials: Mapping[str, tuple[Trial, ...]]
    differences: Mapping[str, tuple[Difference | None, ...]] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """How much the plain runs differ: interquartile range ÷ median of their seconds."""
        return relative_spread([run.seconds for run in self.plain])

    def speedup(self, method: str) -> float:
        """Median over the trials of plain ÷ method, in seconds a token; plain is the mean of both neighbours."""
        return median(self._plain(trial) / trial.run.seconds_per_token for trial in self.trials[method])

    def ideal(self, method: str) -> float | None:
        """Median over the trials of the speed-up if the loop around the forwards cost nothing."""
        ideals = [
            self._plain(trial) * trial.run.num_tokens / alone
            for trial in self.trials[method]
            if (alone := trial.run.forward_seconds)
        ]
        return median(ideals) if ideals else None

    def _plain(self, trial: Trial) -> float:
        """Seconds a token of the plain runs around a trial."""
        return fmean(run.seconds_per_token for run in self.plain[trial.before : trial.before + 2])


class Learnt:
    """What was learnt about a model when this was made: draft lengths, costs, successors of tokens, draft models' worth.

    `restore` before each run: the repetitions of a prompt would otherwise know it from the runs before, which no user's
    first call does.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.lengths, self.successors = length.snapshot(model), recycling.snapshot(model)
        self.calibrations = draft_model.snapshot(model)

    def restore(self) -> None:
        """Forget what was learnt since."""
        length.restore(self.model, self.lengths)
        recycling.restore(self.model, self.successors)
        draft_model.restore(self.model, self.calibrations)


def interleave(
    run: Callable[[Method], Run], methods: Sequence[Method], trials: int, failed: dict[str, str]
) -> tuple[tuple[Run, ...], dict[str, tuple[Trial, ...]]]:
    """Run methods in turns, with a plain run around each.

    Args:
        run: Decodes with a method.
        methods: The methods, plain decoding not among them.
        trials: Runs of each.
        failed: Methods that are left out, by name, with the reason. One that raises is added, and its runs are dropped.

    Returns:
        The plain runs, in order, and the trials of each method.
    """
    plain = [run(PLAIN)]
    found: dict[str, list[Trial]] = {method.name: [] for method in methods if method.name not in failed}
    for _ in range(trials):
        for method in methods:
            if method.name in failed:
                continue
            try:
                found[method.name].append(Trial(len(plain) - 1, run(method)))
            except Exception as error:
                failed[method.name] = reason(error)
                del found[method.name]
                continue
            plain.append(run(PLAIN))
    return tuple(plain), {name: tuple(runs) for name, runs in found.items()}


def reason(error: Exception) -> str:
    """One line that says what went wrong."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def decode(loaded: LoadedModel, inputs: Mapping[str, Any], method: Method, max_new_tokens: int) -> Run:
    """Decode a batch greedily and time it, prompt included.

    Tokens of plain decoding are seen by a streamer, those of our loop by `on_step`; both cost microseconds a token.

    Args:
        loaded: The model.
        inputs: `input_ids` and `attention_mask`, padded on the left.
        method: How.
        max_new_tokens: Most tokens a row.
    """
    model = loaded.model
    rows, width = inputs["input_ids"].shape
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": pad_token(loaded)}
    options |= method.options
    if not method.ours:
        began = now(model.device)
        streamer = ArrivalStreamer(rows)
        with transformers_alone():
            output = model.generate(**inputs, **options, streamer=streamer)
        seconds = now(model.device) - began
        tokens = _new_tokens(output, width, end_tokens(loaded))
        return Run(seconds, tokens, _by_row(streamer.arrivals, tokens))
    watch = _Watch(rows)
    config = SpecConfig.from_argument(method.speculative)
    assert config is not None
    began = now(model.device)
    watch.began = time.perf_counter()
    output = hf_specdec.generate(model, **inputs, **options, speculative=replace(config, on_step=watch))
    seconds = now(model.device) - began
    stats = hf_specdec.last_stats(model)
    return Run(
        seconds,
        _new_tokens(output, width, end_tokens(loaded)),
        tuple(map(tuple, watch.arrivals)) if watch.events else (),
        tuple(watch.events),
        None if stats is None else stats.to_dict(),
    )


@contextmanager
def transformers_alone() -> Iterator[None]:
    """Keep `model.generate` from our loop, also where `enable()` was called."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def first_differences(
    loaded: LoadedModel, inputs: Mapping[str, Any], plain: Sequence[Run], trials: Sequence[Trial]
) -> tuple[Difference | None, ...]:
    """For each row where a method's text first leaves plain decoding's, in the first trial in which it does."""
    found: list[Difference | None] = []
    for row, (ids, real) in enumerate(zip(inputs["input_ids"], inputs["attention_mask"], strict=True)):
        pairs = ((plain[trial.before].tokens[row], trial.run.tokens[row]) for trial in trials)
        off, on = next(((off, on) for off, on in pairs if off != on), ((), ()))
        found.append(find_difference(loaded.model, ids[real.bool()][None], off, on))
    return tuple(found)


class _Watch:
    """Listens to our loop's rounds."""

    def __init__(self, rows: int) -> None:
        self.began = 0.0
        self.arrivals: list[list[tuple[float, int]]] = [[] for _ in range(rows)]
        self.events: list[StepEvent] = []

    def __call__(self, event: StepEvent) -> None:
        seconds = time.perf_counter() - self.began
        for row, emitted in zip(event.rows, event.emitted, strict=True):
            if emitted:
                self.arrivals[row].append((seconds, len(emitted)))
        self.events.append(event)


def _new_tokens(output: Any, prompt: int, ends: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The new tokens of each row, up to and with its end token."""
    rows = []
    for row in output[:, prompt:].tolist():
        stop = next((index for index, token in enumerate(row) if token in ends), len(row))
        rows.append(tuple(row[: stop + 1]))
    return tuple(rows)


def _by_row(
    arrivals: Sequence[tuple[float, int]], tokens: Sequence[Sequence[int]]
) -> tuple[tuple[tuple[float, int], ...], ...]:
    """Arrivals of each row; what comes behind a row's end is padding."""
    found = []
    for row in tokens:
        left, own = len(row), []
        for seconds, count in arrivals:
            if left > 0:
                own.append((seconds, min(count, left)))
                left -= count
        found.append(tuple(own))
    return tuple(found)
