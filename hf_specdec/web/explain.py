"""Why a run was as fast as it was, from its statistics: one or two sentences, and the numbers behind the plots."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from .timeline import Comparison, Side


def why(found: Comparison) -> str:
    """The reason for a run's speed-up, in words and numbers."""
    if found.speedup is None or not found.on.stats:
        return ""
    stats = found.on.stats
    if stats["fallback_reason"]:
        return f"The call was decoded plainly: {stats['fallback_reason']}."
    passes, step = _Passes.of(found), _plain_step(found.off)
    lean = ""
    if stats["lean_forward"] and passes.undrafted and step:
        share = passes.undrafted / step
        lean = f" A pass without a draft took {share:.2f} of plain decoding's step (the lean forward)."
    if not stats["num_draft_tokens"] or not passes.cost:
        reason = "nothing in the text could be drafted, or drafting didn't pay, so it was left off"
        return f"Each pass gave one token: {reason}.{lean}"
    unit = "passes without one" if passes.undrafted else "plain steps"
    pays = passes.tokens > passes.cost
    text = (
        f"A pass with a draft took {passes.cost:.2f} {unit} and gave {passes.tokens:.2f} tokens"
        f", so drafts {'paid' if pays else 'cost more than they gave'}; {passes.share:.0%} of the passes had one"
        f", and {stats['draft_acceptance_rate']:.0%} of the draft tokens were right."
    )
    needed = break_even(found)
    if needed == 0:
        text += " As such a pass was no dearer, every accepted token was a gain."
    elif needed is not None:
        text += f" That is {'above' if pays else 'under'} the break-even of about {needed:.0%}"
        adapted = not pays and not found.settings["num_draft_tokens"]
        text += ", so drafts were kept short or switched off." if adapted else "."
    return text + lean


def break_even(found: Comparison) -> float | None:
    """The share of draft tokens that must be right for a pass with a draft to be worth its cost; `None` without drafts.

    A pass of `d` draft tokens that costs `c` passes without a draft pays when `1 + rate · d > c`.
    """
    passes = _Passes.of(found)
    return min(max((passes.cost - 1) / passes.drafted, 0.0), 1.0) if passes.cost and passes.drafted else None


@dataclass(frozen=True, slots=True)
class _Passes:
    """Means over the passes of a run, the prompt's left out.

    Attributes:
        cost: Of a pass with a draft, drafting included, in passes without one; where all had one, in plain steps. 0
            where none had one.
        tokens: What a pass with a draft gave.
        drafted: Its draft tokens.
        share: How many of the passes had a draft.
        undrafted: Seconds of a pass without one; 0 where all had one.
    """

    cost: float
    tokens: float
    drafted: float
    share: float
    undrafted: float

    @classmethod
    def of(cls, found: Comparison) -> _Passes:
        timed = [(after.seconds - before.seconds, after) for before, after in pairwise(found.on.rounds)]
        drafted = [(seconds, each) for seconds, each in timed if each.drafted]
        plain = [seconds for seconds, each in timed if not each.drafted]
        undrafted = fmean(plain) if plain else 0.0
        unit = undrafted or _plain_step(found.off)
        if not drafted or not unit:
            return cls(0.0, 1.0, 0.0, 0.0, undrafted)
        return cls(
            cost=fmean(seconds for seconds, _ in drafted) / unit,
            tokens=fmean(each.tokens for _, each in drafted),
            drafted=fmean(len(each.drafted) for _, each in drafted),
            share=len(drafted) / len(timed),
            undrafted=undrafted,
        )


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
