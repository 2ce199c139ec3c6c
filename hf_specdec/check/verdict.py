"""The recommendation: on, on with these settings, or off, and why. Pure functions of what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..tools.suites import ALL


ON, WITH_SETTINGS, OFF = "on", "on with settings", "off"
LEAST_GAIN = 1.05  # less isn't worth a second code path in production
LOSS = 1 / LEAST_GAIN  # between the two a few runs can't tell
PAYS, NO_GAIN, UNKNOWN = "pays", "no gain", "unknown"
INTERRUPTED = 130  # what shells report for Ctrl-C


def exit_code(report: Mapping[str, Any]) -> int:
    """0: it passed and pays; 1: a text or a distribution is wrong, or something failed; 2: it passed and doesn't pay."""
    if report["interrupted"]:
        return INTERRUPTED
    if not report["passed"]:
        return 1
    if report["static_only"]:
        return 2 if report["static"]["plain_reason"] else 0
    return 2 if report["recommendation"]["verdict"] == OFF else 0


def failures(report: Mapping[str, Any]) -> list[str]:
    """What speaks against the code, not against its speed: one sentence each."""
    found = []
    greedy, sampled = (report["lossless"].get(name) for name in ("greedy", "sampled"))
    if greedy and greedy["verdict"] == "fail":
        found.append("a greedy text differs from plain decoding's by more than rounding explains")
    if sampled and sampled["verdict"] == "fail":
        found.append("sampled tokens don't follow the target's distribution")
    for batch, speed in report["speed"].items():
        if speed["mismatches"]:
            found.append(f"{speed['mismatches']} texts at batch {batch} differ from plain decoding's")
        found += speed["failures"]
    if report["static_only"] and report["static"]["target"] is None:
        found.append("the target's configuration can't be read")
    return found + [f"{name} could not be measured: {why}" for name, why in report["problems"].items()]


def recommend(report: Mapping[str, Any]) -> dict[str, Any]:
    """Decide.

    Args:
        report: The report without its recommendation: `failures`, `speed`, `acceptance`, `draft_length`, `curves`,
            `static`, `drafter`, `draft`, `interrupted`.

    Returns:
        `verdict`, `drafter`, `draft_model`, `num_draft_tokens` (for engines with a fixed length; `None`: unknown),
            `max_batch` (`None`: no limit was found), `not_for` (categories), `reasons`.
    """
    lengths = report["draft_length"]
    found: dict[str, Any] = {
        "verdict": OFF,
        "drafter": report["drafter"],
        "draft_model": report["draft"],
        "num_draft_tokens": lengths["best"] if lengths else None,
        "max_batch": None,
        "not_for": [],
    }
    wrong = failures(report)
    if wrong:
        return found | {"reasons": [f"{_upper(each)}." for each in wrong]}
    if plain := report["static"].get("plain_reason"):
        return found | {"reasons": [f"This model is decoded plainly: {plain}."]}
    if report["static_only"]:
        return found | {"reasons": ["Without --static weights are loaded and everything is measured."]}
    if report["interrupted"]:
        return found | {"reasons": ["The check was interrupted before it could tell."]}
    speeds = {int(batch): speed for batch, speed in report["speed"].items()}
    judged = {batch: judge(speed) for batch, speed in speeds.items()}
    reasons = [_spoken(batch, speeds[batch], judged[batch]) for batch in speeds]
    paying = [batch for batch, found_there in judged.items() if found_there == PAYS]
    if not paying:
        return found | {"reasons": [*reasons, *_predicted(report, judged), *_losses(report)]}
    losing = [batch for batch, found_there in judged.items() if found_there == NO_GAIN]
    limited = [batch for batch in losing if batch > max(paying)]
    found["max_batch"] = max(paying) if limited else None
    found["not_for"] = losing_categories(report)
    if found["not_for"]:
        reasons.append(f"It loses on {', '.join(found['not_for'])}: leave it off there.")
    settled = len(paying) == len(judged) and not found["not_for"]
    if not settled and (between := [batch for batch in judged if batch not in paying and batch not in limited]):
        reasons.append(f"Not shown to pay at batch {', '.join(map(str, between))}.")
    if limited:
        reasons.append(f"Keep it to batches of up to {max(paying)}.")
    return found | {"verdict": ON if settled else WITH_SETTINGS, "reasons": [*reasons, *_losses(report)]}


def judge(speed: Mapping[str, Any]) -> str:
    """Whether a batch size pays: a gain of at least `LEAST_GAIN` that the spread of the prompts doesn't cover."""
    ratio = (speed["on"] or {}).get("speedup")
    if not ratio:
        return UNKNOWN
    # with few cases their own quartiles are all there is; with many, the mean is known better than they spread
    surely = speed["interval"][0] if speed["interval"] else ratio["q1"]
    return PAYS if ratio["geometric_mean"] >= LEAST_GAIN and surely > 1 else NO_GAIN


def losing_categories(report: Mapping[str, Any]) -> list[str]:
    """The categories at batch 1 of which at least three prompts in four were slower, and all together too."""
    speed = report["speed"].get("1") or {}
    return [
        name
        for name, summary in speed.get("categories", {}).items()
        if (ratio := summary["speedup"]) and ratio["cases"] >= 3 and ratio["q3"] < 1 and ratio["geometric_mean"] < 1
    ]


def _spoken(batch: int, speed: Mapping[str, Any], judged: str) -> str:
    if judged == UNKNOWN:
        why = (speed["on"] or {}).get("refused") or "nothing was measured."
        return f"Batch {batch}: {why}"
    ratio = speed["on"]["speedup"]
    spread = f"half of the {'prompts' if batch == 1 else 'batches'} {ratio['q1']:.2f} – {ratio['q3']:.2f}, worst {ratio['worst']:.2f}"
    if ratio["cases"] == 1:
        spread = f"of one {'prompt' if batch == 1 else 'batch'} alone"
    word = "" if judged == PAYS else f" (less than {LEAST_GAIN}, or not sure)"
    return f"Batch {batch}: {ratio['geometric_mean']:.2f} × plain decoding{word}; {spread}."


def _predicted(report: Mapping[str, Any], judged: Mapping[int, str]) -> list[str]:
    """Where the clock says nothing, what acceptance and costs say, which were measured in one block each."""
    lengths = report["draft_length"]
    if not lengths or UNKNOWN not in judged.values():
        return []
    best = max((each["speedup"] for each in lengths["curve"]), default=1.0)
    return [
        "That it pays isn't shown: let the machine do nothing else, and check again. By acceptance and the cost of passes, "
        f"drafts would gain up to {max(best, 1.0):.2f} × over the same loop without them."
    ]


def _losses(report: Mapping[str, Any]) -> list[str]:
    """Where it loses, from the measured curves."""
    found = []
    curves = report["curves"]
    clock = (report["speed"].get("1", {}).get("on") or {}).get("speedup")
    short = [each["tokens"] for each in curves["output_length"] if each["speedup"] < LOSS] if clock else []
    if short:
        found.append(f"Outputs of {', '.join(map(str, short))} tokens lose.")
    hot = [each["temperature"] for each in curves["temperature"] if not each["refused"] and each["speedup"] < LOSS]
    if hot:
        found.append(f"It loses at temperature {', '.join(f'{each:g}' for each in hot)}.")
    lengths = report["draft_length"]
    if lengths and lengths["best"] == 0:
        found.append("By acceptance and cost no draft length gains anything over the same loop without drafts.")
    acceptance = report["acceptance"]
    if acceptance and acceptance["by_category"].get(ALL, {}).get("drafting_share", 1) < 0.1:
        found.append("Hardly a step had a draft: these texts repeat nothing. A draft model (--draft) may do better.")
    return found


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
