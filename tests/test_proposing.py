"""How much is drafted in real generations: learnt without drafting, ended in mid-round, switched off where it loses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import Draft, Drafter, SpecConfig, SpecStats, proposing
from hf_specdec.drafters import DraftModel, Outlook, PromptLookup, draft_model, recycling
from hf_specdec.drafters.base import checked
from hf_specdec.engine import length
from hf_specdec.engine.length import AdaptiveLength

from .plain import new_tokens, options, plain_texts
from .tiny import Oracle, exact_pair, ragged_prompts, tiny_model


pytestmark = pytest.mark.usefixtures("one_thread")


def controller_of(model: Any, drafter: Any) -> AdaptiveLength:
    """What chooses the draft length of a model's generations with a drafter."""
    control = proposing._length_control(model, SpecConfig(), drafter)
    assert isinstance(control, AdaptiveLength)
    return control


def costs(
    monkeypatch: pytest.MonkeyPatch, model: Any, drafter: Any, token: float, step: float = 0.0
) -> AdaptiveLength:
    """A controller that believes in a plain forward of a second, `token` for each token more, and `step` for a draft step."""
    control = controller_of(model, drafter)
    monkeypatch.setattr(control.verify, "update", lambda tokens, seconds: None)
    monkeypatch.setattr(control.verify, "estimate", lambda tokens: 1.0 + token * (tokens - 1))
    monkeypatch.setattr(type(control), "rate", 1.0)
    monkeypatch.setattr(control, "_step", lambda rows, free: 0.0 if free else step)
    monkeypatch.setattr(type(control.verify), "__bool__", lambda self: True)
    monkeypatch.setattr(type(control.verify), "__contains__", lambda self, tokens: True)
    return control


def run(model: Any, drafter: Any, rows: int = 1, **changes: Any) -> SpecStats:
    """Adaptive length; the text is plain decoding's."""
    prompts = ragged_prompts(rows)
    settings = options(max_new_tokens=60) | changes
    output = hf_specdec.generate(model, **prompts, **settings, speculative=drafter)
    if not changes.get("do_sample"):
        assert new_tokens(output, prompts) == plain_texts(model, prompts, max_new_tokens=60)
    return hf_specdec.last_stats(model)


class Known(Oracle):
    """Tells what it would draft."""

    name = "known"

    def outlook(self, rows: Any) -> list[Outlook]:
        draft = super().propose(rows, 8)
        return [
            Outlook(self.name, 1, 0.4, free=True, guess=tokens[:count])
            for tokens, count in zip(draft.tokens.tolist(), draft.counts, strict=True)
        ]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_acceptance_is_learnt_without_drafting(monkeypatch: pytest.MonkeyPatch, chance: float, rows: int) -> None:
    """A token costs a whole forward, so that nothing is ever drafted; what would have been accepted is known anyway."""
    model = tiny_model()
    drafter = Known(plain_texts(model, ragged_prompts(rows), max_new_tokens=60), chance)
    control = costs(monkeypatch, model, drafter, 1.0)
    stats = run(model, drafter, rows)
    assert stats.num_draft_tokens == 0
    table = control.acceptance["known", 1]
    if chance:
        assert min(table.hazards(8)) > 0.7  # from a prior of 0.4
        assert table.kept == table.tried
    else:
        assert table.hazards(1)[0] < 0.1
        assert len(table.tried) == 1  # positions behind a rejection are censored here too


def test_watched_draft_goes_on_over_rounds() -> None:
    """Two of four guessed tokens come, one a round; a draft that is verified ends the watching."""
    learnt: list[tuple[int, int]] = []

    class Control(AdaptiveLength):
        def learn(self, outlook: Outlook, drafted: int, accepted: int) -> None:
            learnt.append((drafted, accepted))

    proposer, control = proposing.Proposer(tiny_model(), SpecConfig(), None, None), Control(0.0)
    guess = Outlook("lookup", 1, free=True, guess=(5, 6, 7, 8))
    other = Outlook("lookup", 1, free=True, guess=(1, 2, 3, 4))
    for new in ([5], [6], [9]):
        proposer._watch_text(control, 0, guess if new == [5] else other, False, new)
    assert learnt == [(4, 2)]
    proposer._watch_text(control, 0, guess, False, [5])
    proposer._watch_text(control, 0, guess, True, [6, 7])  # verified: counted by the round itself
    assert learnt == [(4, 2), (1, 1)]  # what was watched was right as far as it was seen
    proposer._watch_text(control, 0, other, False, [1])
    assert learnt == [(4, 2), (1, 1)]
    proposer._watch_text(control, 1, guess, False, [5, 6, 7, 8, 9])  # another row
    assert learnt == [(4, 2), (1, 1), (4, 4)]
    proposer._watch_text(control, 2, Outlook("none", acceptance=0.0), False, [5])
    assert learnt == [(4, 2), (1, 1), (4, 4)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sample", [False, True])
def test_draft_ends_where_it_is_unsure(monkeypatch: pytest.MonkeyPatch, sample: bool, rows: int) -> None:
    """Tokens that are accepted seldom, from a draft that knows it: fewer are verified than without the stop."""
    target, draft = exact_pair(noise=2.0)
    control = costs(monkeypatch, target, DraftModel(draft), 0.05, 0.05)
    monkeypatch.setattr(control, "choose", lambda outlook, most: min(8, most))
    changes: dict[str, Any] = {"do_sample": sample}
    if sample:
        torch.manual_seed(0)
    stats = run(target, DraftModel(draft), rows, **changes)
    assert stats.fallback_reason is None
    assert 0 < stats.num_draft_tokens < 7 * stats.num_spec_steps
    calibration = draft_model._CALIBRATIONS[target][draft]
    assert calibration.overall.tried > 5


def test_sure_draft_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = exact_pair()
    control = costs(monkeypatch, target, DraftModel(draft), 0.02, 0.02)
    monkeypatch.setattr(control, "choose", lambda outlook, most: min(6, most))
    stats = run(target, DraftModel(draft))
    assert stats.mean_acceptance_length > 4.5


def test_first_token_is_always_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its draft step is paid for, and only what is verified teaches the controller; nothing follows it."""
    target, draft = exact_pair()
    control = costs(monkeypatch, target, DraftModel(draft), 0.5)
    monkeypatch.setattr(control, "choose", lambda outlook, most: min(6, most))
    monkeypatch.setattr(draft_model.Calibration, "chances", lambda self, confidences: [0.01] * len(confidences))
    stats = run(target, DraftModel(draft))
    assert stats.num_draft_tokens == stats.num_spec_steps - stats.steps_by_source.get("none", 0)
    assert stats.draft_acceptance_rate == 1.0


def test_calibration_is_hopeful_then_true() -> None:
    calibration = draft_model.Calibration()
    assert calibration.chances([0.05, 0.97]) == pytest.approx([0.525, 0.985])
    for _ in range(200):
        calibration.update(0.05, True)
        calibration.update(0.97, False)
    timid, bold = calibration.chances([0.05, 0.97])
    assert timid > 0.95
    assert bold < 0.05
    assert calibration.chances([0.5]) == [0.775]  # 0.5 to 0.6: not seen yet


def test_fixed_length_is_never_ended() -> None:
    target, draft = exact_pair(noise=5.0)
    config = SpecConfig(drafter="draft_model", draft_model=draft, draft_length="fixed", num_draft_tokens=4)
    stats = run(target, config)
    assert stats.num_draft_tokens > 3.5 * stats.num_spec_steps


def test_generation_that_loses_goes_on_without_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Estimates that would draft for ever, and rounds that take twice as long as they bring."""
    model = tiny_model()

    class Stubborn(Drafter):
        name = "stubborn"

        def propose(self, rows: Any, most: int) -> Draft:
            return Draft.from_lists([[96, 96]] * len(rows.live))

    control = costs(monkeypatch, model, Stubborn(), 0.0)
    monkeypatch.setattr(control, "choose", lambda outlook, most: min(2, most))
    monkeypatch.setattr(control, "plain_seconds", lambda rows: 1e-9)
    monkeypatch.setattr(length, "WINDOW", 20)
    monkeypatch.setattr(proposing.GainWatch, "__init__", lambda self: setattr(self, "rounds", length.deque(maxlen=20)))

    with caplog.at_level("INFO"):
        stats = run(model, Stubborn())
    assert stats.fallback_reason is not None
    assert stats.fallback_reason.startswith("speculative disabled: measured gain 0.00x in 20 drafted rounds")
    assert stats.fallback_reason in caplog.text
    assert stats.steps_by_source["none"] > 30
    again = run(model, Stubborn())
    assert again.steps_by_source["stubborn"] == 20  # each generation is judged by itself


def test_costs_are_measured_once_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    calls: list[int] = []
    measured = hf_specdec.decoding.measure
    monkeypatch.setattr(hf_specdec.decoding, "measure", lambda *given: calls.append(given[2]) or measured(*given))
    first = run(model, "prompt_lookup")
    assert calls == [17]
    assert first.calibration_seconds > 0
    assert first.num_target_forwards == 1 + first.num_spec_steps  # what is measured isn't counted
    run(model, "none")
    run(model, SpecConfig(draft_length="fixed"))
    assert calls == [17]  # nothing to choose, nothing to measure


def test_public_reset() -> None:
    model = tiny_model()
    run(model, "prompt_lookup")
    assert controller_of(model, PromptLookup()).verify
    run(model, "recycling")
    assert recycling._MEMORIES[model].successors
    hf_specdec.reset(model)
    assert not controller_of(model, PromptLookup()).verify
    assert model not in recycling._MEMORIES


def test_reading_up_is_not_a_draft_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft reads the prompt, one behind plain rounds reads what they said: neither tells what a step costs."""
    target, draft = exact_pair()
    lengths = iter([3, 3, 0, 0, 0, 3, 3, *[0] * 60])
    control = controller_of(target, DraftModel(draft))
    monkeypatch.setattr(control, "choose", lambda outlook, most: min(next(lengths), most))
    monkeypatch.setattr(control, "pays", lambda *given: True)
    seen = []
    observe = control.observe
    monkeypatch.setattr(control, "observe", lambda each: seen.append(each) or observe(each))
    run(target, DraftModel(draft))
    assert [each.draft_seconds > 0 for each in seen[:7]] == [False, True, False, False, False, False, True]


def test_a_draft_is_no_wider_than_it_is_long() -> None:
    """What stands behind all counts costs nothing in the forward, and must not be learnt as if it had."""
    draft = Draft(torch.ones(2, 8, dtype=torch.long), [8, 1], torch.full((2, 8, 5), 0.2))
    cut = checked(draft, 2, 2, 5, torch.device("cpu"))
    assert cut.tokens.shape == (2, 2)
    assert cut.probs is not None
    assert cut.probs.shape == (2, 2, 5)
    assert cut.counts == [2, 1]
