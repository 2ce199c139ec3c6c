"""Off, then on: one prompt decoded by plain `generate` and by ours, alone on the device, every token with its time.

The two runs never compete: they follow each other, in the same process, with the same settings and the same seed. What
the page shows while they run takes a little from both.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import TemperatureLogitsWarper
from transformers.generation.streamers import BaseStreamer

import hf_specdec

from ..config import SpecConfig
from ..engine.noise import Noise, row_keys
from ..errors import SpecDecError
from ..stats import SpecStats, StepEvent
from ..tools.bench import WARM_UP_PROMPT, WARM_UP_TOKENS
from ..tools.differences import Difference, find_difference
from ..tools.loading import LoadedModel, encode_prompt
from ..tools.timing import now
from ..tools.trials import Learnt, transformers_alone
from .detokenizer import Detokenizer
from .models import Family, conditions
from .settings import Limits, RunSettings
from .timeline import Comparison, Round, Side, Token
from .worker import worker


UPDATE_SECONDS = 0.3  # between two looks at a run, at least
UPDATE_SHARE = 0.015  # of a run's time that showing it may take: looks are rarer where a look takes long
MOST_WARM_UP_PROMPT = 256  # tokens: it is ours, so a limit for visitors is none for it
TREES = "recycling"  # the source whose drafts have branches

_DEVICE = threading.Lock()  # one run at a time, whoever asks


def record(
    family: Family, settings: RunSettings, limits: Limits, title: str = "own prompt"
) -> Iterator[tuple[str, Comparison]]:
    """Run both sides, and tell how far they are.

    Closing the generator stops the run; the device is free when that returns, a token later, or a layer later in the check.

    Args:
        family: The models.
        settings: Checked settings.
        limits: How long a side may take, and how long a prompt may be.
        title: What the run is called.

    Yields:
        A stage (`"loading"`, `"warm-up"`, `"off"`, `"on"`, `"checking"`, `"done"`) and the comparison so far, the same
        object each time.

    Raises:
        SpecDecError: If the models can't be had, the prompt is too long, or there is too little memory.
    """
    found = Comparison(Side(), Side(), _public(settings), family.name, "", title=title, checked=False)
    yield "loading", found
    try:
        with _DEVICE:
            yield from _recorded(family, settings, limits, found)
    except SpecDecError:
        raise
    except Exception as error:
        raise _explained(error, settings) from error
    yield "done", found


def _recorded(
    family: Family, settings: RunSettings, limits: Limits, found: Comparison
) -> Iterator[tuple[str, Comparison]]:
    """What `record` does while it has the device."""
    loaded, draft = family.load()
    found.conditions = conditions(loaded, family.dtype)
    found.settings["chat"] = settings.chat and loaded.tokenizer.chat_template is not None
    runner = _Runner(loaded, draft, settings, limits)
    if settings.way not in family.warmed:
        yield "warm-up", found
        own = replace(settings, prompt=WARM_UP_PROMPT)
        first = _Runner(loaded, draft, own, replace(limits, prompt_tokens=MOST_WARM_UP_PROMPT))
        for speculative in (False, True):
            for _ in first.run(Side(), speculative, limits.new_tokens, stop_at=WARM_UP_TOKENS):
                yield "warm-up", found
        family.warmed[settings.way] = Learnt(loaded.model)
    runner.before = family.warmed[settings.way]
    for stage, side in (("off", found.off), ("on", found.on)):
        most = len(found.off.tokens) if stage == "on" and found.off.cut else settings.max_new_tokens
        for _ in runner.run(side, stage == "on", most):
            yield stage, found
    yield "checking", found
    for _ in runner.check(found):
        yield "checking", found
    found.checked = True


def _public(settings: RunSettings) -> dict[str, Any]:
    """The settings, the prompt too: what is recorded stays with the visitor who asked."""
    return {name: getattr(settings, name) for name in settings.__slots__}


class CoupledNoise(LogitsProcessor):  # type: ignore[misc]
    """Sampling for plain `generate`: the highest score plus the noise that `verification="coupled"` uses.

    Adding Gumbel noise and taking the highest is sampling, so a greedy `generate` with this behind the warpers samples,
    and with the same seed it chooses the same text as ours.
    """

    def __init__(self, seed: int, prompt: list[int]) -> None:
        self.noise, self.begin = Noise(seed, row_keys([prompt])), len(prompt)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Add the noise of this position to the scores, `[1, vocabulary]`."""
        place = [input_ids.shape[1] - self.begin]
        return scores.float() + self.noise.gumbel([0], place, 1, scores.shape[1], scores.device)[:, 0]


class _Until(StoppingCriteria):  # type: ignore[misc]
    """Stop at a time, behind so many tokens, or when nobody watches any more."""

    def __init__(self, seconds: float, tokens: float = math.inf) -> None:
        self.end, self.tokens, self.reason = time.monotonic() + seconds, tokens, ""
        self.times = list[float]()  # of every token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        if time.monotonic() > self.end:
            self.reason = "time limit"
        elif len(self.times) >= self.tokens:
            self.reason = "token limit"
        return torch.full((input_ids.shape[0],), bool(self.reason), device=input_ids.device)


class _StoppedError(Exception):
    """Nobody waits for the check any more."""


@contextmanager
def _stoppable(model: Any, stopped: threading.Event) -> Iterator[None]:
    """Let an event end a forward at the next layer: over a whole answer one may take seconds."""

    def look(module: Any, given: Any) -> None:
        if stopped.is_set():
            raise _StoppedError

    hooks = [module.register_forward_pre_hook(look) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Listener(BaseStreamer):  # type: ignore[misc]
    """Passes a plain run's tokens on, one at a time; the first thing it gets is the prompt."""

    def __init__(self, take: Callable[[list[int]], None]) -> None:
        self.take, self.is_prompt = take, True

    def put(self, value: torch.Tensor) -> None:
        if not self.is_prompt:
            self.take(value.flatten().tolist())
        self.is_prompt = False

    def end(self) -> None:
        """There is nothing to do."""


class _Runner:
    """One prompt on one model."""

    def __init__(self, loaded: LoadedModel, draft: Any, settings: RunSettings, limits: Limits) -> None:
        self.loaded, self.draft, self.settings, self.limits = loaded, draft, settings, limits
        self.before: Learnt | None = None  # what a run may know
        self._drafted: dict[int, tuple[int, ...]] = {}  # each round's draft
        self.inputs = encode_prompt(loaded, settings.prompt, chat=None if settings.chat else False)
        self.prompt: list[int] = self.inputs["input_ids"][0].tolist()
        if len(self.prompt) > limits.prompt_tokens:
            raise SpecDecError(
                f"The prompt has {len(self.prompt):,} tokens; at most {limits.prompt_tokens:,} are taken here. Shorten it."
            )

    def run(self, side: Side, speculative: bool, most: int, stop_at: float = math.inf) -> Iterator[None]:
        """Decode in a thread, and fill the side; yields now and then, and at the end. Raises what the thread did.

        Args:
            side: What to fill.
            speculative: Which side it is.
            most: Most tokens.
            stop_at: Stop behind so many all the same. To whoever plans by `most`, such as the measurement of costs, a
                warm-up is then as long as any run that follows.
        """
        news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if speculative and self.before is not None:  # else it would know this prompt from an earlier run
            self.before.restore()
        until = _Until(self.limits.seconds, stop_at)
        words = Detokenizer(self.loaded.tokenizer)
        start = now(self.loaded.model.device)

        def seconds() -> float:
            return time.perf_counter() - start

        def work() -> None:
            try:
                stats = self._generate(speculative, most, until, lambda at, what: news.put((at - start, what)))
                news.put((now(self.loaded.model.device) - start, stats))
            except BaseException as error:
                news.put((seconds(), error))

        decoding = worker().submit(work)
        try:
            due = UPDATE_SECONDS
            while not side.done:
                with suppress(queue.Empty):
                    self._take(side, words, *news.get(timeout=max(due - seconds(), 0.0)))
                if side.done or seconds() >= due:
                    if not side.done:
                        side.seconds = seconds()
                    began = seconds()
                    yield
                    due = seconds() + max(UPDATE_SECONDS, (seconds() - began) / UPDATE_SHARE)
        finally:
            until.end = 0.0  # if whoever watched has gone, the device is free a token later
            wait([decoding])
        side.cut = until.reason if len(side.tokens) < most else ""

    def check(self, found: Comparison) -> Iterator[None]:
        """Compare the texts and look probabilities up, in a thread; yields now and then. Raises what the thread did."""
        stopped = threading.Event()

        def work() -> None:
            with _stoppable(self.loaded.model, stopped):
                if found.complete:
                    self.compare(found)
                for side in (found.off, found.on):
                    if side.tokens:
                        self.add_probabilities(side)

        checking = worker().submit(work)
        try:
            while wait([checking], UPDATE_SECONDS).not_done:
                yield
        finally:
            stopped.set()
            wait([checking])
        checking.result()

    def compare(self, found: Comparison) -> None:
        """Say where the texts part, if they do."""
        off, on = ([token.id for token in side.tokens] for side in (found.off, found.on))
        if off == on:
            return
        difference = find_difference(self.loaded.model, self.inputs["input_ids"], off, on)
        assert difference is not None
        if self.settings.temperature and difference.gap is not None:
            difference = self._sampled(difference, off)
        found.difference, found.near_tie = str(difference), difference.near_tie

    def _sampled(self, difference: Difference, off: list[int]) -> Difference:
        """A difference with the gap that chose there: of logits / temperature, the position's noise added."""
        text = torch.tensor([self.prompt + off[: difference.index]], device=self.loaded.model.device)
        with torch.inference_mode():
            logits = self.loaded.model(text, logits_to_keep=1).logits[:, -1].float() / self.settings.temperature
        scores = CoupledNoise(self.settings.seed, self.prompt)(text, logits)[0]
        gap = float(scores.max() - scores[difference.token_on])
        return replace(difference, gap=gap, band=difference.band / self.settings.temperature)

    def add_probabilities(self, side: Side) -> None:
        """What the target gives every token of an answer, in one forward over it; and the first draft token it refused."""
        ids = [token.id for token in side.tokens]
        text = torch.tensor([self.prompt + ids], device=self.loaded.model.device)
        with torch.inference_mode():
            logits = self.loaded.model(text, logits_to_keep=len(ids) + 1).logits[0, :-1].float()
        probabilities = torch.softmax(logits / (self.settings.temperature or 1.0), -1)
        for token, row in zip(side.tokens, probabilities, strict=True):
            token.probability = round(float(row[token.id]), 4)
        for each in side.rounds:
            at = each.first + each.accepted
            if not each.is_tree and each.accepted < len(each.drafted) and at < len(ids):
                refused = self._drafted[each.step][each.accepted]
                each.rejected = round(float(probabilities[at, refused]), 4)

    def _generate(
        self, speculative: bool, most: int, until: _Until, tell: Callable[[float, Any], None]
    ) -> dict[str, Any]:
        """One answer, at once; returns `SpecStats.to_dict()`, empty without speculation.

        Args:
            speculative: Which side.
            most: Most tokens.
            until: When to stop.
            tell: Given the time and what there is: new ids, or a round's `StepEvent`.
        """
        options: dict[str, Any] = {"max_new_tokens": most, "stopping_criteria": StoppingCriteriaList([until])}
        settings, model = self.settings, self.loaded.model
        if not speculative:
            options |= {"do_sample": False, "streamer": _Listener(lambda ids: tell(time.perf_counter(), ids))}
            if settings.temperature:
                noise = CoupledNoise(settings.seed, self.prompt)
                warpers = [TemperatureLogitsWarper(settings.temperature), noise]
                options["logits_processor"] = LogitsProcessorList(warpers)
            with transformers_alone():
                model.generate(**self.inputs, **options)
            return {}
        if settings.temperature:
            options |= {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
        else:
            options["do_sample"] = False
        config = self._config(lambda event: tell(time.perf_counter(), event))
        output = hf_specdec.generate(model, **self.inputs, **options, speculative=config, return_dict_in_generate=True)
        off = SpecStats(fallback_reason="HF_SPECDEC_DISABLE is set")
        stats = getattr(output, "spec_stats", None) or off
        if not stats.num_target_forwards:  # decoded plainly, so there were no rounds to tell of
            for at, id in zip(until.times, output.sequences[0, len(self.prompt) :].tolist(), strict=False):
                tell(at, [id])
        shown: dict[str, Any] = stats.to_dict()
        return shown

    def _config(self, on_step: Callable[[StepEvent], None]) -> SpecConfig:
        settings = self.settings
        fixed = settings.num_draft_tokens
        return SpecConfig(
            drafter=None if settings.strategy == "auto" else settings.strategy,
            draft_model=self.draft if settings.strategy in ("auto", "draft_model") else None,
            num_draft_tokens=fixed or None,
            draft_length="fixed" if fixed else "adaptive",
            verification="coupled" if settings.temperature else "auto",
            seed=settings.seed if settings.temperature else None,
            on_step=on_step,
        )

    def _take(self, side: Side, words: Detokenizer, at: float, what: Any) -> None:
        """Put what the thread sent into the side."""
        if isinstance(what, BaseException):
            side.done = True
            raise what
        if isinstance(what, dict):
            side.stats, side.seconds, side.done = what, at, True
            if side.tokens:
                side.tokens[-1].text += words.rest()
        elif isinstance(what, StepEvent):
            self._take_round(side, words, at, what)
        else:
            side.tokens += [Token(id, words.add(id), at) for id in what]

    def _take_round(self, side: Side, words: Detokenizer, at: float, event: StepEvent) -> None:
        drafted, accepted, emitted, source = (
            event.drafted[0], min(event.accepted[0], len(event.emitted[0])), event.emitted[0], event.source[0],
        )  # fmt: skip  # what stood behind the answer's end was not kept
        is_tree = TREES in source
        own = "plain" if not drafted else "own" if is_tree else "bonus" if accepted == len(drafted) else "corrected"
        first = len(side.tokens)
        for place, id in enumerate(emitted):
            kind = "accepted" if place < accepted else own
            side.tokens.append(Token(id, words.add(id), at, kind, event.step, source if kind == "accepted" else ""))
        decode = self.loaded.tokenizer.decode
        texts = [decode([id]) for id in drafted]
        self._drafted[event.step] = drafted
        side.rounds.append(Round(event.step, source, texts, accepted, first, len(emitted), at, is_tree=is_tree))


def _explained(error: Exception, settings: RunSettings) -> SpecDecError:
    """An error of the run, as visitors should read it."""
    text = str(error)
    if (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or "out of memory" in text
        or "allocate memory" in text
    ):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return SpecDecError(
            f"There isn't enough memory for this prompt and {settings.max_new_tokens} new tokens. "
            f"Try a shorter prompt, or {max(settings.max_new_tokens // 2, 1)} new tokens."
        )
    return SpecDecError(f"The run failed: {type(error).__name__}: {text.partition(chr(10))[0][:300]}")
