"""The recommendation, from figures that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from hf_specdec.check.report import assemble
from hf_specdec.check.tables import headline
from hf_specdec.check.verdict import exit_code

from .made_up import GREEDY, HEADER, SAMPLED, counts, reading, refused, report, speed, stages


def outcome(found: dict[str, Any]) -> tuple[str, int]:
    return found["recommendation"]["verdict"], exit_code(found)


def reasons(found: dict[str, Any]) -> str:
    return " ".join(found["recommendation"]["reasons"])


def test_everything_pays() -> None:
    found = report()
    assert outcome(found) == ("on", 0)
    assert headline(found) == "PASS, lossless. Verdict: on."
    assert found["recommendation"]["num_draft_tokens"] == found["draft_length"]["best"] > 0
    assert "Batch 1: 1.80 ×" in reasons(found)


def test_large_batches_lose() -> None:
    found = report(**{"speed 8": speed(8, 0.8)})
    assert outcome(found) == ("on with settings", 0)
    assert found["recommendation"]["max_batch"] == 1
    assert "batches of up to 1" in reasons(found)


def test_only_large_batches_pay() -> None:
    found = report(**{"speed 1": speed(1, 0.9)})
    assert outcome(found) == ("on with settings", 0)
    assert found["recommendation"]["max_batch"] is None
    assert "Not shown to pay at batch 1" in reasons(found)


def test_a_category_loses() -> None:
    losing = speed(1)
    losing["categories"]["chat"]["speedup"] = {"geometric_mean": 0.8, "q1": 0.7, "q3": 0.9, "worst": 0.6, "cases": 4}
    found = report(**{"speed 1": losing})
    assert outcome(found) == ("on with settings", 0)
    assert found["recommendation"]["not_for"] == ["chat"]


@pytest.mark.parametrize("mean", [0.7, 1.0, 1.04])
def test_nothing_pays(mean: float) -> None:
    found = report(**{"speed 1": speed(1, mean), "speed 8": speed(8, mean)})
    assert outcome(found) == ("off", 2)
    assert "isn't shown to pay" in headline(found)


def test_a_gain_that_the_spread_covers_is_none() -> None:
    unsure = speed(1, 1.2)
    for number, case in enumerate(unsure["cases"]):
        case["speedup"] = 0.5 if number % 2 else 2.9
    assert outcome(report(**{"speed 1": unsure, "speed 8": None})) == ("off", 2)
    few = speed(1, 1.2, cases=2)
    few["on"]["speedup"] |= {"q1": 0.9}
    assert outcome(report(**{"speed 1": few, "speed 8": None})) == ("off", 2)


def test_a_restless_machine() -> None:
    found = report(**{"speed 1": refused(1), "speed 8": refused(8)})
    assert outcome(found) == ("off", 2)
    assert "let the machine do nothing else" in reasons(found)
    assert "differ by 20 %" in reasons(found)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"greedy": GREEDY | {"verdict": "fail"}}, "A greedy text differs"),
        ({"sampled": SAMPLED | {"verdict": "fail"}}, "Sampled tokens don't follow"),
        ({"speed 8": speed(8, mismatches=2)}, "2 texts at batch 8 differ"),
        ({"speed 1": speed(1, failures=["auto at batch 1: RuntimeError: no kernel"])}, "no kernel"),
    ],
)
def test_faults(changes: dict[str, Any], reason: str) -> None:
    found = report(**changes)
    assert outcome(found) == ("off", 1)
    assert not found["passed"]
    assert headline(found).startswith("FAIL")
    assert reason in reasons(found)


def test_a_stage_that_failed() -> None:
    found = report(problems={"sampled": "RuntimeError: no"}, sampled=None)
    assert outcome(found) == ("off", 1)
    assert "Sampled could not be measured: RuntimeError: no." in reasons(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"greedy": GREEDY | {"verdict": "near-tie", "near_ties": 2}},
        {"sampled": SAMPLED | {"verdict": "too few tokens"}},
    ],
)
def test_what_is_no_fault(changes: dict[str, Any]) -> None:
    assert outcome(report(**changes)) == ("on", 0)


def test_interrupted() -> None:
    found = report(interrupted=True, **{"speed 8": None, "sampled": None, "temperatures": None})
    assert outcome(found) == ("off", 130)
    assert headline(found).startswith("Interrupted")
    assert exit_code(assemble(HEADER, reading(), {}, {}, interrupted=True)) == 130


def test_decoded_plainly() -> None:
    header = HEADER | {"static": HEADER["static"] | {"plain_reason": "its recurrent state can't be rolled back"}}
    found = assemble(header, reading(), {}, {}, interrupted=False)
    assert outcome(found) == ("off", 2)
    assert "recurrent state" in reasons(found)


def test_where_it_loses() -> None:
    text = reasons(report())
    assert "Outputs of 4 tokens lose." in text
    assert "It loses at temperature 1.5." in text


def test_texts_that_repeat_nothing() -> None:
    rows = [counts("chat", number) | {"steps_by_source": {"none": 29, "prompt_lookup": 1}} for number in range(6)]
    assert "repeat nothing" in reasons(report(acceptance=rows))


def test_stages_in_another_order_give_the_same_report() -> None:
    done = stages()
    there, back = (dict(items) for items in (done.items(), reversed(done.items())))
    one, other = (assemble(HEADER, reading(), each, {}, interrupted=False) for each in (there, back))
    assert list(one["speed"]) == list(other["speed"]) == ["1", "8"]
    assert one == other
