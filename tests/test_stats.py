"""The statistics: definitions, sums that must agree, and that they cost nothing but counting."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_specdec
from hf_specdec import DraftModel, SpecConfig, SpecStats, StepEvent
from hf_specdec.stats import RowStats

from .plain import assert_sound, options, plain_texts
from .tiny import Oracle, exact_pair, ragged_prompts, tiny_model


def known() -> SpecStats:
    """Three steps of two rows: 2 of 3 accepted, 0 of 2, 3 of 3; the prefill emitted one token a row."""
    stats = SpecStats(drafter="draft_model", rows=[RowStats(), RowStats()])
    for row in (0, 1):
        stats.record_emitted(row, 1)
    stats.record_row(0, "draft_model", drafted=3, accepted=2, emitted=3)
    stats.record_row(1, "prompt_lookup", drafted=2, accepted=0, emitted=1)
    stats.record_row(0, "draft_model", drafted=3, accepted=3, emitted=4)
    stats.total_seconds, stats.num_target_forwards = 2.0, 3
    return stats


def run(target: Any, events: list[StepEvent] | None = None, **settings: Any) -> tuple[Tensor, SpecStats]:
    fields = {name: settings.pop(name) for name in tuple(settings) if name in SpecConfig.__dataclass_fields__}
    config = SpecConfig(on_step=None if events is None else events.append, **fields)
    output = hf_specdec.generate(target, **settings, speculative=config)
    stats = hf_specdec.last_stats(target)
    assert stats is not None
    return output, stats


def test_derived_figures_follow_their_definitions() -> None:
    stats = known()
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (3, 8, 5)
    assert stats.num_emitted_tokens == 10
    assert stats.mean_acceptance_length == 1 + 5 / 3
    assert stats.draft_acceptance_rate == 5 / 8
    assert stats.acceptance_histogram == [1, 0, 1, 1]
    # positions count only where everything before them was accepted
    assert (stats.drafted_at, stats.accepted_at) == ([3, 2, 2], [2, 2, 1])
    assert stats.per_position_acceptance == [2 / 3, 1.0, 1 / 2]
    assert stats.tokens_per_second == 5.0
    assert stats.steps_by_source == {"draft_model": 2, "prompt_lookup": 1}
    assert stats.rows == [RowStats(2, 6, 5, 8), RowStats(1, 2, 0, 2)]
    assert_sound(stats, emitted=10)


def test_nothing_yet_divides_by_nothing() -> None:
    stats = SpecStats()
    assert stats.mean_acceptance_length == 1.0
    assert stats.draft_acceptance_rate == 0.0
    assert stats.per_position_acceptance == []
    assert stats.tokens_per_second == 0.0
    assert len(str(stats).splitlines()) == 2


@pytest.mark.parametrize("stats", [SpecStats(), known(), SpecStats(fallback_reason="`x` is y")])
def test_to_dict_is_json_with_every_figure(stats: SpecStats) -> None:
    loaded = json.loads(json.dumps(stats.to_dict(), allow_nan=False))
    assert loaded == stats.to_dict()
    assert set(SpecStats.__dataclass_fields__) <= set(loaded)
    assert {"mean_acceptance_length", "draft_acceptance_rate", "per_position_acceptance", "tokens_per_second"} <= set(
        loaded
    )


def test_str_is_two_lines_that_say_it_all() -> None:
    first, second = str(known()).splitlines()
    assert first.startswith(
        "draft_model: 10 tokens in 3 steps, 2.67 tokens a step, 5 of 8 draft tokens accepted (62%)"
    )
    assert "5.0 tokens/s" in second
    _, second = str(SpecStats(fallback_reason="beams")).splitlines()
    assert second.endswith("decoded plainly: beams")


CASES = {
    "draft_model": (lambda draft, texts: DraftModel(draft), {}),
    "draft_model, sampled": (lambda draft, texts: DraftModel(draft), {"do_sample": True}),
    "draft_model, fixed": (lambda draft, texts: DraftModel(draft), {"draft_length": "fixed", "num_draft_tokens": 4}),
    "hybrid, sampled": (lambda draft, texts: hf_specdec.Hybrid(DraftModel(draft), 1), {"do_sample": True}),
    "prompt_lookup": (lambda draft, texts: "prompt_lookup", {}),
    "perfect": (lambda draft, texts: Oracle(texts, 1.0), {"draft_length": "fixed"}),
    "mixed": (lambda draft, texts: Oracle(texts, 0.6), {"draft_length": "fixed"}),
    "adversarial": (lambda draft, texts: Oracle(texts, 0.0), {"draft_length": "fixed"}),
    "none": (lambda draft, texts: "none", {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 3])
def test_counts_and_events_add_up_to_the_output(case: str, rows: int) -> None:
    make, changes = CASES[case]
    target, draft = exact_pair(noise=0.4)
    prompts = ragged_prompts(rows)
    texts = plain_texts(target, prompts)
    # the first row ends early, so that rows leave at different rounds
    settings = options(eos_token_id=texts[0][9], **{"do_sample": changes.get("do_sample", False)})
    fields = {name: value for name, value in changes.items() if name != "do_sample"}
    events: list[StepEvent] = []
    output, stats = run(target, events, drafter=make(draft, texts), **fields, **prompts, **settings)
    said = [[token for event in events for at, token in spoken(event, row)] for row in range(rows)]
    for row, tokens in enumerate(said):
        length = len(tokens)
        assert output[row, 24 : 24 + length].tolist() == tokens
        assert (output[row, 24 + length :] == 0).all()
        assert stats.rows[row].num_emitted_tokens == length
    assert_sound(stats, emitted=sum(map(len, said)))
    assert [event.step for event in events] == list(range(stats.num_target_forwards))
    assert stats.num_spec_steps == sum(len(event.rows) for event in events[1:])
    assert stats.num_draft_tokens == sum(len(guess) for event in events for guess in event.drafted)
    assert sum(stats.steps_by_source.values()) == stats.num_spec_steps
    assert sum(row.num_draft_tokens for row in stats.rows) == stats.num_draft_tokens
    assert sum(row.num_accepted_draft_tokens for row in stats.rows) == stats.num_accepted_draft_tokens
    assert sum(row.num_spec_steps for row in stats.rows) == stats.num_spec_steps
    assert sum(stats.accepted_at) == stats.num_accepted_draft_tokens
    assert all(kept <= tried for kept, tried in zip(stats.accepted_at, stats.drafted_at, strict=True))
    # one token of each step is the target's own, except where a stop cut it off
    assert stats.num_emitted_tokens <= rows + stats.num_spec_steps + stats.num_accepted_draft_tokens
    assert stats.num_emitted_tokens >= stats.num_spec_steps + stats.num_accepted_draft_tokens
    for event in events[1:]:
        assert len(event.rows) == len(event.drafted) == len(event.accepted) == len(event.emitted) == len(event.source)
        for guess, kept, new, source in zip(event.drafted, event.accepted, event.emitted, event.source, strict=True):
            assert 1 <= len(new) <= kept + 1
            assert kept <= len(guess)
            assert guess[: min(kept, len(new))] == new[:kept]
            assert (source == "none") == (not guess)
        assert event.seconds > 0


def spoken(event: StepEvent, row: int) -> list[tuple[int, int]]:
    return [(row, token) for at, new in zip(event.rows, event.emitted, strict=True) if at == row for token in new]


@pytest.mark.parametrize(("chance", "rate"), [(1.0, 1.0), (0.0, 0.0)])
def test_a_perfect_and_an_adversarial_draft(chance: float, rate: float) -> None:
    target = tiny_model()
    prompts = ragged_prompts(3)
    texts = plain_texts(target, prompts, max_new_tokens=25)
    drafter = Oracle(texts, chance)
    _, stats = run(
        target, drafter=drafter, num_draft_tokens=5, draft_length="fixed", **prompts, **options(max_new_tokens=25)
    )
    assert stats.draft_acceptance_rate == rate
    # 1 from the prefill, then six a step or one
    assert stats.num_spec_steps == 3 * (4 if rate else 24)
    assert stats.num_target_forwards == 1 + (4 if rate else 24)
    assert stats.mean_acceptance_length == (6.0 if rate else 1.0)
    assert stats.per_position_acceptance == ([1.0] * 5 if rate else [0.0])
    assert stats.acceptance_histogram == ([0, 0, 0, 0, 0, 12] if rate else [72])


def test_tokens_behind_a_stop_do_not_count_as_accepted() -> None:
    target = tiny_model()
    prompts = ragged_prompts(1)
    text = plain_texts(target, prompts)[0]
    end = text[3]
    length = text.index(end) + 1
    output, stats = run(
        target, drafter=Oracle([text], 1.0), num_draft_tokens=8, draft_length="fixed", **prompts,
        **options(eos_token_id=end),
    )  # fmt: skip
    assert output[0, 24:].tolist() == text[:length]
    assert stats.num_emitted_tokens == length
    assert stats.num_accepted_draft_tokens == length - 1
    assert_sound(stats)


def test_times_are_parts_of_the_whole() -> None:
    target, draft = exact_pair()
    _, stats = run(target, draft_model=draft, **ragged_prompts(1), **options())
    parts = (stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds)
    assert all(part > 0 for part in parts)
    assert sum(parts) <= stats.total_seconds
    assert stats.tokens_per_second == pytest.approx(24 / stats.total_seconds)


def test_the_output_carries_them() -> None:
    target, draft = exact_pair()
    settings = options(return_dict_in_generate=True)
    output, stats = run(target, draft_model=draft, **ragged_prompts(2), **settings)
    assert isinstance(output, hf_specdec.SpecOutput)
    assert output.spec_stats is stats
    assert stats.num_emitted_tokens == 48
    beams = hf_specdec.generate(target, **ragged_prompts(2), **settings, num_beams=2)
    assert not hasattr(beams, "spec_stats")
    plain, stats = run(target, **ragged_prompts(2), **settings, use_cache=False)
    assert plain.spec_stats is stats
    assert "use_cache" in str(stats.fallback_reason)
    assert torch.equal(plain.sequences, output.sequences)


def test_a_plain_decoding_counts_what_it_emitted() -> None:
    target = tiny_model()
    prompts = ragged_prompts(3)
    texts = plain_texts(target, prompts)
    end = texts[0][5]
    wanted = target.generate(**prompts, **options(eos_token_id=end))
    output, stats = run(target, **prompts, **options(eos_token_id=end), use_cache=False)
    assert torch.equal(output, wanted)
    lengths = [text.index(end) + 1 if end in text else 24 for text in texts]
    assert min(lengths) < max(lengths)
    assert stats.num_emitted_tokens == sum(lengths), "padding is not counted"


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_the_sums_predict_acceptance(verification: str) -> None:
    target = tiny_model(vocab_size=20)
    draft = tiny_model(vocab_size=20, seed=1)
    with torch.no_grad():
        for model in (target, draft):
            model.lm_head.weight.mul_(0.2)
    _, stats = run(
        target, draft_model=draft, drafter="draft_model", num_draft_tokens=4, draft_length="fixed", seed=3,
        verification=verification, input_ids=torch.randint(1, 20, (300, 6)),
        **options(do_sample=True, max_new_tokens=40, top_k=0),
    )  # fmt: skip
    tried, kept = sum(stats.drafted_at), sum(stats.accepted_at)
    assert kept == stats.num_accepted_draft_tokens
    assert 0 < stats.sum_pq < stats.sum_min_pq < tried
    assert 0 < stats.sum_p_argmax_q < stats.sum_min_pq
    if verification == "rejection":
        # each tried position is accepted with chance Σmin(p, q): a martingale with steps of variance at most 1/4
        assert abs(kept - stats.sum_min_pq) < 5 * math.sqrt(tried / 4)
        assert abs(kept - stats.sum_p_argmax_q) > 5 * math.sqrt(tried / 4)
    else:
        assert kept > stats.sum_min_pq - 5 * math.sqrt(tried / 4)


def test_greedy_and_lookup_have_no_sums() -> None:
    target, draft = exact_pair()
    for settings in ({"draft_model": draft}, {"drafter": "prompt_lookup", "do_sample": True}):
        _, stats = run(target, **ragged_prompts(2), **(options() | settings))
        assert (stats.sum_min_pq, stats.sum_p_argmax_q, stats.sum_pq) == (0.0, 0.0, 0.0)


def test_an_observer_that_raises_is_heard() -> None:
    def observer(event: StepEvent) -> None:
        raise RuntimeError("seen")

    model = tiny_model()
    with pytest.raises(RuntimeError, match="seen"):
        hf_specdec.generate(model, **ragged_prompts(1), **options(), speculative=SpecConfig(on_step=observer))
    assert hf_specdec.generate(model, **ragged_prompts(1), **options()).shape == (1, 48)
