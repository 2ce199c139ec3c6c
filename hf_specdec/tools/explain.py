"""What speculation gains under given conditions, why not more, and under which others it would pay.

`gain` has the formulas; this puts their answers together, for `hf-specdec explain` and for reports. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .gain import (
    EXTRA_TOKEN,
    MOST_DRAFT_TOKENS,
    Acceptance,
    break_even_acceptance,
    break_even_cost,
    expected_tokens,
    over_all_rounds,
    round_cost,
    verify_ratio,
)


SCHEMA_VERSION = 1
OVERHEAD = 0.05  # what a round costs besides its forwards, in plain steps, where it isn't known
BATCHES = (1, 2, 4, 8, 16, 32, 64)
REGION_ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
REGION_SPEEDUPS = (1.0, 1.25, 1.5, 2.0)
MOST_SHOWN = 10  # rows of the table of lengths, unless one of interest is longer


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a gain is computed from; see `gain` for the meaning and units.

    Attributes:
        acceptance: Chance that a draft token is accepted given that all before it were: one, or one for each position.
        draft_cost: A draft step in plain steps; 0 for drafts that take no time.
        verify_cost: A slope; or a sequence by tokens a row; or a mapping by the tokens in all rows together.
        batch: Rows.
        overhead: What a round costs besides its forwards, in plain steps.
        share: Share of the rounds that have a draft.
        most: The longest draft that is looked at, unless more positions are given.
    """

    acceptance: float | tuple[float, ...]
    draft_cost: float
    verify_cost: float | tuple[float, ...] | Mapping[int, float] = EXTRA_TOKEN
    batch: int = 1
    overhead: float = OVERHEAD
    share: float = 1.0
    most: int = MOST_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class LengthGain:
    """What drafts of one length gain.

    Attributes:
        num_draft_tokens: Draft tokens a row; 0 is plain decoding.
        expected_tokens: Tokens that a row gets from a round, in the mean over those with and without a draft.
        round_cost: Plain steps that a round takes, likewise.
        speedup: The one ÷ the other.
    """

    num_draft_tokens: int
    expected_tokens: float
    round_cost: float
    speedup: float


@dataclass(frozen=True, slots=True)
class BatchGain:
    """The best draft length at a batch size, if acceptance and the draft's cost stay the same."""

    batch: int
    num_draft_tokens: int
    speedup: float


@dataclass(frozen=True, slots=True)
class Region:
    """What a draft step may cost at an acceptance: the dearest one for each wanted speed-up, `None` where none reaches it."""

    acceptance: float
    dearest: Mapping[float, float | None]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What speculation gains under some conditions, and why.

    Attributes:
        conditions: What it was computed from.
        lengths: By draft length, from 0.
        best: The best of them; its length is 0 where drafting doesn't pay.
        chosen: The one that was asked for, if any.
        break_even_acceptance: From which acceptance on some length is no slower than plain decoding; `None`: never.
        break_even_of_chosen: The same for the length that was asked for.
        dearest_draft: The dearest draft step that still pays at this acceptance; `None`: not even a free one.
        limits: The best speed-up with any draft if one thing were half as bad: rejections, draft, verification, overhead;
            the largest first.
        regions: What a draft may cost, by acceptance.
        batches: The gain by batch size; empty where wider forwards are known for one batch size only.
    """

    conditions: Conditions
    lengths: tuple[LengthGain, ...]
    best: LengthGain
    chosen: LengthGain | None
    break_even_acceptance: float | None
    break_even_of_chosen: float | None
    dearest_draft: float | None
    limits: Mapping[str, float]
    regions: tuple[Region, ...]
    batches: tuple[BatchGain, ...]

    @property
    def pays(self) -> bool:
        """Whether any draft length is faster than plain decoding."""
        return self.best.num_draft_tokens > 0

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types."""
        found = asdict(self)
        found["regions"] = [
            {
                "acceptance": each.acceptance,
                "dearest_draft": [{"speedup": s, "cost": c} for s, c in each.dearest.items()],
            }
            for each in self.regions
        ]
        return {"schema_version": SCHEMA_VERSION, "kind": "explain", "pays": self.pays} | found


def explain(conditions: Conditions, *, num_draft_tokens: int | None = None) -> Explanation:
    """Work out what speculation gains.

    Args:
        conditions: Acceptance and costs.
        num_draft_tokens: A draft length to look at in particular.

    Raises:
        SpecDecError: If a number is out of its range; the message names it.
    """
    positions = len(conditions.acceptance) if isinstance(conditions.acceptance, Sequence) else 0
    most = max(conditions.most, num_draft_tokens or 0, positions)
    conditions = replace(conditions, most=most)
    lengths = tuple(_length_gain(conditions, k) for k in range(most + 1))
    costs: dict[str, Any] = {"batch": conditions.batch, "overhead": conditions.overhead}

    def needed(k: int | None) -> float | None:
        return break_even_acceptance(conditions.draft_cost, conditions.verify_cost, k=k, most=most, **costs)

    acceptances = dict.fromkeys([*REGION_ACCEPTANCES, *_constant(conditions.acceptance)])
    return Explanation(
        conditions=conditions,
        lengths=lengths,
        best=max(lengths, key=lambda each: each.speedup),
        chosen=lengths[num_draft_tokens] if num_draft_tokens is not None else None,
        break_even_acceptance=needed(None),
        break_even_of_chosen=needed(num_draft_tokens) if num_draft_tokens else None,
        dearest_draft=_dearest(conditions, conditions.acceptance, 1.0),
        limits=_limits(conditions),
        regions=tuple(_region(conditions, each) for each in sorted(acceptances)),
        batches=tuple(_batches(conditions)),
    )


def _length_gain(conditions: Conditions, k: int) -> LengthGain:
    cost = round_cost(
        k, conditions.draft_cost, conditions.verify_cost, batch=conditions.batch, overhead=conditions.overhead
    )
    tokens = over_all_rounds(expected_tokens(conditions.acceptance, k), conditions.share)
    cost = over_all_rounds(cost, conditions.share)
    return LengthGain(k, tokens, cost, tokens / cost)


def _limits(conditions: Conditions) -> dict[str, float]:
    """What halving each loss would bring; of the best draft, even where drafting doesn't pay."""

    def best(acceptance: Acceptance, draft: float, verification: float, overhead: float) -> float:
        def value(k: int) -> float:
            wider = verify_ratio(k + 1, conditions.verify_cost, conditions.batch) - 1
            cost = (
                1
                + min(wider, verification * wider)
                + draft * conditions.draft_cost * k
                + overhead * conditions.overhead
            )
            tokens = expected_tokens(acceptance, k)
            return over_all_rounds(tokens, conditions.share) / over_all_rounds(cost, conditions.share)

        return max(value(k) for k in range(1, conditions.most + 1))

    given = conditions.acceptance
    fewer = tuple((1 + each) / 2 for each in given) if isinstance(given, Sequence) else (1 + given) / 2
    halved = {
        "rejections": best(fewer, 1, 1, 1),
        "draft": best(given, 0.5, 1, 1),
        "verification": best(given, 1, 0.5, 1),
        "overhead": best(given, 1, 1, 0.5),
    }
    return dict(sorted(halved.items(), key=lambda item: -item[1]))


def _region(conditions: Conditions, acceptance: float) -> Region:
    return Region(acceptance, {wanted: _dearest(conditions, acceptance, wanted) for wanted in REGION_SPEEDUPS})


def _dearest(conditions: Conditions, acceptance: Acceptance, wanted: float) -> float | None:
    return break_even_cost(
        acceptance,
        conditions.verify_cost,
        wanted=wanted,
        batch=conditions.batch,
        overhead=conditions.overhead,
        share=conditions.share,
        most=conditions.most,
    )


def _batches(conditions: Conditions) -> Iterable[BatchGain]:
    known: Sequence[int] = BATCHES
    if isinstance(conditions.verify_cost, Mapping):
        low, high = min(conditions.verify_cost), max(conditions.verify_cost)
        known = [size for size in BATCHES if low <= size <= high / 2]  # at least one draft token within what is known
    elif isinstance(conditions.verify_cost, Sequence):
        known = ()
    for size in known:
        at_size = replace(conditions, batch=size)
        found = max((_length_gain(at_size, k) for k in range(conditions.most + 1)), key=lambda each: each.speedup)
        yield BatchGain(size, found.num_draft_tokens, found.speedup)


def _constant(acceptance: Acceptance) -> list[float]:
    return [] if isinstance(acceptance, Sequence) else [acceptance]
