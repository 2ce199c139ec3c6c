"""The formulas of the gain: against closed forms, published tables, a simulation, and at their limits."""

from __future__ import annotations

import math
import random

import pytest

from hf_specdec import SpecDecError
from hf_specdec.tools import gain
from hf_specdec.tools.gain import (
    best_length,
    break_even_acceptance,
    break_even_cost,
    conditional,
    expected_tokens,
    round_cost,
    speedup,
    survival,
    verify_ratio,
)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("k", [0, 1, 5, 16])
def test_one_acceptance_is_the_closed_form(alpha: float, k: int) -> None:
    assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    # Leviathan's theorem 3.8: no cost but the draft's
    known = (1 - alpha ** (k + 1)) / ((1 - alpha) * (k * 0.1 + 1))
    assert speedup(alpha, k, 0.1, 0.0) == pytest.approx(known)


def test_every_draft_token_accepted() -> None:
    assert expected_tokens(1.0, 5) == 6.0
    assert survival(1.0, 3) == [1.0, 1.0, 1.0]


def test_acceptance_by_position_is_what_a_simulation_counts() -> None:
    chances, rng, rounds = [0.6, 0.75, 0.9], random.Random(0), 40_000
    tokens = 0
    for _ in range(rounds):
        kept = 0
        while kept < 4 and rng.random() < chances[min(kept, 2)]:
            kept += 1
        tokens += kept + 1
    assert expected_tokens(chances, 4) == pytest.approx(tokens / rounds, rel=0.01)


def test_conditional_turns_survival_around() -> None:
    chances = [0.8, 0.5, 0.25]
    assert conditional(survival(chances, 3)) == pytest.approx(chances)
    assert conditional([0.8, 0.0, 0.0]) == [0.8, 0.0, 0.0]
    assert conditional([]) == []


# best length and speed-up by α, c and s, computed independently
TABLE = [
    (0.5, 0.06, 0.02, 3, 1.51), (0.5, 0.2, 0.02, 1, 1.23), (0.7, 0.06, 0.02, 5, 2.10), (0.7, 0.2, 0.02, 3, 1.53),
    (0.7, 0.5, 0.02, 1, 1.12), (0.8, 0.1, 0.02, 5, 2.31), (0.9, 0.06, 0.02, 11, 3.82), (0.9, 0.2, 0.02, 6, 2.25),
    (0.5, 0.2, 0.1, 1, 1.15), (0.7, 0.06, 0.1, 3, 1.71), (0.8, 0.2, 0.1, 3, 1.55), (0.9, 0.06, 0.1, 8, 2.69),
]  # fmt: skip


@pytest.mark.parametrize(("alpha", "c", "s", "k", "factor"), TABLE)
def test_best_length(alpha: float, c: float, s: float, k: int, factor: float) -> None:
    assert best_length(alpha, c, s) == k
    assert speedup(alpha, k, c, s) == pytest.approx(factor, abs=0.006)


def test_no_draft_is_the_best_where_none_pays() -> None:
    assert best_length(0.2, 0.5) == 0
    assert speedup(0.2, 0, 0.5, overhead=0.3) == 1.0  # plain decoding has no overhead


class TestVerifyCost:
    def test_batch_goes_through_the_curve(self) -> None:
        # v(n) = 1 + .02·(n − 1): 8 rows of 2 tokens against 8 rows of 1
        assert verify_ratio(2, 0.02, 8) == pytest.approx((1 + 0.02 * 15) / (1 + 0.02 * 7))
        assert speedup(0.7, 3, 0.1, batch=64) < speedup(0.7, 3, 0.1, batch=1)

    def test_three_forms_agree(self) -> None:
        by_tokens = {4: 2.0, 8: 2.2, 16: 3.0}
        assert verify_ratio(2, by_tokens, 4) == pytest.approx(1.1)
        assert verify_ratio(3, by_tokens, 4) == pytest.approx(1.3)  # 12 tokens: between 8 and 16
        assert verify_ratio(2, by_tokens.__getitem__, 4) == pytest.approx(1.1)
        assert verify_ratio(2, [2.0, 2.2], 4) == pytest.approx(1.1)

    def test_what_is_known_goes_on(self) -> None:
        assert verify_ratio(6, [1.0, 1.5, 1.6]) == pytest.approx(1.9)
        assert verify_ratio(6, [1.0, 1.5, 1.4]) == pytest.approx(1.4)  # never downwards
        assert verify_ratio(3, [5.0]) == pytest.approx(1 + 2 * gain.EXTRA_TOKEN)

    def test_cliffs_are_seen(self) -> None:
        # a float32 CPU: 2 tokens cost as much as 8
        curve = [1.0, 1.8, 1.8, 1.8, 1.8, 1.8, 1.8, 1.8, 2.6]
        assert best_length(0.8, 0.05, curve) == 7
        assert best_length(0.6, 0.3, curve) == 0


class TestBreakEven:
    @pytest.mark.parametrize(("c", "s", "o"), [(0.1, 0.02, 0.0), (0.3, 0.1, 0.05), (0.0, 0.0, 0.2)])
    def test_any_length_wins_from_c_plus_s_plus_o_on(self, c: float, s: float, o: float) -> None:
        needed = break_even_acceptance(c, s, overhead=o, most=1)
        assert needed == pytest.approx(c + s + o)
        above, below = (best_length(needed + shift, c, s, overhead=o, most=1) for shift in (0.001, -0.001))
        assert (above, below) == (1, 0)

    def test_a_fixed_length_needs_more(self) -> None:
        needed = break_even_acceptance(0.1, 0.02, k=5)
        assert needed is not None
        assert needed > 0.12
        assert speedup(needed, 5, 0.1, 0.02) == pytest.approx(1.0)

    def test_never_and_always(self) -> None:
        assert break_even_acceptance(1.5) is None
        assert break_even_acceptance(0.0, 0.0) == 0.0

    @pytest.mark.parametrize("wanted", [1.0, 1.5])
    @pytest.mark.parametrize("share", [1.0, 0.4])
    def test_dearest_draft(self, wanted: float, share: float) -> None:
        cost = break_even_cost(0.85, 0.02, wanted=wanted, k=3, batch=2, overhead=0.05, share=share)
        assert cost is not None
        assert speedup(0.85, 3, cost, 0.02, batch=2, overhead=0.05, share=share) == pytest.approx(wanted)
        best = break_even_cost(0.85, 0.02, wanted=wanted, batch=2, overhead=0.05, share=share)
        assert best is not None
        assert best >= cost

    def test_dearest_draft_without_any(self) -> None:
        assert break_even_cost(0.1, 0.5) is None
        assert break_even_cost(0.9, share=0.0) is None


def test_rounds_without_a_draft_are_plain_steps() -> None:
    whole = speedup(0.9, 4, 0.1)
    half = speedup(0.9, 4, 0.1, share=0.5)
    assert 1 < half < whole
    tokens, cost = expected_tokens(0.9, 4), round_cost(4, 0.1)
    assert half == pytest.approx((tokens + 1) / (cost + 1))
    assert speedup(0.9, 4, 0.1, share=0.0) == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.2, 3), "from 0 to 1, got 1.2"),
        (lambda: expected_tokens(math.nan, 3), "from 0 to 1, got nan"),
        (lambda: expected_tokens([], 3), "no position"),
        (lambda: speedup(0.5, 3, -0.1), "draft step must be"),
        (lambda: speedup(0.5, 3, math.inf), "draft step must be"),
        (lambda: speedup(0.5, 3, overhead=math.nan), "overhead must be"),
        (lambda: speedup(0.5, 3, batch=0), "at least one row"),
        (lambda: speedup(0.5, 3, share=1.1), "share of rounds"),
        (lambda: speedup(0.5, 3, 0.1, -0.2), "further token must be"),
        (lambda: speedup(0.5, 3, 0.1, []), "empty"),
        (lambda: speedup(0.5, 3, 0.1, [1.0, 0.0]), "positive"),
        (lambda: speedup(0.5, 3, 0.1, lambda tokens: 0.0), "must cost something"),
    ],
)
def test_bad_numbers_are_named(call: object, message: str) -> None:
    with pytest.raises(SpecDecError, match=message):
        call()  # type: ignore[operator]
