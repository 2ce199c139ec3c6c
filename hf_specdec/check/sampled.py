"""Does sampling with speculation keep the target's distribution? Tested on the tokens that it emits.

Two sampled texts can't be compared. Instead the target scores what speculation wrote, in plain forwards over the finished
texts: under the distributions that plain decoding would have drawn from, the tokens must look like draws.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hf_specdec

from ..config import SpecConfig
from ..drafters import NEEDS_MODEL, model_of
from ..errors import SpecDecError
from ..selection import automatic
from ..selection.load import load_draft
from ..stats import StepEvent
from ..tools.differences import HALF_PRECISION
from ..tools.loading import LoadedModel, end_tokens, pad_batch, pad_token
from ..tools.suites import BenchPrompt
from .evidence import Evidence, places, rounds_are_free
from .plain import encoded, logits_behind, processed, processors_of, variants
from .significance import ALPHA, POWER, StatisticalTest, judged, library


Tell = Callable[[str, int, int], None]
DEFAULT_TOKENS = 2000
RERUN = 4  # times as many tokens where a first look finds something
CERTAIN = 1e-9  # p-value that needs no more tokens
LEAST_TOKENS, LEAST_DRAFTED = 500, 100  # for a pass to mean something


@dataclass(frozen=True, slots=True)
class SampledResult:
    """Whether speculation kept the sampling distribution.

    Attributes:
        verdict: `"pass"`, `"fail"` or `"too few tokens"`.
        reasons: Why it isn't a pass, one sentence each.
        temperature: Temperature of the sampling.
        tokens: Tokens that the verdict is about.
        tests: The tests on them.
        rerun: Whether a first sample looked off, so that the verdict is about a fresh one.
        false_alarm: Chance that a lossless run fails.
        power: What is found how surely: `probability` (0.9), and for each kind of deviation the smallest that is found
            with it, `None` where it can't be told. `draft_share`: how much too often or too seldom the draft's tokens
            are emitted, as a share of all tokens; `top_share`: the same for the target's most likely token;
            `total_variation`: largest distance of the distribution functions, along one of the orders.
        num_draft_tokens: Draft tokens that were verified.
        num_accepted_draft_tokens: How many of them were accepted.
        seed: Seed of the run.
    """

    verdict: str
    reasons: tuple[str, ...]
    temperature: float
    tokens: int
    tests: tuple[StatisticalTest, ...]
    rerun: bool
    false_alarm: float
    power: dict[str, float | None]
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    seed: int

    @property
    def passed(self) -> bool:
        """Whether no deviation was found with enough tokens."""
        return self.verdict == "pass"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        return asdict(self)


def check_sampled(
    loaded: LoadedModel, prompts: Sequence[BenchPrompt], config: SpecConfig, *, tokens: int = DEFAULT_TOKENS,
    temperature: float = 1.0, seed: int = 0, batch_size: int = 8, max_new_tokens: int = 64, tell: Tell | None = None,
) -> SampledResult:  # fmt: skip
    """Sample with speculation and test whether the tokens follow the target's distribution.

    Where a test finds something, a fresh sample decides: both must fail for a failure. It is four times as large, or ends
    early where nothing is left to doubt.

    Args:
        loaded: The target and its tokenizer.
        prompts: What to continue, over and over until there are enough tokens.
        config: The user's settings of speculation; the seed is replaced, and with an adaptive draft length every second
            batch has a fixed one, as in `check_greedy`.
        tokens: How many tokens to look at, roughly; up to four times as many again where the first look finds something.
        temperature: Temperature of the sampling; other settings are the model's own (`generation_config`).
        seed: Seed of the run. With a fixed draft length the same seed gives the same result.
        batch_size: Texts to decode at once.
        max_new_tokens: Most tokens a text.
        tell: Called with what is done now, how many tokens are done, and how many there are.

    Raises:
        SpecDecError: If there are no prompts, the temperature isn't positive, or SciPy isn't installed.
    """
    if not temperature > 0:
        raise SpecDecError(f"`temperature` must be above 0, got {temperature}. Greedy decoding is checked on its own.")
    library()
    rows = encoded(loaded, prompts)
    options = {"do_sample": True, "temperature": temperature, "max_new_tokens": max_new_tokens}
    sample = _Sample(loaded, rows, config, options | {"pad_token_id": pad_token(loaded)}, batch_size, tell)
    sample.draw(tokens, seed, 0)
    tests = judged(sample.evidence.tests())
    rerun = not all(test.passed for test in tests)
    if rerun:
        sample.draw(RERUN * tokens, seed, 1)
        tests = judged(sample.evidence.tests())
    failed = [test for test in tests if not test.passed]
    reasons = [f"{test.name}: {test.statistic:.3g} over {test.n} tokens (p = {test.p_value:.1g})." for test in failed]
    power = sample.evidence.power()
    few = sample.too_little(power)
    verdict = "fail" if failed else ("too few tokens" if few else "pass")
    return SampledResult(
        verdict, tuple(reasons or few), temperature, sample.evidence.tokens, tests, rerun, ALPHA * ALPHA,
        {"probability": POWER, **power}, sample.drafted, sample.accepted, seed,
    )  # fmt: skip


class _Sample:
    """Texts sampled with speculation, and what the target says of them."""

    def __init__(
        self, loaded: LoadedModel, rows: Sequence[Tensor], config: SpecConfig, options: dict[str, Any], batch_size: int,
        tell: Tell | None,
    ) -> None:  # fmt: skip
        self.loaded, self.rows, self.options, self.batch_size, self.tell = loaded, rows, options, batch_size, tell
        if isinstance(config.seed, tuple):  # which makes verification coupled
            config = replace(config, verification="coupled")
        self.draft = _draft_of(loaded.model, config)
        self.free = rounds_are_free(config, self.draft)
        self.settings = variants(config)
        self.processors = [processors_of(loaded.model, row, **options) for row in rows]

    def draw(self, tokens: int, seed: int, look: int) -> None:
        """Forget what was drawn, and draw afresh.

        Args:
            tokens: How many tokens at least.
            seed: Seed of the run.
            look: Number of the sample: each has its own randomness.
        """
        half = self.loaded.model.dtype in HALF_PRECISION
        self.drafted = self.accepted = 0
        self.fallbacks: list[str] = []
        self.evidence = Evidence(half, self.free, torch.Generator().manual_seed(_seed(seed, look, 0)))
        number, queue = 0, itertools.cycle(range(len(self.rows)))
        while self.evidence.tokens < tokens and not (look and self._certain(tokens // RERUN)):
            if self.tell is not None:
                title = "sampled: a second look" if look else "sampled: with speculation"
                self.tell(title, self.evidence.tokens, tokens)
            number += 1
            self._batch(list(itertools.islice(queue, self.batch_size)), number, _seed(seed, look, number))
        if self.tell is not None:
            self.tell("sampled: with speculation", tokens, tokens)

    def _batch(self, chosen: Sequence[int], number: int, seed: int) -> None:
        """Sample one batch and look at its tokens."""
        model, events = self.loaded.model, list[StepEvent]()
        inputs = pad_batch(self.loaded, [self.rows[index] for index in chosen])
        config = replace(self.settings[number % len(self.settings)], seed=seed, on_step=events.append)
        output = hf_specdec.generate(model, **inputs, **self.options, speculative=config)
        stats = hf_specdec.last_stats(model)
        if stats is not None:
            self.drafted += stats.num_draft_tokens
            self.accepted += stats.num_accepted_draft_tokens
            self.fallbacks += [stats.fallback_reason] if stats.fallback_reason else []
        ends = end_tokens(self.loaded)
        texts = [_up_to_end(row, ends) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]
        for index, text, where in zip(chosen, texts, places(events, list(map(len, texts))), strict=True):
            prompt, processors = self.rows[index], self.processors[index]
            scores = processed(logits_behind(model, prompt, text), prompt, text, processors)
            draft_scores = None
            if self.draft is not None:
                logits = _fitted(logits_behind(self.draft, prompt, text), scores)
                draft_scores = processed(logits, prompt, text, processors)
            self.evidence.add(scores, text, where, draft_scores)

    def _certain(self, least: int) -> bool:
        """Whether so many tokens were looked at, and a test failed beyond doubt."""
        enough = self.evidence.tokens >= least
        return enough and any(test.p_value < CERTAIN for test in self.evidence.tests())

    def too_little(self, power: dict[str, float | None]) -> list[str]:
        """Why a pass would mean nothing."""
        found = []
        if self.evidence.tokens < LEAST_TOKENS:
            found.append(f"{self.evidence.tokens} tokens were looked at; {LEAST_TOKENS} are needed.")
        if self.drafted < LEAST_DRAFTED:
            why = f" ({self.fallbacks[0]})" if self.fallbacks else ""
            found.append(f"{self.drafted} draft tokens were verified{why}; {LEAST_DRAFTED} are needed.")
        if power["draft_share"] is None and power["top_share"] is None:
            found.append("The target is nearly certain of every token; a higher temperature would show more.")
        return found


def _seed(*parts: int) -> int:
    """A seed of 62 bits that differs for all parts."""
    return int(np.random.SeedSequence([part % 2**63 for part in parts]).generate_state(1, np.uint64)[0] >> 2)


def _up_to_end(text: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to and with the first that ends a text."""
    stop = next((index for index, token in enumerate(text) if token in ends), len(text))
    return list(text[: stop + 1])


def _fitted(logits: Tensor, like: Tensor) -> Tensor:
    """The draft's logits over the target's ids: ids beyond either can't be drafted."""
    missing = max(like.shape[1] - logits.shape[1], 0)
    padded = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return padded[:, : like.shape[1]].to(like.device)


def _draft_of(model: Any, config: SpecConfig) -> nn.Module | None:
    """The draft model that settings lead to, or `None`. What it says is never trusted: tests only gain power by it."""
    if not isinstance(config.drafter, str) and config.drafter is not None:
        return model_of(config.drafter)
    if config.drafter not in (None, *NEEDS_MODEL):
        return None
    try:
        if automatic.is_wanted(config):
            draft = automatic.draft_for(model, config)
        elif isinstance(config.draft_model, (str, os.PathLike)):
            draft = load_draft(model, os.fspath(config.draft_model), config.draft_device)
        else:
            draft = config.draft_model
    except SpecDecError:  # the generation says it better
        return None
    return draft if isinstance(draft, nn.Module) else None
