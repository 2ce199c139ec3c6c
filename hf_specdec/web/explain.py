"""Why a run was as fast as it was, from its statistics: one or two sentences, and the numbers behind the plots."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from .timeline import Comparison, Side


def why(found: Comparison) -> str:
    """The reason for a run's speed-up, in words and numbers."""
    if found.speedup is None or not found.on.stats:
        return ""
    stats, off = found.on.stats, found.off
    if stats["fallback_reason"]:
        return f"The call was decoded plainly: {stats['fallback_reason']}."
    step = _plain_step(off)
    verify = stats["verify_seconds"] / max(stats["num_spec_steps"], 1)
    length = stats["mean_acceptance_length"]
    lean = " The lean forward makes our passes cheaper than Transformers' own." if stats["lean_forward"] else ""
    if not stats["num_draft_tokens"]:
        reason = "nothing in the text could be drafted, or drafting didn't pay, so it was left off"
        return f"Each pass gave one token: {reason}.{lean}"
    draft = stats["draft_seconds"] / max(stats["num_spec_steps"], 1)
    cost = (verify + draft) / step if step else 0.0
    drafted_steps = stats["num_spec_steps"] - stats["steps_by_source"].get("none", 0)
    share = drafted_steps / max(stats["num_spec_steps"], 1)
    pays = length > cost
    text = (
        f"A pass with its draft took {cost:.2f} plain steps and gave {length:.2f} tokens"
        f", so it {'pays' if pays else 'costs more than it gives'}; {share:.0%} of the passes had a draft"
        f", and {stats['draft_acceptance_rate']:.0%} of the draft tokens were right."
    )
    needed = break_even(found)
    if needed == 0:
        text += " As such a pass is no dearer than a plain step, every accepted token is a gain."
    elif needed is not None:
        text += f" That is {'above' if pays else 'under'} the break-even of about {needed:.0%}"
        adapted = not pays and not found.settings["num_draft_tokens"]
        text += ", so drafts were kept short or switched off." if adapted else "."
    return text + lean


def break_even(found: Comparison) -> float | None:
    """The share of draft tokens that must be right for a pass to be worth what it cost here; `None` without drafts.

    A pass of `d` draft tokens that costs `c` plain steps pays when `1 + rate · d > c`.
    """
    stats, step = found.on.stats, _plain_step(found.off)
    steps = stats.get("num_spec_steps", 0)
    drafted = stats.get("num_draft_tokens", 0) / steps if steps else 0.0
    if not drafted or not step:
        return None
    cost: float = (stats["verify_seconds"] + stats["draft_seconds"]) / steps / step
    return min(max((cost - 1) / drafted, 0.0), 1.0)


def time_shares(side: Side) -> list[tuple[str, float]]:
    """What the side with speculation spent its seconds on."""
    stats = side.stats
    if not stats:
        return []
    parts = [
        ("prompt", stats["prefill_seconds"]),
        ("draft", stats["draft_seconds"]),
        ("verify", stats["verify_seconds"]),
    ]
    other = side.seconds - sum(seconds for _, seconds in parts)
    return [*parts, ("other", max(other, 0.0))]


def accepted_counts(side: Side) -> list[tuple[int, int]]:
    """Draft tokens accepted in a pass, and how many passes did."""
    return list(enumerate(side.stats.get("acceptance_histogram", ())))


def timeline_points(found: Comparison) -> list[tuple[float, int, str]]:
    """Seconds, tokens so far, and the side, for a line each."""
    points: list[tuple[float, int, str]] = []
    for name, side in (("off", found.off), ("on", found.on)):
        points.append((0.0, 0, name))
        last = -1.0
        for number, token in enumerate(side.tokens, start=1):
            if token.seconds != last:
                points.append((token.seconds, number, name))
            else:
                points[-1] = (token.seconds, number, name)
            last = token.seconds
    return points


def row_of(found: Comparison, number: int) -> dict[str, Any]:
    """A run as a row of the session's table; the prompt itself isn't in it."""
    stats = found.on.stats
    settings = found.settings
    return {
        "run": number,
        "prompt": found.title,
        "model": found.model,
        "strategy": settings["strategy"],
        "draft length": settings["num_draft_tokens"] or "auto",
        "temperature": settings["temperature"],
        "tokens": len(found.on.tokens),
        "off tokens/s": round(found.off.tokens_per_second, 2),
        "on tokens/s": round(found.on.tokens_per_second, 2),
        "speed-up": None if found.speedup is None else round(found.speedup, 3),
        "same text": {True: "yes", False: "no", None: "–"}[found.same_text],
        "acceptance length": round(stats.get("mean_acceptance_length", 1.0), 3),
        "draft tokens accepted": f"{stats.get('num_accepted_draft_tokens', 0)}/{stats.get('num_draft_tokens', 0)}",
    }


def write_rows(rows: list[dict[str, Any]], folder: Path) -> tuple[str, str]:
    """A session's runs as CSV and as JSON; returns both paths."""
    folder.mkdir(exist_ok=True)
    with (folder / "runs.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "runs.json").write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")
    return str(folder / "runs.csv"), str(folder / "runs.json")


def _plain_step(side: Side) -> float | None:
    """Seconds of a plain step, the prompt's pass left out."""
    if len(side.tokens) < 2:
        return None
    return (side.tokens[-1].seconds - side.tokens[0].seconds) / (len(side.tokens) - 1)
