"""The draft length pays, always lies between none and the most, and is learnt from what was really seen."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.engine import length
from hf_specdec.engine.length import Acceptance, AdaptiveLength, CostTable, FixedLength

from ..tiny import tiny_model


SOURCE = ("model", 0)


def play(
    control: AdaptiveLength, rounds: int, acceptance: float, cost: float = 0.0, most: int = 16, rows: int = 1,
    free: bool = True, step: float = 0.0,
) -> list[int]:  # fmt: skip
    """Rounds of a draft whose first `acceptance` share of tokens is right; a token more costs `cost` of a forward."""
    chosen = []
    for _ in range(rounds):
        k = control.choose([SOURCE] * rows, [0.7] * rows, free, most)
        chosen.append(k)
        kept = round(k * acceptance)
        control.observe(
            [SOURCE] * rows, [0.7] * rows, [k] * rows, [kept] * rows, k + 1, 1.0 + cost * k * rows, step * k
        )
    return chosen


@settings(max_examples=60, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2)), min_size=1, max_size=4),
            st.integers(1, 20),
            st.floats(0, 1),
            st.floats(1e-6, 10),
            st.floats(0, 10),
            st.booleans(),
            st.floats(0, 1),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_choice_is_always_possible(rounds: list) -> None:
    control = AdaptiveLength(0.2)
    for sources, most, share, verify, draft, free, prior in rounds:
        priors = [prior] * len(sources)
        k = control.choose(sources, priors, free, most)
        assert isinstance(k, int)
        assert 0 <= k <= most
        kept = [round(share * k)] * len(sources)
        control.observe(sources, priors, [k] * len(sources), kept, k + 1, verify, draft)
        for table in control.acceptance.values():
            chances = table.survival(most)
            assert all(0 <= chance <= 1 for chance in chances)
            assert chances == sorted(chances, reverse=True)


def test_nothing_is_drafted_before_the_plain_cost_is_known() -> None:
    assert AdaptiveLength(0.1).choose([SOURCE], [0.9], True, 16) == 0


def test_perfect_draft_over_a_flat_cost_is_drafted_long() -> None:
    assert set(play(AdaptiveLength(0.0), 60, 1.0, cost=0.01)[-10:]) == {16}


@pytest.mark.parametrize("rows", [1, 8])
def test_useless_draft_is_given_up(rows: int) -> None:
    """Only probes are left, ever fewer: 16, 32, 64 … rounds apart."""
    chosen = play(AdaptiveLength(0.1), 400, 0.0, cost=0.2, rows=rows, free=False, step=0.1)
    assert sum(k > 0 for k in chosen[100:]) <= 4
    assert all(k <= length.PROBE_LENGTH for k in chosen[100:])
    probes = [place for place, k in enumerate(chosen) if k and place > 60]
    gaps = [later - earlier for earlier, later in zip(probes, probes[1:], strict=False)]
    assert gaps == sorted(gaps)


def test_draft_that_costs_more_than_it_brings_is_given_up() -> None:
    """Right half of the time, but a draft step is as dear as the target's: not worth it."""
    chosen = play(AdaptiveLength(1.0), 300, 0.5, cost=0.5, free=False, step=1.0)
    assert sum(k > 0 for k in chosen[100:]) <= 6


def test_draft_that_gets_better_is_taken_up_again() -> None:
    control = AdaptiveLength(0.0)
    play(control, 120, 0.0, cost=0.3)
    chosen = play(control, 600, 1.0, cost=0.01)
    assert chosen[-1] >= 4
    assert len([k for k in chosen[:200] if k]) <= 2  # and not before probes have shown it


def test_dear_tokens_shorten_a_draft() -> None:
    cheap = play(AdaptiveLength(0.0), 200, 0.8, cost=0.01)[-1]
    dear = play(AdaptiveLength(0.0), 200, 0.8, cost=0.3)[-1]
    assert dear < cheap


def test_row_without_a_draft_does_not_count() -> None:
    control = AdaptiveLength(0.0)
    play(control, 60, 1.0, cost=0.01, rows=2)
    assert control.choose([SOURCE, ("none", 0)], [0.7, 0.0], True, 8) > 0
    assert control.choose([("none", 0)] * 2, [0.0, 0.0], True, 8) == 0


def test_sources_are_learnt_apart() -> None:
    control = AdaptiveLength(0.0)
    good, bad = ("lookup", 8), ("lookup", 1)
    for _ in range(80):
        for source, share in ((good, 1.0), (bad, 0.0)):
            k = control.choose([source], [0.5], True, 8) or 2
            control.observe([source], [0.5], [k], [round(share * k)], k + 1, 1.0 + 0.05 * k, 0.0)
            control.observe([source], [0.5], [0], [0], 1, 1.0, 0.0)
    assert control.acceptance[good].survival(1)[0] > 0.85 > 0.3 > control.acceptance[bad].survival(1)[0]
    assert control.choose([good], [0.5], True, 8) > control.choose([bad], [0.5], True, 8)


def test_what_was_not_seen_is_not_counted() -> None:
    """Positions behind the first rejection are censored: neither tries nor failures."""
    table = Acceptance(0.5)
    table.update(6, 2)
    assert table.tried == [1.0, 1.0, 1.0]
    assert table.kept == [1.0, 1.0, 0.0]
    table.update(2, 2)
    assert len(table.tried) == 3
    assert table.tried[2] == 1.0
    table.update(0, 0)
    assert table.tried[0] == 1.0 + length.DISCOUNT


def test_censored_rounds_do_not_lower_later_positions() -> None:
    once, often = Acceptance(0.6), Acceptance(0.6)
    once.update(8, 8)
    often.update(8, 8)
    for _ in range(30):
        often.update(8, 0)

    def third(table: Acceptance) -> float:
        chances = table.survival(4)
        return chances[3] / chances[2]

    assert third(often) == pytest.approx(third(once), rel=0.35)
    assert often.survival(1)[0] < 0.2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=60), st.floats(0, 1))
def test_survival_is_a_survival_function(updates: list, prior: float) -> None:
    table = Acceptance(prior)
    for drafted, accepted in updates:
        table.update(drafted, min(drafted, accepted))
        assert all(kept <= tried for kept, tried in zip(table.kept, table.tried, strict=True))
    chances = table.survival(20)
    assert len(chances) == 20
    assert all(0 <= chance <= 1 for chance in chances)
    assert chances == sorted(chances, reverse=True)


def test_cost_table_measures_and_interpolates() -> None:
    table = CostTable()
    table.update(1, 1.0)
    table.update(9, 3.0)
    assert table.estimate(1) == 1.0
    assert table.estimate(5) == pytest.approx(2.0)
    assert 3.0 < table.estimate(12) < 4.0  # optimistic beyond what was measured
    assert table.estimate(100) > table.estimate(12)


def test_cost_table_forgets_a_warm_up() -> None:
    """The first forward of a shape compiles, allocates: a much faster one replaces it at once."""
    table = CostTable()
    table.update(4, 10.0)
    table.update(4, 1.0)
    assert table.estimate(4) == 1.0
    table.update(4, 100.0)  # one hiccup moves it a little
    assert table.estimate(4) == pytest.approx(0.9 + 0.1 * 3.0)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.integers(1, 64), st.floats(1e-4, 1.0), max_size=8), st.integers(1, 80))
def test_cost_is_always_positive_and_finite(known: dict[int, float], tokens: int) -> None:
    table = CostTable()
    for size, seconds in known.items():
        table.update(size, seconds)
    assert 0 < table.estimate(tokens) < 1e6
    if known:
        low, high = min(known), max(known)
        if low <= tokens <= high:
            assert min(known.values()) - 1e-9 <= table.estimate(tokens) <= max(known.values()) + 1e-9


def test_fixed() -> None:
    control = FixedLength(5)
    assert [control.choose([SOURCE], [0.7], True, most) for most in (1, 4, 5, 90)] == [1, 4, 5, 5]
    control.observe([SOURCE], [0.7], [5], [0], 6, 1.0, 1.0)
    assert control.choose([SOURCE], [0.7], True, 90) == 5


def test_threads_share_a_controller() -> None:
    control = AdaptiveLength(0.1)
    errors: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for at in range(300):
                source = ("s", (seed + at) % 5)
                k = control.choose([source], [0.7], True, 8)
                assert 0 <= k <= 8
                control.observe([source], [0.7], [k], [k // 2], k + 1, 1.0 + k, 0.01)
                if at % 50 == 0:
                    control.reset()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_reset_forgets() -> None:
    control = AdaptiveLength(0.1)
    play(control, 60, 1.0, cost=0.01)
    control.reset()
    assert not control.acceptance
    assert not control.verify.seconds
    assert control.choose([SOURCE], [0.7], True, 8) == 0


def test_controllers_go_with_their_model() -> None:
    model = tiny_model()
    assert model not in length._CONTROLLERS
    length._CONTROLLERS[model] = {}
    count = len(length._CONTROLLERS)
    del model
    import gc

    gc.collect()
    assert len(length._CONTROLLERS) == count - 1
