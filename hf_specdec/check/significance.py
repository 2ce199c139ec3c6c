"""Tests of the hypothesis that every token follows the target's distribution, given the text before it.

Under it each function of token and prefix, minus its expectation, is a martingale difference: its sum, divided by the
root of the summed conditional variances, is nearly normal, whatever was drafted and however long. And the randomised
probability integral transforms of the tokens are independent and uniform, so that the Kolmogorov–Smirnov test is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import SpecDecError


ALPHA = 0.01  # chance that some test of a sample fails by chance, all together
POWER = 0.9
MOST_SKEW = 0.35  # of a sum; above it too few tokens carry it to call it normal


@dataclass(frozen=True, slots=True)
class StatisticalTest:
    """One test of the hypothesis that the tokens follow the target's distribution.

    Attributes:
        name: What it looks at.
        statistic: Its value: a z-score, the KS distance, or a count.
        p_value: Chance of a value this far off, were the hypothesis true.
        n: Tokens that it looks at.
        passed: Whether it stays within what chance explains, all tests together (Holm).
    """

    name: str
    statistic: float
    p_value: float
    n: int
    passed: bool = True


@dataclass(frozen=True, slots=True)
class Moments:
    """A sum of independent, or martingale, differences.

    Attributes:
        n: How many.
        deviation: Their sum, whose expectation is zero.
        variance: Sum of their conditional variances.
        third: Sum of their conditional third central moments.
    """

    n: int = 0
    deviation: float = 0.0
    variance: float = 0.0
    third: float = 0.0

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.n + other.n,
            self.deviation + other.deviation,
            self.variance + other.variance,
            self.third + other.third,
        )

    @property
    def skew(self) -> float:
        """Skewness of the sum; infinite without any variance."""
        return self.third / self.variance**1.5 if self.variance > 0 else math.inf

    @property
    def testable(self) -> bool:
        """Whether enough tokens carry the sum for its distribution to be known."""
        return abs(self.skew) <= MOST_SKEW


def library() -> Any:
    """`scipy.stats`.

    Raises:
        SpecDecError: If SciPy isn't installed.
    """
    try:
        from scipy import stats
    except ImportError as error:
        raise SpecDecError(
            "The statistical tests need SciPy. Install it with: pip install 'hf-specdec[check]'"
        ) from error
    return stats


def z_test(name: str, moments: Moments) -> StatisticalTest:
    """Two-sided test of a sum, with the first term of the Cornish–Fisher expansion for its skewness."""
    z = moments.deviation / math.sqrt(moments.variance)
    correction = moments.skew / 6 * (z * z - 1)
    limit = abs(z) / 3
    corrected = z - max(-limit, min(limit, correction))
    return StatisticalTest(name, z, float(2 * library().norm.sf(abs(corrected))), moments.n)


def uniform_test(name: str, values: Sequence[float]) -> StatisticalTest:
    """Kolmogorov–Smirnov test of values that should be uniform on [0, 1]."""
    found = library().kstest(values, "uniform")
    return StatisticalTest(name, float(found.statistic), float(found.pvalue), len(values))


def count_test(name: str, count: int, n: int, chance: float) -> StatisticalTest:
    """Whether something happened more often in `n` tokens than with this chance a token."""
    return StatisticalTest(name, float(count), float(library().binom.sf(count - 1, n, chance)), n)


def judged(tests: Sequence[StatisticalTest], alpha: float = ALPHA) -> tuple[StatisticalTest, ...]:
    """The tests with `passed` set by Holm's method: the chance that any of them fails by chance is `alpha` at most."""
    values = [-1.0 if math.isnan(test.p_value) else test.p_value for test in tests]  # what is no number must fail
    passed = [True] * len(tests)
    for place, index in enumerate(sorted(range(len(tests)), key=values.__getitem__)):
        if values[index] > alpha / (len(tests) - place):
            break
        passed[index] = False
    return tuple(replace(test, passed=each) for test, each in zip(tests, passed, strict=True))


def smallest_shift(moments: Moments, tests: int) -> float:
    """The mean shift a token of a sum that is found with probability `POWER` among that many tests (Bonferroni)."""
    norm = library().norm
    return float((norm.isf(ALPHA / tests / 2) + norm.ppf(POWER)) * math.sqrt(moments.variance) / moments.n)


def smallest_distance(n: int, tests: int) -> float:
    """The distance of two distribution functions that the KS test finds with probability `POWER`, from above.

    At the place of the distance D the empirical function is normal around it with a standard deviation of at most
    1 / (2√n); it must come out above the critical value.
    """
    stats = library()
    return float(stats.kstwo.isf(ALPHA / tests, n) + stats.norm.ppf(POWER) / (2 * math.sqrt(n)))
