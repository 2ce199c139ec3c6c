"""Lookup where the text repeats itself, the model elsewhere, row by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import Draft, Hybrid, SpecConfig
from hf_specdec.drafters import DraftModel, Outlook
from hf_specdec.engine.rows import Rows

from ..plain import assert_sound, ends_apart, new_tokens, options, plain_texts
from ..tiny import exact_pair, ragged_prompts


pytestmark = pytest.mark.usefixtures("one_thread")
REPEATING = [5, 6, 7, 8, 9, 10, 11, 12]


def prompts_of(*texts: list[int]) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def run(
    target: Any, drafter: Any, prompts: dict[str, torch.Tensor], **changes: Any
) -> tuple[hf_specdec.SpecStats, list[hf_specdec.StepEvent]]:
    events: list[hf_specdec.StepEvent] = []
    config = SpecConfig(drafter=drafter, draft_length="fixed", num_draft_tokens=4, on_step=events.append)
    output = hf_specdec.generate(target, **prompts, **options(**changes), speculative=config)
    if not changes.get("do_sample"):
        assert new_tokens(output, prompts) == plain_texts(target, prompts, **changes)
    stats = hf_specdec.last_stats(target)
    assert stats.fallback_reason is None
    assert_sound(stats)
    return stats, events


def count_forwards(draft: Any) -> list[int]:
    calls: list[int] = []
    draft.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    return calls


def test_model_is_not_run_where_every_row_has_a_match() -> None:
    target, draft = exact_pair()
    calls = count_forwards(draft)
    hybrid = Hybrid(DraftModel(draft), min_match=1)
    prompts = prompts_of([5] * 30)
    # two tokens are forced over and over, so that the text repeats itself from the start
    stats, _ = run(target, hybrid, prompts, suppress_tokens=[token for token in range(97) if token != 5])
    assert not calls
    assert set(stats.steps_by_source) <= {"prompt_lookup", "none"}
    assert stats.draft_acceptance_rate == 1


def test_lookup_is_not_trusted_below_its_shortest_match() -> None:
    target, draft = exact_pair()
    calls = count_forwards(draft)
    stats, _ = run(target, Hybrid(DraftModel(draft), min_match=65), prompts_of(REPEATING * 4))
    assert calls
    assert set(stats.steps_by_source) == {"draft_model"}
    assert stats.draft_acceptance_rate == 1


def test_rows_of_both_kinds_in_one_round() -> None:
    target, draft = exact_pair()
    fresh = ragged_prompts(1)["input_ids"][0].tolist()
    _, events = run(target, Hybrid(DraftModel(draft)), prompts_of(REPEATING * 4 + REPEATING[:4], fresh))
    first = events[1]
    by_row = dict(zip(first.rows, first.source, strict=True))
    assert by_row[1] == "draft_model"
    # the text that was not copied is the perfect draft's: all of it is right
    for event in events[1:]:
        for source, guess, kept in zip(event.source, event.drafted, event.accepted, strict=True):
            if source == "draft_model":
                assert kept == len(guess)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_draft_models_cache_stays_in_step(rows: int, noise: float) -> None:
    """However the rounds alternate, what the model drafts is what it drafts without lookup in between."""
    target, draft = exact_pair(noise=noise)
    prompts = ragged_prompts(rows)
    stats, events = run(target, Hybrid(DraftModel(draft), min_match=1), prompts, max_new_tokens=36)
    assert len(stats.steps_by_source) > 1
    written = [0] * rows
    texts = plain_texts(target, prompts, max_new_tokens=36)
    for event in events:
        lines = zip(event.rows, event.source, event.drafted, event.emitted, strict=True)
        for row, source, guess, emitted in lines:
            if source == "draft_model":
                mask = prompts["attention_mask"][row].bool()
                text = prompts["input_ids"][row][mask].tolist() + texts[row][: written[row]]
                with torch.no_grad():
                    for token in guess:
                        expected = int(draft(input_ids=torch.tensor([text])).logits[0, -1].argmax())
                        assert token == expected
                        text.append(token)
            written[row] += len(emitted)
    assert written == [36] * rows


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_sampling(verification: str) -> None:
    """A copied token counts as drawn from a distribution that holds nothing else; all distributions sum to one."""
    target, draft = exact_pair()
    prompts = prompts_of(REPEATING * 4, ragged_prompts(1)["input_ids"][0].tolist(), [7] * 20)
    seen: list[Any] = []
    original = Hybrid.propose

    def propose(self: Hybrid, rows: Any, length: int) -> Any:
        found = original(self, rows, length)
        seen.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hybrid, "propose", propose)
        config = SpecConfig(
            drafter=Hybrid(DraftModel(draft), min_match=1), draft_length="fixed", verification=verification, seed=4
        )
        output = hf_specdec.generate(target, **prompts, **options(do_sample=True), speculative=config)
    assert output.shape[1] == prompts["input_ids"].shape[1] + 24
    mixed = 0
    for each in seen:
        if each.probs is None:
            continue
        for row, count in enumerate(each.counts):
            q = each.probs[row, :count]
            torch.testing.assert_close(q.sum(-1), torch.ones(count))
            if each.sources[row] == "prompt_lookup" and count:
                mixed += 1
                assert (q.gather(1, each.tokens[row, :count, None]) == 1).all()
    assert mixed if verification != "coupled" else not mixed


def test_rows_that_end_early() -> None:
    target, draft = exact_pair(noise=0.3)
    prompts = ragged_prompts(8)
    ends = ends_apart(plain_texts(target, prompts))
    run(target, Hybrid(DraftModel(draft), min_match=1), prompts, eos_token_id=ends)


def test_instance_keeps_nothing_of_a_generation() -> None:
    target, draft = exact_pair()
    hybrid = Hybrid(DraftModel(draft))
    before = (dict(vars(hybrid)), dict(vars(hybrid.model)), dict(vars(hybrid.lookup)))
    run(target, hybrid, ragged_prompts(3))
    assert (vars(hybrid), vars(hybrid.model), vars(hybrid.lookup)) == before


def test_names_of_sources_are_in_the_statistics() -> None:
    target, draft = exact_pair()
    stats, _ = run(target, Hybrid(DraftModel(draft)), ragged_prompts(3))
    assert stats.drafter == "hybrid"
    assert set(stats.steps_by_source) <= {"prompt_lookup", "draft_model", "none"}
    assert sum(stats.steps_by_source.values()) == stats.num_spec_steps


def test_a_copy_is_not_cut_where_the_model_stops() -> None:
    """The model drafts one token for its row; the other row's copy keeps its six, also as a distribution."""

    class Short(DraftModel):
        def start(self, context: Any) -> None:
            self.disregarded: list[int] = []

        def outlook(self, rows: Any) -> list[Outlook]:
            return [Outlook(self.name)] * len(rows.live)

        def propose(self, rows: Any, length: int, wanted: Any = None) -> Draft:
            assert wanted == [False, True]
            return Draft(torch.tensor([[50], [51]]), [1, 1], torch.full((2, 1, 97), 1 / 97))

        def disregard(self, row: int) -> None:
            self.disregarded.append(row)

    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]
    rows = Rows(torch.tensor(texts), None, 20, 0)
    hybrid = Hybrid(Short(None))
    hybrid.start(SimpleNamespace(rows=rows, end_tokens=frozenset()))
    hybrid.outlook(rows)
    draft = hybrid.propose(rows, 6)
    assert draft.counts == [6, 1]
    assert draft.tokens.tolist() == [[4, 5, 6, 7, 8, 9], [51, 0, 0, 0, 0, 0]]
    assert draft.sources == ["prompt_lookup", "draft_model"]
    assert draft.probs is not None
    assert draft.probs.shape == (2, 6, 97)
    assert draft.probs[0].argmax(-1).tolist() == [4, 5, 6, 7, 8, 9]
    assert hybrid.model.disregarded == [0]


def test_the_model_is_not_asked_where_no_row_wants_it() -> None:
    """Rows without a match have run out of the model's positions: what was copied for the others still counts."""

    class Full(DraftModel):
        def start(self, context: Any) -> None: ...

        def outlook(self, rows: Any) -> list[Outlook]:
            return [Outlook(self.name, acceptance=0.0)] * len(rows.live)

        def propose(self, rows: Any, length: int, wanted: Any = None) -> Draft:
            raise AssertionError("asked")

    rows = Rows(torch.tensor([[1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7]]), None, 20, 0)
    hybrid = Hybrid(Full(None))
    hybrid.start(SimpleNamespace(rows=rows, end_tokens=frozenset()))
    hybrid.outlook(rows)
    draft = hybrid.propose(rows, 3)
    assert draft.counts == [3, 0]
    assert draft.tokens[0].tolist() == [4, 1, 2]
