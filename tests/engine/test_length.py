"""The draft length pays, always lies between none and the most, and is learnt from what was really seen."""

from __future__ import annotations

import gc
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.engine import length
from hf_specdec.engine.length import Acceptance, AdaptiveLength, FixedLength, GainWatch, Outlook, Round

from ..tiny import tiny_model


MODEL = Outlook("model", 0, 0.7)
LOOKUP = Outlook("lookup", 8, 0.7, free=True)


def seen(
    outlook: list[Outlook], drafted: int, accepted: int, verify: float, step: float = 0.0, nodes: int | None = None
) -> Round:
    """A round in which all rows went alike."""
    rows, nodes = len(outlook), drafted if nodes is None else nodes
    return Round(
        outlook,
        [nodes] * rows,
        [min(accepted + 1, drafted)] * rows,
        [accepted] * rows,
        nodes + 1,
        verify,
        step * nodes,
    )


def play(
    control: AdaptiveLength, rounds: int, acceptance: float, cost: float = 0.0, most: int = 16, rows: int = 1,
    outlook: Outlook = LOOKUP, step: float = 0.0,
) -> list[int]:  # fmt: skip
    """Rounds of a draft whose first `acceptance` share of tokens is right; a token more costs `cost` of a forward."""
    chosen = []
    for _ in range(rounds):
        k = control.choose([outlook] * rows, most)
        chosen.append(k)
        control.observe(seen([outlook] * rows, k, round(k * acceptance), 1.0 + cost * k * rows, step))
    return chosen


@settings(max_examples=60, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(
            st.lists(
                st.builds(
                    Outlook,
                    st.sampled_from(["a", "b"]),
                    st.integers(0, 2),
                    st.floats(0, 1),
                    st.booleans(),
                    st.none() | st.lists(st.floats(0, 1), max_size=5),
                    st.lists(st.integers(0, 9), max_size=3),
                ),
                min_size=1,
                max_size=4,
            ),
            st.integers(1, 20),
            st.floats(0, 1),
            st.floats(1e-6, 10),
            st.floats(0, 10),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_choice_is_always_possible(rounds: list) -> None:
    control = AdaptiveLength(0.2)
    for outlook, most, share, verify, draft in rounds:
        k = control.choose(outlook, most)
        assert isinstance(k, int)
        assert 0 <= k <= most
        assert control.pays(share, k, most, len(outlook), True) in (True, False)
        control.observe(seen(outlook, k, round(share * k), verify, draft))
        assert control.rate >= 1.0
        for table in control.acceptance.values():
            chances = table.survival(most)
            assert all(0 <= chance <= 1 for chance in chances)
            assert chances == sorted(chances, reverse=True)


def test_nothing_is_drafted_before_the_plain_cost_is_known() -> None:
    assert AdaptiveLength(0.1).choose([Outlook("m", 0, 0.9, free=True)], 16) == 0


def test_perfect_draft_over_a_flat_cost_is_drafted_long() -> None:
    assert set(play(AdaptiveLength(0.0), 60, 1.0, cost=0.01)[-10:]) == {16}


@pytest.mark.parametrize("rows", [1, 8])
def test_useless_draft_is_given_up(rows: int) -> None:
    """Only probes are left, ever fewer: 16, 32, 64 … rounds apart."""
    chosen = play(AdaptiveLength(0.1), 400, 0.0, cost=0.2, rows=rows, outlook=MODEL, step=0.1)
    assert sum(k > 0 for k in chosen[100:]) <= 4
    assert all(k <= length.PROBE_LENGTH for k in chosen[100:])
    probes = [place for place, k in enumerate(chosen) if k and place > 60]
    gaps = [later - earlier for earlier, later in zip(probes, probes[1:], strict=False)]
    assert gaps == sorted(gaps)


def test_draft_that_costs_more_than_it_brings_is_given_up() -> None:
    """Right half of the time, but a draft step is as dear as the target's: not worth it."""
    chosen = play(AdaptiveLength(1.0), 300, 0.5, cost=0.5, outlook=MODEL, step=1.0)
    assert sum(k > 0 for k in chosen[100:]) <= 6


def test_draft_that_gets_better_is_taken_up_again() -> None:
    control = AdaptiveLength(0.0)
    play(control, 120, 0.0, cost=0.3)
    chosen = play(control, 600, 1.0, cost=0.01)
    drafted = [place for place, k in enumerate(chosen) if k]
    assert chosen[-1] >= 4
    assert len(drafted) > 300  # for the most part of 600 rounds
    assert chosen[drafted[0]] == length.PROBE_LENGTH  # a probe has shown it


def test_known_draft_needs_no_probes() -> None:
    """What a lookup would have said is compared with the text: nothing is verified before it pays."""
    control = AdaptiveLength(0.0)
    known = Outlook("lookup", 2, 0.4, free=True, guess=(5, 6, 7))
    for _ in range(30):
        control.observe(seen([known], 0, 0, 1.0))
        control.observe(seen([known], 1, 0, 2.0))
    assert not any(control.choose([known], 1) for _ in range(300))
    for _ in range(200):
        control.learn(known, 3, 3)
    assert not control.choose([known], 1)  # right for sure, and still a token costs a whole forward
    control.verify.factors[2] = 0.2
    assert control.choose([known], 1) == 1


def test_dear_tokens_shorten_a_draft() -> None:
    cheap = play(AdaptiveLength(0.0), 200, 0.8, cost=0.01)[-1]
    dear = play(AdaptiveLength(0.0), 200, 0.8, cost=0.3)[-1]
    assert dear < cheap


def test_row_without_a_draft_does_not_count() -> None:
    control = AdaptiveLength(0.0)
    play(control, 60, 1.0, cost=0.01, rows=2)
    nothing = Outlook("none", acceptance=0.0, free=True)
    assert control.choose([LOOKUP, nothing], 8) > 0
    assert control.choose([nothing] * 2, 8) == 0


def test_sources_are_learnt_apart() -> None:
    control = AdaptiveLength(0.0)
    good, bad = Outlook("lookup", 8, 0.5, free=True), Outlook("lookup", 1, 0.5, free=True)
    for _ in range(80):
        for each, share in ((good, 1.0), (bad, 0.0)):
            k = control.choose([each], 8) or 2
            control.observe(seen([each], k, round(share * k), 1.0 + 0.05 * k))
            control.observe(seen([each], 0, 0, 1.0))
    tables = control.acceptance
    assert tables["lookup", 8].survival(1)[0] > 0.85 > 0.3 > tables["lookup", 1].survival(1)[0]
    assert control.choose([good], 8) > control.choose([bad], 8)


def test_buckets_of_a_model_start_from_what_all_show() -> None:
    """Outcomes of the last round are moods of one draft; lengths of a match are drafts of different kinds."""
    control = AdaptiveLength(0.1)
    for _ in range(100):
        control.observe(seen([Outlook("model", 1, 0.7)], 1, 0, 1.0))
        control.observe(seen([Outlook("lookup", 1, 0.7, free=True)], 1, 0, 1.0))
    assert control._chances(Outlook("model", 3, 0.7), 1)[0] < 0.15
    assert control._chances(Outlook("lookup", 16, 0.7, free=True), 1)[0] == pytest.approx(0.7)


def test_bucket_leaves_the_pool_as_it_is_seen() -> None:
    """20 acceptances of a bucket against 100 rejections elsewhere, with a pool that weighs 8."""
    control = AdaptiveLength(0.1)
    for _ in range(100):
        control.observe(seen([Outlook("model", 0, 0.7)], 1, 0, 1.0))
    for _ in range(20):
        control.observe(seen([Outlook("model", 3, 0.7)], 1, 1, 1.0))
    tried = sum(length.DISCOUNT**n for n in range(20))
    pool = control.acceptance["model", None].survival(1)[0]
    assert control._chances(Outlook("model", 3, 0.7), 1)[0] == pytest.approx((tried + 8 * pool) / (tried + 8))


def test_gains_are_corrected_by_what_is_accepted() -> None:
    """A drafter that promises four tokens a round and brings one is believed ever less, and then not drafted from."""
    control = AdaptiveLength(0.0)
    boastful = Outlook("tree", 0, 0.9, free=True, gains=[0.8] * 5)
    assert control._chances(boastful, 5) == pytest.approx([0.8] * 5)
    for _ in range(100):
        control.observe(seen([boastful], 1, 0, 1.5, nodes=5))
        control.observe(seen([boastful], 0, 0, 1.0))
    assert sum(control._chances(boastful, 5)) < 0.3
    assert not any(control.choose([boastful], 5) for _ in range(10))
    modest = Outlook("other", 0, 0.4, free=True, gains=[0.4] * 5)
    assert control.choose([modest], 5) == 5


def test_gains_that_were_too_low_are_raised_but_stay_chances() -> None:
    control = AdaptiveLength(0.0)
    shy = Outlook("tree", 0, 0.5, free=True, gains=[0.5, 0.1])
    for _ in range(200):
        control.observe(seen([shy], 2, 2, 1.0))
    assert control._chances(shy, 2) == pytest.approx([1.0, 0.3], abs=0.05)


def test_time_is_worth_what_the_whole_text_brings() -> None:
    """A token that would pay in a slow text doesn't pay beside bursts that emit many tokens in the same time."""
    weak, strong = Outlook("a", 1, 0.5, free=True), Outlook("b", 16, 0.9, free=True)
    alone, mixed = AdaptiveLength(0.0), AdaptiveLength(0.0)
    for control in (alone, mixed):
        for tokens in range(1, 18):
            for _ in range(50):
                control.verify.update(tokens, 1.0 + 0.25 * (tokens - 1))
    assert alone.choose([weak], 16) >= 1
    for _ in range(300):
        mixed.observe(seen([strong], 16, 16, 5.0))
    assert mixed.rate == pytest.approx(17 / 5, rel=0.1)
    assert mixed.choose([weak], 16) == 0
    assert mixed.choose([strong], 16) == 16


def test_in_round_stop() -> None:
    """A token is taken if it is worth a wider forward, a step is run if it is worth that and itself."""
    control = AdaptiveLength(0.3)
    for _ in range(50):
        for tokens in (1, 2, 3, 4):
            control.verify.update(tokens, 1.0 + 0.1 * (tokens - 1))
    assert control.pays(0.15, 0, 4, 1, step=False)
    assert not control.pays(0.05, 0, 4, 1, step=False)
    assert not control.pays(0.15, 0, 4, 1, step=True)
    assert control.pays(0.5, 0, 4, 1, step=True)
    control.draft[1] = 0.02  # measured: much cheaper than its size made believe
    assert control.pays(0.15, 0, 4, 1, step=True)


def test_in_round_stop_looks_over_a_cliff() -> None:
    """Four tokens cost what one does, five to eight half as much again: the step counts by the tokens that stand on it."""
    control = AdaptiveLength(0.0)
    for _ in range(50):
        for tokens in range(1, 10):
            control.verify.update(tokens, 1.0 if tokens <= 4 else 1.5)
    assert control.pays(0.2, 3, 7, 1, step=False)
    assert not control.pays(0.2, 3, 4, 1, step=False)
    assert not control.pays(0.1, 3, 7, 1, step=False)


def test_a_probe_is_not_a_draft_that_pays() -> None:
    """Four buckets of a useless draft are probed as seldom as one: a probe of one doesn't take the others up again."""
    control, probes = AdaptiveLength(0.1), 0
    outlook = [Outlook("model", bucket, 0.7) for bucket in range(4)]
    for _ in range(2000):
        k = control.choose(outlook, 8)
        probes += k > 0
        control.observe(seen(outlook, k, 0, 1.0 + 0.2 * 4 * k, 0.1))
    assert probes < 60


def test_only_a_models_time_is_a_draft_step() -> None:
    """A round of copies takes no time to draft; it tells nothing about the model of a hybrid."""
    control = AdaptiveLength(0.1)
    control.observe(seen([MODEL], 2, 2, 1.0, step=0.3))
    before = dict(control.draft)
    control.observe(seen([LOOKUP], 2, 2, 1.0, step=0.001))
    assert control.draft == before
    control.observe(seen([MODEL, LOOKUP], 2, 2, 1.0, step=0.3))
    assert set(control.draft) == {1, 2}


def test_a_step_of_another_batch_size_is_better_than_a_guess() -> None:
    control = AdaptiveLength(0.01)
    for rows in (1, 8):
        control.observe(seen([MODEL] * rows, 1, 1, 1.0, step=0.1 * rows))
    assert control._step(7, free=False) == pytest.approx(control.draft[8] * control.verify.estimate(7))


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
    assert often.hazards(4)[3] == pytest.approx(once.hazards(4)[3], rel=0.35)
    assert often.survival(1)[0] < 0.2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=60), st.floats(0, 1), st.booleans())
def test_survival_is_a_survival_function(updates: list, prior: float, pooled: bool) -> None:
    table = Acceptance(prior, Acceptance(prior) if pooled else None)
    for drafted, accepted in updates:
        table.update(drafted, min(drafted, accepted))
        assert all(kept <= tried for kept, tried in zip(table.kept, table.tried, strict=True))
    chances = table.survival(20)
    assert len(chances) == 20
    assert all(0 <= chance <= 1 for chance in chances)
    assert chances == sorted(chances, reverse=True)


def test_watch_speaks_when_drafting_loses() -> None:
    watch = GainWatch()
    verdicts = [watch.add(1.0, 1.1, drafted=True) for _ in range(length.WINDOW)]
    assert verdicts[:-1] == [None] * (length.WINDOW - 1)  # a whole window is needed
    assert verdicts[-1] == "speculative disabled: measured gain 0.91x in 64 drafted rounds"


def test_watch_is_silent_while_drafting_gains_or_hardly_happens() -> None:
    watch = GainWatch()
    assert not any(watch.add(1.5, 1.4, drafted=True) for _ in range(300))
    assert not any(watch.add(1.0, 1.3, drafted=False) for _ in range(300))  # a slow machine, not a slow draft


def test_fixed() -> None:
    control = FixedLength(5)
    assert [control.choose([MODEL], most) for most in (1, 4, 5, 90)] == [1, 4, 5, 5]
    control.observe(seen([MODEL], 5, 0, 1.0, 1.0))
    assert control.choose([MODEL], 90) == 5


def test_threads_share_a_controller() -> None:
    control = AdaptiveLength(0.1)
    errors: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for at in range(300):
                outlook = [Outlook("s", (seed + at) % 5)]
                k = control.choose(outlook, 8)
                assert 0 <= k <= 8
                control.observe(seen(outlook, k, k // 2, 1.0 + k, 0.01))
                control.learn(Outlook("s", at % 7, free=True, guess=(1, 2)), 2, 1)
                control.plain_seconds(1)
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
    assert control.rate > 2
    control.reset()
    assert not control.acceptance
    assert not control.verify
    assert control.rate == 1.0
    assert control.choose([LOOKUP], 8) == 0


def test_reset_of_a_model_and_of_all() -> None:
    first, second = tiny_model(), tiny_model()
    kept = length.controller(second, "prompt_lookup")
    assert length.controller(first, "prompt_lookup") is not kept
    length.controller(first, "prompt_lookup").verify.update(1, 1.0)
    length.reset(first)
    assert not length.controller(first, "prompt_lookup").verify
    assert length.controller(second, "prompt_lookup") is kept
    length.reset()
    assert length.controller(second, "prompt_lookup") is not kept


def test_controllers_go_with_their_draft() -> None:
    """Another draft at the same address must not inherit what was learnt about the first."""
    target, draft = tiny_model(), tiny_model(num_hidden_layers=1)
    control = length.controller(target, "draft_model", draft)
    assert length.controller(target, "draft_model", draft) is control
    assert 0.5 < control.draft_cost < 1
    assert length.controller(target, "draft_model") is not control
    del draft
    gc.collect()
    assert len(length._controllers(target)) == 1


def test_controllers_go_with_their_model() -> None:
    model = tiny_model()
    assert model not in length._CONTROLLERS
    length.controller(model, "prompt_lookup")
    count = len(length._CONTROLLERS)
    del model
    gc.collect()
    assert len(length._CONTROLLERS) == count - 1
