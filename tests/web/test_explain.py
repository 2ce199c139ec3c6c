"""The sentence about a run's speed, its arithmetic, and the numbers behind the plots."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hf_specdec import SpecStats
from hf_specdec.web import explain
from hf_specdec.web.timeline import Comparison, Round, Side, Token


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


def rounds(
    cost: float = 1.5, drafted: int = 4, accepted: int = 2, plain: int = 2, passes: int = 8, unit: float = 0.1
) -> list[Round]:
    """The prompt's pass, then passes without a draft, then some with one."""
    made = [Round(0, "none", [], 0, 0, 1, 0.2)]
    for number in range(plain + passes):
        with_draft = number >= plain
        last = made[-1]
        made.append(
            Round(
                number + 1, "draft_model" if with_draft else "none", ["x"] * drafted if with_draft else [],
                accepted if with_draft else 0, last.first + last.tokens, 1 + accepted * with_draft,
                last.seconds + unit * (cost if with_draft else 1.0),
            )
        )  # fmt: skip
    return made


def comparison(
    given: dict[str, Any] | None = None, tokens: int = 31, made: list[Round] | None = None, **more: Any
) -> Comparison:
    off = [Token(at, "x", 0.2 + 0.1 * at) for at in range(tokens)]
    on = [Token(at, "x", 0.2 + 0.05 * (at // 3)) for at in range(tokens)]
    made = rounds() if made is None else made
    sides = Side(off, [], off[-1].seconds, True), Side(on, made, 2.0, True, stats=stats() if given is None else given)
    return replace(Comparison(*sides, dict(SETTINGS), "model", "", title="an example"), **more)


class TestBreakEven:
    @pytest.mark.parametrize(
        ("cost", "drafted", "rate"),
        [
            (1.5, 4, 0.125),  # half a pass over four tokens
            (2.0, 4, 0.25),
            (3.0, 2, 1.0),  # two tokens for two passes: all must be right
            (10.0, 2, 1.0),  # and there is no more than all
            (0.6, 4, 0.0),  # cheaper than a pass without a draft
        ],
    )
    def test_by_hand(self, cost: float, drafted: int, rate: float) -> None:
        assert explain.break_even(comparison(made=rounds(cost, drafted))) == pytest.approx(rate)

    def test_passes_without_a_draft_are_the_unit(self) -> None:
        """Cheap passes of ours aren't the drafts' merit."""
        cheap = comparison(made=rounds(cost=3.0, unit=0.05))
        assert explain.break_even(cheap) == pytest.approx(0.5)
        all_drafted = comparison(made=rounds(cost=3.0, unit=0.05, plain=0))  # 1.5 plain steps of 0.1 s
        assert explain.break_even(all_drafted) == pytest.approx(0.125)

    def test_none(self) -> None:
        assert explain.break_even(comparison(made=rounds(passes=0))) is None
        assert explain.break_even(comparison(made=[])) is None
        assert explain.break_even(comparison(made=rounds(plain=0), tokens=1)) is None


class TestWhy:
    def test_pays(self) -> None:
        assert explain.why(comparison()) == (
            "A pass with a draft took 1.50 passes without one and gave 3.00 tokens, so drafts paid; 80% of the passes had "
            "one, and 50% of the draft tokens were right. That is above the break-even of about 12%."
        )

    def test_all_drafted(self) -> None:
        assert "took 1.50 plain steps and gave 3.00 tokens" in explain.why(comparison(made=rounds(plain=0)))

    def test_costs(self) -> None:
        text = explain.why(comparison(stats(accepted=0), made=rounds(accepted=0)))
        assert "took 1.50 passes without one and gave 1.00 tokens, so drafts cost more than they gave" in text
        assert text.endswith("under the break-even of about 12%, so drafts were kept short or switched off.")

    def test_costs_with_a_fixed_length(self) -> None:
        """Then nothing kept the drafts short."""
        settings = SETTINGS | {"num_draft_tokens": 4}
        text = explain.why(comparison(stats(accepted=0), made=rounds(accepted=0), settings=settings))
        assert text.endswith("under the break-even of about 12%.")

    @pytest.mark.parametrize("accepted", [0, 1, 2, 4])
    @pytest.mark.parametrize("cost", [0.4, 0.9, 1.0, 2.5, 9.0])
    def test_it_agrees_with_itself(self, accepted: int, cost: float) -> None:
        text = explain.why(comparison(stats(accepted=10 * accepted), made=rounds(cost, accepted=accepted)))
        assert ("drafts paid" in text) != ("cost more" in text)
        assert not ("above the" in text and "cost more" in text)
        assert not ("under the" in text and "drafts paid" in text)

    def test_no_drafts(self) -> None:
        text = explain.why(comparison(stats(drafted=0, accepted=0)))
        assert text.startswith("Each pass gave one token: nothing in the text could be drafted")

    def test_fallback(self) -> None:
        text = explain.why(comparison(stats(fallback_reason="the cache can't be rolled back")))
        assert text == "The call was decoded plainly: the cache can't be rolled back."

    def test_lean(self) -> None:
        for given, made in ((stats(), rounds(unit=0.07)), (stats(drafted=0, accepted=0), rounds(passes=0, unit=0.07))):
            text = explain.why(comparison(given | {"lean_forward": True}, made=made))
            assert text.endswith("A pass without a draft took 0.70 of plain decoding's step (the lean forward).")

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
