"""The sentence about a run's speed, its arithmetic, and the numbers behind the plots."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hf_specdec import SpecStats
from hf_specdec.web import explain
from hf_specdec.web.timeline import Comparison, Side, Token


SETTINGS = {"strategy": "auto", "num_draft_tokens": 0, "temperature": 0.0, "prompt": "SECRET words", "chat": True}


def stats(passes: int = 10, drafted: int = 40, accepted: int = 20, **more: Any) -> dict[str, Any]:
    """Of a run whose passes took 0.15 s each, 0.05 s of it for drafts; a plain step takes 0.1 s."""
    given = {
        "num_spec_steps": passes, "num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted,
        "num_target_forwards": passes + 1, "verify_seconds": 0.1 * passes, "draft_seconds": 0.05 * passes,
        "prefill_seconds": 0.2, "steps_by_source": {"draft_model": passes - 2, "none": 2},
        "acceptance_histogram": [2, 0, 8],
    }  # fmt: skip
    return SpecStats(**given | more).to_dict()


def comparison(given: dict[str, Any] | None = None, tokens: int = 31, **more: Any) -> Comparison:
    off = [Token(at, "x", 0.2 + 0.1 * at) for at in range(tokens)]
    on = [Token(at, "x", 0.2 + 0.05 * (at // 3)) for at in range(tokens)]
    sides = Side(off, [], off[-1].seconds, True), Side(on, [], 2.0, True, stats=stats() if given is None else given)
    return replace(Comparison(*sides, dict(SETTINGS), "model", "", title="an example"), **more)


class TestBreakEven:
    @pytest.mark.parametrize(
        ("verify", "draft", "drafted", "rate"),
        [
            (1.0, 0.5, 40, 0.125),  # passes of 1.5 steps with 4 drafted: half a step over four tokens
            (1.0, 1.0, 40, 0.25),
            (2.0, 1.0, 20, 1.0),  # two tokens at 3 steps: all must be right
            (9.0, 1.0, 20, 1.0),  # and there is no more than all
            (0.5, 0.1, 40, 0.0),  # cheaper than a plain step
        ],
    )
    def test_by_hand(self, verify: float, draft: float, drafted: int, rate: float) -> None:
        found = comparison(stats(drafted=drafted, verify_seconds=verify, draft_seconds=draft))
        assert explain.break_even(found) == pytest.approx(rate)

    def test_none(self) -> None:
        assert explain.break_even(comparison(stats(drafted=0, accepted=0))) is None
        assert explain.break_even(comparison(stats(passes=0, drafted=0, accepted=0))) is None
        assert explain.break_even(comparison({})) is None
        assert explain.break_even(comparison(tokens=1)) is None


class TestWhy:
    def test_pays(self) -> None:
        assert explain.why(comparison()) == (
            "A pass with its draft took 1.50 plain steps and gave 3.00 tokens, so it pays; 80% of the passes had a draft, and "
            "50% of the draft tokens were right. That is above the break-even of about 12%."
        )

    def test_costs(self) -> None:
        text = explain.why(comparison(stats(accepted=4)))
        assert "took 1.50 plain steps and gave 1.40 tokens, so it costs more than it gives" in text
        assert text.endswith("under the break-even of about 12%, so drafts were kept short or switched off.")

    def test_costs_with_a_fixed_length(self) -> None:
        """Then nothing kept the drafts short."""
        text = explain.why(comparison(stats(accepted=4), settings=SETTINGS | {"num_draft_tokens": 4}))
        assert text.endswith("under the break-even of about 12%.")

    @pytest.mark.parametrize("accepted", [0, 4, 5, 6, 40])
    @pytest.mark.parametrize("verify", [0.4, 0.9, 1.0, 9.0])
    def test_it_agrees_with_itself(self, accepted: int, verify: float) -> None:
        text = explain.why(comparison(stats(accepted=accepted, verify_seconds=verify)))
        assert ("it pays" in text) != ("costs more" in text)
        assert not ("above the" in text and "costs more" in text)
        assert not ("under the" in text and "it pays" in text)

    def test_no_drafts(self) -> None:
        text = explain.why(comparison(stats(drafted=0, accepted=0)))
        assert text.startswith("Each pass gave one token: nothing in the text could be drafted")

    def test_fallback(self) -> None:
        text = explain.why(comparison(stats(fallback_reason="the cache can't be rolled back")))
        assert text == "The call was decoded plainly: the cache can't be rolled back."

    def test_lean(self) -> None:
        for given in (stats(lean_forward=True), stats(drafted=0, accepted=0, lean_forward=True)):
            assert explain.why(comparison(given)).endswith(
                "The lean forward makes our passes cheaper than Transformers' own."
            )

    def test_nothing_to_explain(self) -> None:
        assert explain.why(Comparison(Side(), Side(), {}, "", "")) == ""
        assert explain.why(comparison({})) == ""
        cut = comparison()
        cut.on.cut = "stopped"
        assert explain.why(cut) == ""

    def test_one_token(self) -> None:
        assert explain.why(comparison(stats(passes=0, drafted=0, accepted=0), tokens=1)).startswith(
            "Each pass gave one"
        )


class TestShares:
    def test_sum(self) -> None:
        side = comparison().on
        parts = dict(explain.time_shares(side))
        assert parts == pytest.approx({"prompt": 0.2, "draft": 0.5, "verify": 1.0, "other": 0.3})
        assert sum(parts.values()) == pytest.approx(side.seconds)

    def test_never_below_nothing(self) -> None:
        assert explain.time_shares(replace(comparison().on, seconds=1.0))[-1] == ("other", 0.0)

    def test_without_statistics(self) -> None:
        assert explain.time_shares(Side()) == []


def test_accepted_counts() -> None:
    assert explain.accepted_counts(comparison().on) == [(0, 2), (1, 0), (2, 8)]
    assert explain.accepted_counts(Side()) == []


class TestTimeline:
    def test_points(self) -> None:
        found = comparison()
        points = explain.timeline_points(found)
        for name, side in (("off", found.off), ("on", found.on)):
            mine = [(seconds, number) for seconds, number, of in points if of == name]
            assert mine[0] == (0.0, 0)
            assert mine[-1] == (side.tokens[-1].seconds, len(side.tokens))
            for (before, fewer), (after, more) in zip(mine, mine[1:], strict=False):
                assert before < after
                assert fewer < more
        assert [number for _, number, of in points if of == "on"][:4] == [0, 3, 6, 9]

    def test_nothing(self) -> None:
        assert explain.timeline_points(Comparison(Side(), Side(), {}, "", "")) == [(0.0, 0, "off"), (0.0, 0, "on")]


class TestRow:
    def test_values(self) -> None:
        row = explain.row_of(comparison(), 3)
        assert row == {
            "run": 3, "prompt": "an example", "model": "model", "strategy": "auto", "draft length": "auto",
            "temperature": 0.0, "tokens": 31, "off tokens/s": 9.69, "on tokens/s": 15.5, "speed-up": 1.6,
            "same text": "yes", "acceptance length": 3.0, "draft tokens accepted": "20/40",
        }  # fmt: skip

    def test_no_prompt(self) -> None:
        for more in ({}, {"title": "own prompt"}, {"difference": "at token 3"}):
            assert "SECRET" not in json.dumps(explain.row_of(comparison(**more), 1))

    def test_cut(self) -> None:
        found = comparison({})
        found.on.cut = "time limit"
        row = explain.row_of(found, 1)
        assert (row["speed-up"], row["same text"], row["draft tokens accepted"]) == (None, "–", "0/0")

    def test_other_text(self) -> None:
        assert explain.row_of(comparison(difference="at token 3"), 1)["same text"] == "no"
        assert explain.row_of(comparison(settings=SETTINGS | {"num_draft_tokens": 4}), 1)["draft length"] == 4
