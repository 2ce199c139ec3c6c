"""Replaying a generation's forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.engine.forward import RowModel
from hf_specdec.stats import StepEvent
from hf_specdec.tools import replay as module
from hf_specdec.tools.replay import replay
from tests.tiny import exact_pair, ragged_prompts, tiny_model


Calls = list[tuple[str, int, list[int], list[list[int]]]]


def watch(monkeypatch: pytest.MonkeyPatch, target: Any) -> Calls:
    """Every forward: whose, how wide, behind how many tokens of each row, and what it read."""
    calls: Calls = []
    forward = RowModel.forward

    def noting(self: RowModel, tokens: torch.Tensor, counts: Any, *rest: Any, **options: Any) -> Any:
        read = [row[:count] for row, count in zip(tokens.tolist(), counts, strict=True)]
        calls.append(("target" if self.model is target else "draft", tokens.shape[1], list(self.cache.lengths), read))
        return forward(self, tokens, counts, *rest, **options)

    monkeypatch.setattr(RowModel, "forward", noting)
    return calls


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_forwards_in_the_same_order(monkeypatch: pytest.MonkeyPatch, rows: int, noise: float) -> None:
    """Each is as wide and behind as many tokens as in the generation, and the target reads the same ones.

    What a draft read beyond what its row had room for isn't told by the events.
    """
    target, draft = exact_pair(2, noise)
    prompts = ragged_prompts(rows)
    events: list[StepEvent] = []
    config = hf_specdec.SpecConfig(
        drafter="draft_model", draft_model=draft, num_draft_tokens=3, draft_length="fixed", on_step=events.append
    )
    calls = watch(monkeypatch, target)
    end = {"eos_token_id": list(range(8))}  # rows end at different times
    hf_specdec.generate(target, **prompts, max_new_tokens=20, do_sample=False, speculative=config, **end)
    generated = list(calls)
    calls.clear()
    texts = [ids[keep.bool()].tolist() for ids, keep in zip(*prompts.values(), strict=True)]
    assert replay(target, draft, texts, events) > 0
    assert [call[:3] for call in calls] == [call[:3] for call in generated]
    assert [call for call in calls if call[0] == "target"] == [call for call in generated if call[0] == "target"]
    assert {("target", 4), ("draft", 1)} <= {(whose, width) for whose, width, *_ in calls}
    assert {len(read) for *_, read in calls} > {rows} if rows > 1 else True


def test_lookups_need_no_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = tiny_model(), ragged_prompts(1)
    events: list[StepEvent] = []
    calls = watch(monkeypatch, model)
    config = hf_specdec.SpecConfig(drafter="prompt_lookup", on_step=events.append)
    hf_specdec.generate(model, **prompts, max_new_tokens=30, do_sample=False, speculative=config)
    calls.clear()
    replay(model, None, prompts["input_ids"].tolist(), events)
    assert [width for _, width, *_ in calls[1:]] == [1 + len(event.drafted[0]) for event in events[1:]]
    assert [behind for _, _, behind, _ in calls][1:3] == [[24], [24 + len(events[1].emitted[0])]]


def test_the_clock_runs_from_the_prefill_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([3.0, 10.0])
    monkeypatch.setattr(module, "now", lambda device: next(times))
    event = StepEvent(0, (0,), ((),), (0,), ((5,),), ("none",), 0.0)
    assert replay(tiny_model(), None, [[1, 2, 3]], [event]) == 7.0
