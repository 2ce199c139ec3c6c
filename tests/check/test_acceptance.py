"""Acceptance: counts, intervals, families, and the draft length that follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hf_specdec import SpecConfig
from hf_specdec.check.acceptance import by_category, families, interval, measure_acceptance, summarise
from hf_specdec.check.lengths import draft_lengths
from hf_specdec.tools.intervals import wilson
from hf_specdec.tools.loading import LoadedModel
from hf_specdec.tools.suites import BenchPrompt

from .made_up import counts
from .tiny_pair import PROMPTS, tiny_pair


def test_prompts_that_differ_widen_the_interval() -> None:
    tries = np.full(10, 100)
    alike, apart = np.full(10, 50), np.array([0, 100] * 5)
    narrow, wide = interval(alike, tries), interval(apart, tries)
    assert narrow is not None
    assert wide is not None
    assert narrow == pytest.approx(wilson(500, 1000))
    assert wide[0] < 0.3 < 0.7 < wide[1]
    assert interval(np.zeros(10), np.zeros(10)) is None
    few = interval(np.array([0, 100]), np.array([100, 100]))
    assert few == pytest.approx(wilson(100, 200))


def test_the_interval_holds_what_it_says() -> None:
    """Of 200 samples of 24 prompts with chances of their own, nearly all intervals hold the mean chance."""
    draw, held = np.random.default_rng(1), 0
    for _ in range(200):
        chances = draw.beta(4, 2, 24)
        found = interval(draw.binomial(40, chances), np.full(24, 40))
        assert found is not None
        held += found[0] <= 4 / 6 <= found[1]
    assert 178 <= held <= 199


def test_summary() -> None:
    found = summarise(
        [counts("chat", 0, 20), counts("chat", 1, 40) | {"drafted_at": [25, 20], "accepted_at": [20, 9]}]
    )
    assert found["draft_acceptance_rate"] == 60 / 120
    assert found["mean_acceptance_length"] == 1 + 60 / 60
    assert found["mean_acceptance_length_interval"] is None  # two prompts
    assert found["drafting_share"] == 50 / 60
    assert [(each["drafted"], each["accepted"]) for each in found["positions"]] == [(50, 30), (30, 14), (5, 3)]
    empty = summarise(
        [counts("chat", 0) | {"steps": 0, "drafted": 0, "accepted": 0, "drafted_at": [], "accepted_at": []}]
    )
    assert (empty["draft_acceptance_rate"], empty["mean_acceptance_length"], empty["positions"]) == (None, 1.0, [])


def test_by_category() -> None:
    found = by_category([counts("chat", 0, 10), counts("code", 0, 30)])
    assert list(found) == ["chat", "code", "all"]
    assert found["all"]["prompts"] == 2
    assert found["chat"]["draft_acceptance_rate"] < found["code"]["draft_acceptance_rate"]


def test_lengths_need_acceptance_and_costs() -> None:
    costs = {
        "1": {"context": 9, "plain_step": 2.0, "draft_step": None, "forward": {str(n): 1.0 for n in range(1, 17)}}
    }
    good = summarise([counts("chat", 0) | {"drafted_at": [100, 80, 60], "accepted_at": [80, 60, 45], "steps": 100, "steps_by_source": {"prompt_lookup": 100}}])  # fmt: skip
    found = draft_lengths(good, costs)
    assert found is not None
    assert [each["tokens"] for each in found["curve"]] == pytest.approx([1.8, 2.4, 2.85])
    assert [each["speedup"] for each in found["curve"]] == pytest.approx([1.8, 2.4, 2.85])  # passes cost the same
    assert (found["best"], found["forward_gain"], found["draft_cost"]) == (3, 2.0, 0.0)
    assert draft_lengths(good, {}) is None
    assert draft_lengths(summarise([]), costs) is None


def test_drafts_that_are_too_dear() -> None:
    forward = {str(n): 1.0 + 0.5 * (n - 1) for n in range(1, 17)}
    costs = {"1": {"context": 9, "plain_step": 1.0, "draft_step": 0.6, "forward": forward}}
    row = counts("chat", 0) | {
        "drafted_at": [100],
        "accepted_at": [90],
        "steps": 100,
        "steps_by_source": {"draft_model": 100},
    }
    found = draft_lengths(summarise([row]), costs)
    assert found is not None
    assert (found["best"], found["draft_cost"], found["break_even"]) == (0, 0.6, None)


def test_steps_without_a_draft_gain_nothing() -> None:
    costs = {"1": {"context": 9, "plain_step": 1.0, "draft_step": None, "forward": {"1": 1.0, "2": 1.0}}}
    row = counts("chat", 0) | {
        "drafted_at": [50],
        "accepted_at": [50],
        "steps": 100,
        "steps_by_source": {"prompt_lookup": 50, "none": 50},
    }
    found = draft_lengths(summarise([row]), costs)
    assert found is not None
    assert found["curve"][0]["speedup"] == pytest.approx(1.5)


def measured(config: SpecConfig, temperature: float) -> list[dict[str, Any]]:
    loaded, _ = tiny_pair()
    return measure_acceptance(
        loaded, PROMPTS, config, num_draft_tokens=4, max_new_tokens=24, temperature=temperature, seed=3
    )


@pytest.mark.usefixtures("one_thread")
def test_a_draft_that_is_the_target_is_accepted_whole() -> None:
    loaded, _ = tiny_pair()
    rows = measured(SpecConfig(drafter="draft_model", draft_model=loaded.model), 0.0)
    found = summarise(rows)
    assert found["draft_acceptance_rate"] == 1
    assert found["mean_acceptance_length"] > 4
    assert {row["drafter"] for row in rows} == {"draft_model"}
    assert [row["prompt"] for row in rows] == [prompt.id for prompt in PROMPTS]


@pytest.mark.usefixtures("one_thread")
def test_families_of_sampled_drafts() -> None:
    _, draft = tiny_pair()
    rows = measured(SpecConfig(drafter="draft_model", draft_model=draft), 1.0)
    found = families(rows)
    assert found["A1"] == found["B1"]
    assert 0 < found["B2"] < found["A1"] < 1
    accepted = sum(sum(row["accepted_at"]) for row in rows)
    tried = sum(row["overlaps"]["tried"] for row in rows)
    assert found["A2"] == pytest.approx(accepted / tried, abs=0.1)  # what rejection sampling really accepted
    assert rows == measured(SpecConfig(drafter="draft_model", draft_model=draft), 1.0)  # the seed decides


@pytest.mark.usefixtures("one_thread")
def test_families_of_copied_drafts_are_one() -> None:
    rows = measured(SpecConfig(drafter="prompt_lookup"), 1.0)
    accepted, tried = (sum(sum(row[name]) for row in rows) for name in ("accepted_at", "drafted_at"))
    assert tried > 0
    assert set(families(rows).values()) == {accepted / tried}


def test_nothing_drafted() -> None:
    assert families([]) == {"A1": None, "A2": None, "B1": None, "B2": None}


@pytest.mark.usefixtures("one_thread")
def test_chats_are_prompts_too() -> None:
    loaded, draft = tiny_pair()
    chat = [{"role": "user", "content": "one two one two"}]
    config = SpecConfig(drafter="draft_model", draft_model=draft)
    templated = LoadedModel(loaded.name, loaded.model, loaded.tokenizer)
    rows = [
        measure_acceptance(templated, [BenchPrompt("1", "a", text)], config, num_draft_tokens=4, max_new_tokens=8)
        for text in (chat, "one two one two")
    ]
    assert rows[0] == rows[1]
