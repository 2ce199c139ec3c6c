"""The figures of a benchmark: one summary for each batch size, category and method.

A speed-up is a ratio of runs in turns; where the plain runs themselves differ by more than `MAX_SPREAD`, none is given.
The measure is the interquartile range of one prompt's plain runs ÷ their median, and its median over the prompts: a
single hiccup of the machine doesn't count, a machine that does other work all the time does. For normal noise 10 %
means that one run is uncertain by 7 %; the ratio of a prompt, a median over trials, by about as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .differences import Difference
from .timing import geometric_mean, percentile, quartiles
from .trials import PLAIN, Case, Run


MAX_SPREAD = 0.10  # more than this between the plain runs of a prompt, and no speed-up is given


@dataclass(frozen=True, slots=True)
class Speedup:
    """Ratios of plain decoding, one for each prompt or batch of prompts."""

    geometric_mean: float
    q1: float
    q3: float
    worst: float
    cases: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Speedup:
        """Summarise ratios."""
        q1, _, q3 = quartiles(ratios)
        return cls(geometric_mean(ratios), q1, q3, min(ratios), len(ratios))


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds to the first token (median), between tokens, and between the blocks in which tokens arrive."""

    first_token: float
    token_p50: float | None
    token_p90: float | None
    block_p50: float | None
    block_p90: float | None

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Latency | None:
        """Summarise runs; `None` where no arrivals were seen."""
        firsts = [run.first_token for run in runs if run.first_token is not None]
        if not firsts:
            return None
        tokens = [gap for run in runs for gap in run.token_gaps]
        blocks = [gap for run in runs for gap in run.block_gaps]
        return cls(
            median(firsts),
            *(percentile(tokens, share) if tokens else None for share in (0.5, 0.9)),
            *(percentile(blocks, share) if blocks else None for share in (0.5, 0.9)),
        )


@dataclass(frozen=True, slots=True)
class Texts:
    """How many texts are plain decoding's, and why the others are not; `gaps` are logit gaps at first differences."""

    texts: int
    same: int
    ties: int
    near_ties: int
    mismatches: int
    gaps: tuple[float | None, ...]

    @classmethod
    def of(cls, differences: Sequence[Difference | None]) -> Texts:
        """Count differences, one entry a text."""
        kinds = Counter("same" if each is None else each.kind for each in differences)
        gaps = tuple(each.gap for each in differences if each is not None)
        return cls(len(differences), kinds["same"], kinds["tie"], kinds["near-tie"], kinds["mismatch"], gaps)


@dataclass(frozen=True, slots=True)
class Summary:
    """One method on one category (or all) at one batch size.

    Attributes:
        batch: Rows.
        category: The category, or "all".
        method: The method; "plain" has figures but no speed-up.
        cases: Prompts or batches of prompts; those of `speedup` may be fewer.
        tokens_per_second: All tokens ÷ all seconds, prompts included.
        spread: Median over the cases of how much the plain runs differ.
        speedup: Plain seconds a token ÷ the method's; `None` where refused. That of "all" leaves out the categories
            whose own is refused, and so do `ideal` and `efficiency`.
        refused: Why there is no speed-up.
        ideal: Geometric mean of the speed-up if only forwards took time; a ratio of clocks too, so refused with it.
        efficiency: η, the speed-up ÷ the ideal.
        latency: First token and inter-token times.
        texts: Comparison with plain decoding's texts.
        acceptance_length: Tokens a step, the bonus token included.
        acceptance_rate: Accepted ÷ drafted.
        acceptance_by_position: For position 1, 2, … how often a draft token stood there with all before it accepted, and
            how often it was accepted; in one trial of each case, as the others only repeat it.
        rounds_by_source: Share of the steps whose draft came from each source; "none" is no draft.
        fallback_reasons: Why calls, or parts of them, were decoded plainly, and how many cases each befell.
    """

    batch: int
    category: str
    method: str
    cases: int
    tokens_per_second: float
    spread: float
    speedup: Speedup | None = None
    refused: str | None = None
    ideal: float | None = None
    efficiency: float | None = None
    latency: Latency | None = None
    texts: Texts | None = None
    acceptance_length: float | None = None
    acceptance_rate: float | None = None
    acceptance_by_position: tuple[tuple[int, int], ...] = ()
    rounds_by_source: Mapping[str, float] = field(default_factory=dict)
    fallback_reasons: Mapping[str, int] = field(default_factory=dict)


def refusal(spread: float) -> str | None:
    """Why a speed-up isn't given where the plain runs differ by `spread`, or `None` where it is."""
    if spread <= MAX_SPREAD:
        return None
    return f"the plain runs themselves differ by {100 * spread:.3g} %: no speed-up is given."


def summarise_plain(batch: int, category: str, cases: Sequence[Case]) -> Summary:
    """The figures of plain decoding."""
    runs = [run for case in cases for run in case.plain]
    spread = typical_spread(cases)
    return Summary(
        batch=batch,
        category=category,
        method=PLAIN.name,
        cases=len(cases),
        tokens_per_second=_throughput(runs),
        spread=spread,
        refused=None if trusted(cases) else refusal(spread),
        latency=Latency.of(runs),
    )


def summarise(batch: int, category: str, cases: Sequence[Case], method: str) -> Summary:
    """The figures of one method.

    Args:
        batch: Rows.
        category: Name of the category.
        cases: Cases in which the method ran.
        method: Its name.
    """
    runs = [trial.run for case in cases for trial in case.trials[method]]
    spread = typical_spread(cases)
    steady = trusted(cases)
    ratios = [case.speedup(method) for case in steady]
    known = [(ratio, ideal) for case, ratio in zip(steady, ratios, strict=True) if (ideal := case.ideal(method))]
    differences = [each for case in cases for each in case.differences.get(method, ())]
    return Summary(
        batch=batch,
        category=category,
        method=method,
        cases=len(cases),
        tokens_per_second=_throughput(runs),
        spread=spread,
        speedup=Speedup.of(ratios) if steady else None,
        refused=None if steady else refusal(spread),
        ideal=geometric_mean([ideal for _, ideal in known]) if known else None,
        efficiency=geometric_mean([ratio / ideal for ratio, ideal in known]) if known else None,
        latency=Latency.of(runs),
        texts=Texts.of(differences) if differences else None,
        **_acceptance([stats for case in cases if (stats := case.trials[method][-1].run.stats) is not None]),
        fallback_reasons=_fallbacks(cases, method),
    )


def _fallbacks(cases: Sequence[Case], method: str) -> dict[str, int]:
    """In how many cases each reason occurred. No `Counter`: `asdict` takes one apart."""
    reasons = ({(trial.run.stats or {}).get("fallback_reason") for trial in case.trials[method]} for case in cases)
    return dict(Counter(why for each in reasons for why in each if why))


def _acceptance(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Acceptance figures of several calls together."""
    steps = sum(each["num_spec_steps"] for each in stats)
    if not steps:
        return {}
    drafted = sum(each["num_draft_tokens"] for each in stats)
    accepted = sum(each["num_accepted_draft_tokens"] for each in stats)
    sources: Counter[str] = Counter()
    for each in stats:
        sources.update(each["steps_by_source"])
    tried, kept = (_added([each[name] for each in stats]) for name in ("drafted_at", "accepted_at"))
    return {
        "acceptance_length": 1 + accepted / steps,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_by_position": tuple(zip(tried, kept, strict=True)),
        "rounds_by_source": {name: count / steps for name, count in sources.most_common()},
    }


def _added(rows: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, rows), default=0)
    return [sum(row[place] for row in rows if place < len(row)) for place in range(longest)]


def _throughput(runs: Sequence[Run]) -> float:
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


def typical_spread(cases: Sequence[Case]) -> float:
    """Median over the cases of how much the plain runs differ."""
    return median(case.spread for case in cases)


def trusted(cases: Sequence[Case]) -> list[Case]:
    """The cases of those categories whose plain runs are steady enough for a speed-up."""
    by_category: dict[str, list[Case]] = {}
    for case in cases:
        by_category.setdefault(case.category, []).append(case)
    return [case for own in by_category.values() if refusal(typical_spread(own)) is None for case in own]
