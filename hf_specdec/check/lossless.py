"""Is greedy decoding with speculation what plain decoding says? Compared text by text, and at every position.

Comparing texts alone sees only each text's first difference: behind a near-tie the two are about different things. So
every token that speculation emitted is also held against a plain forward over the text that it stands in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import SpecConfig
from ..tools.differences import HALF_PRECISION, Difference, first_difference, near_tie_band
from ..tools.loading import LoadedModel, pad_batch, pad_token
from ..tools.suites import BenchPrompt
from ..tools.trials import PLAIN, Method, decode
from .plain import encoded, logits_behind, processed, processors_of, variants


Tell = Callable[[str, int, int], None]
MOST_STRETCH = 4.0  # bands; real faults are ten and more apart


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where one prompt's text with speculation leaves plain decoding's.

    Attributes:
        prompt: The prompt's id.
        kind: `"tie"`, `"near-tie"` or `"mismatch"`, as in `Difference`.
        difference: Where it is, and how large.
    """

    prompt: str
    kind: str
    difference: Difference


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """Whether speculation kept greedy decoding.

    Attributes:
        verdict: `"exact"`: every text is plain decoding's; `"near-tie"`: some differ where rounding explains it;
            `"fail"`: some differ otherwise, or a token isn't what the target says there.
        reasons: Why it failed, one sentence each.
        texts: Texts compared, one a prompt.
        same: Those that are equal.
        ties: Those that first differ where both tokens' logits are the same number.
        near_ties: Those that first differ where the logits are within the band. In float32 this is a failure.
        mismatches: Those that first differ otherwise.
        tokens: Tokens emitted with speculation, each held against a plain forward over its text.
        off_argmax: How many of them that forward wouldn't choose, but within the band.
        wrong: How many of them are below the highest logit by more than the band.
        worst_gap: Largest gap to the highest logit, of all of these tokens; `None` where it isn't finite.
        plain_worst_gap: The same for plain decoding's own texts, which rounding alone explains.
        band: Largest gap that rounding explains next to the logit of `worst_gap`: that of `Difference`, and in half
            precision, where plain decoding's own tokens are further off, as many times it as they are, 4 at most.
        num_draft_tokens: Draft tokens that were verified: without any, nothing was checked.
        num_accepted_draft_tokens: How many of them were accepted.
        batch_size: Prompts decoded at once.
        dtype: The target's.
        first_differences: Where texts differ.
    """

    verdict: str
    reasons: tuple[str, ...]
    texts: int
    same: int
    ties: int
    near_ties: int
    mismatches: int
    tokens: int
    off_argmax: int
    wrong: int
    worst_gap: float | None
    plain_worst_gap: float | None
    band: float
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    batch_size: int
    dtype: str
    first_differences: tuple[FirstDifference, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing but rounding was found."""
        return self.verdict != "fail"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        return asdict(self)


def check_greedy(
    loaded: LoadedModel, prompts: Sequence[BenchPrompt], config: SpecConfig, *, max_new_tokens: int = 64,
    batch_size: int = 1, tell: Tell | None = None,
) -> GreedyResult:  # fmt: skip
    """Decode prompts greedily without and with speculation and compare.

    With an adaptive draft length every second batch has a fixed one: where drafts don't pay, an adaptive one drafts
    nothing, and nothing would be checked.

    Args:
        loaded: The target and its tokenizer.
        prompts: What to continue.
        config: The user's settings of speculation.
        max_new_tokens: Most tokens a prompt.
        batch_size: Prompts to decode at once.
        tell: Called with what is done now, how many prompts are done, and how many there are.

    Raises:
        SpecDecError: If there are no prompts.
    """
    rows, settings = encoded(loaded, prompts), variants(config)
    found = _Findings()
    for number, start in enumerate(range(0, len(rows), batch_size)):
        if tell is not None:
            tell("greedy: without and with speculation", start, len(rows))
        batch = slice(start, start + batch_size)
        inputs = pad_batch(loaded, rows[batch])
        plain = decode(loaded, inputs, PLAIN, max_new_tokens)
        on = decode(loaded, inputs, Method("speculative", settings[number % len(settings)]), max_new_tokens)
        found.count(on.stats)
        for prompt, ids, off_text, on_text in zip(prompts[batch], rows[batch], plain.tokens, on.tokens, strict=True):
            found.add(loaded, prompt.id, ids, off_text, on_text)
    if tell is not None:
        tell("greedy: without and with speculation", len(rows), len(rows))
    return found.result(loaded.model, batch_size)


class _Findings:
    """What was found so far."""

    def __init__(self) -> None:
        self.differences: list[FirstDifference] = []
        self.texts = self.tokens = self.drafted = self.accepted = 0
        self.worst: tuple[float, float] | None = None  # gap and band
        self.plain_worst: tuple[float, float] | None = None
        self.gaps: list[tuple[float, float]] = []  # of every token that isn't the argmax
        self.plain_bands = 0.0  # largest gap of plain decoding's own tokens, in bands
        self.fallbacks: list[str] = []

    def count(self, stats: Mapping[str, Any] | None) -> None:
        """Take in a run's statistics."""
        if stats is not None:
            self.drafted += stats["num_draft_tokens"]
            self.accepted += stats["num_accepted_draft_tokens"]
            if stats["fallback_reason"] is not None:
                self.fallbacks.append(stats["fallback_reason"])

    def add(self, loaded: LoadedModel, prompt: str, ids: Tensor, off: Sequence[int], on: Sequence[int]) -> None:
        """Compare one prompt's two texts, and hold every token against a plain forward."""
        model = loaded.model
        self.texts += 1
        options = {"do_sample": False, "max_new_tokens": max(len(off), len(on)), "pad_token_id": pad_token(loaded)}
        processors = processors_of(model, ids, **options)
        scores = processed(logits_behind(model, ids, on), ids, on, processors)
        gaps = _gaps(model, scores, on)
        self.tokens += len(on)
        self.gaps += [(gap, band) for gap, band in gaps if not gap <= 0]
        self.worst = _worst(self.worst, gaps)
        if list(off) == list(on):
            self._add_plain(gaps)
            return
        plain_scores = processed(logits_behind(model, ids, off), ids, off, processors)
        self._add_plain(_gaps(model, plain_scores, off))
        difference = first_difference(model, off, on, lambda index: plain_scores[index])
        assert difference is not None
        self.differences.append(FirstDifference(prompt, difference.kind, difference))

    def _add_plain(self, gaps: Sequence[tuple[float, float]]) -> None:
        """Take in how far plain decoding's own tokens are from a plain forward over its text."""
        self.plain_worst = _worst(self.plain_worst, gaps)
        self.plain_bands = max([self.plain_bands, *(gap / band for gap, band in gaps if math.isfinite(gap))])

    def result(self, model: Any, batch_size: int) -> GreedyResult:
        """The verdict."""
        exact = model.dtype not in HALF_PRECISION
        # two plain passes over one text differ by as much, so speculation may; a text that is plain decoding's own can't fail by it
        stretch = 1.0 if exact else min(max(self.plain_bands, 1.0), MOST_STRETCH)
        self.differences = [_stretched(each, stretch) for each in self.differences]
        wrong = sum(not gap <= stretch * band for gap, band in self.gaps)
        kinds = [each.kind for each in self.differences]
        ties, near_ties, mismatches = (kinds.count(kind) for kind in ("tie", "near-tie", "mismatch"))
        worst_gap, band = self.worst or (0.0, near_tie_band(model, 0.0))
        band *= stretch
        reasons = []
        if mismatches:
            first = next(each for each in self.differences if each.kind == "mismatch")
            reasons.append(
                f"{mismatches} of {self.texts} texts leave plain decoding where rounding doesn't explain it "
                f"(prompt {first.prompt}: {first.difference})."
            )
        if wrong:
            reasons.append(
                f"{wrong} of {self.tokens} tokens aren't what the target says at their place "
                f"(largest gap to its highest logit {worst_gap:.2g}, rounding explains {band:.2g})."
            )
        if exact and near_ties:
            reasons.append(
                f"{near_ties} of {self.texts} texts leave plain decoding at a near-tie. In {_name(model.dtype)} the "
                "texts must be equal unless both logits are the same number."
            )
        verdict = "fail" if reasons else ("near-tie" if kinds else "exact")
        if not self.drafted:
            why = f" ({self.fallbacks[0]})" if self.fallbacks else ""
            reasons.append(f"No draft token was verified{why}, so nothing was checked.")
        worst, plain_worst = (
            each[0] if each and math.isfinite(each[0]) else None for each in (self.worst, self.plain_worst)
        )
        return GreedyResult(
            verdict, tuple(reasons), self.texts, self.texts - len(kinds), ties, near_ties, mismatches, self.tokens,
            len(self.gaps) - wrong, wrong, worst, plain_worst, band, self.drafted,
            self.accepted, batch_size, _name(model.dtype), tuple(self.differences),
        )  # fmt: skip


def _stretched(first: FirstDifference, stretch: float) -> FirstDifference:
    """The same, judged by that many times the band."""
    difference = replace(first.difference, band=stretch * first.difference.band)
    return replace(first, kind=difference.kind, difference=difference)


def _gaps(model: Any, scores: Tensor, text: Sequence[int]) -> list[tuple[float, float]]:
    """Each token's gap to the highest score, and the gap that rounding explains there."""
    highest, tokens = scores.amax(-1), torch.tensor(list(text), device=scores.device)
    known = (tokens >= 0) & (tokens < scores.shape[1])
    chosen = scores.gather(1, tokens.where(known, 0)[:, None]).squeeze(1).where(known, -math.inf)
    pairs = zip((highest - chosen).tolist(), highest.tolist(), strict=True)
    return [(gap, near_tie_band(model, most)) for gap, most in pairs]


def _worst(
    known: tuple[float, float] | None, gaps: Sequence[tuple[float, float]]
) -> tuple[float, float] | None:  # fmt: skip
    """The largest gap, with its band; a gap that is no number is as large as can be."""
    sound = [(math.inf if math.isnan(gap) else gap, band) for gap, band in gaps]
    return max([*sound, *([known] if known else [])], default=None)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
