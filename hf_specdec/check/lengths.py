"""The best draft length, from acceptance by position and measured costs.

For engines with a fixed length, and to see how far the measured speed-up is from what the models allow. Costs are in units of
our loop's own forward over one token, so that what its forward gains over Transformers' isn't counted as the drafts'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..tools.gain import break_even_acceptance, expected_tokens, round_cost
from ..tools.measured import LEAST_TRIED, MODEL_SOURCES


AS_GOOD = 0.01  # a shorter draft that loses no more than this is better: less is computed for nothing


def draft_lengths(acceptance: Mapping[str, Any], costs: Mapping[str, Any], batch: int = 1) -> dict[str, Any] | None:
    """What every draft length would gain over the same loop without drafts.

    Args:
        acceptance: From `acceptance.summarise`.
        costs: From `speed.measure_pass_costs`.
        batch: Rows.

    Returns:
        `curve` (`num_draft_tokens`, `tokens` a step, `speedup`), `best` (0: don't draft), `break_even` (chance of a draft
            token, alike at all positions, at which the best length gains nothing; `None` if no chance suffices),
            `draft_cost`, `forward_gain` (Transformers' step ÷ the loop's forward over one token). `None` where acceptance
            or costs are missing.
    """
    chances = [each["rate"] for each in acceptance["positions"] if each["drafted"] >= LEAST_TRIED]
    cost = costs.get(str(batch))
    if not chances or cost is None or "1" not in cost["forward"]:
        return None
    forward = {int(width): seconds for width, seconds in cost["forward"].items()}
    step = forward[1]
    share = acceptance["drafting_share"]
    draft_cost = _draft_share(acceptance) * (cost["draft_step"] or 0.0) / step
    widths = {width: seconds / step for width, seconds in forward.items()}
    curve = []
    for k in range(1, len(chances) + 1):
        tokens = 1 + share * (expected_tokens(chances, k) - 1)
        seconds = 1 + share * (round_cost(k, draft_cost, widths) - 1)
        curve.append({"num_draft_tokens": k, "tokens": tokens, "speedup": tokens / seconds})
    top = max(each["speedup"] for each in curve)
    best = next(each["num_draft_tokens"] for each in curve if each["speedup"] >= top * (1 - AS_GOOD))
    return {
        "batch": batch,
        "curve": curve,
        "best": best if top > 1 else 0,
        "break_even": break_even_acceptance(draft_cost, widths, k=best),
        "draft_cost": draft_cost,
        "forward_gain": cost["plain_step"] / step,
    }


def _draft_share(acceptance: Mapping[str, Any]) -> float:
    """Share of the drafts that came from a draft model; others cost next to nothing."""
    sources = acceptance["steps_by_source"]
    drafts = sum(count for name, count in sources.items() if name != "none")
    return sum(sources.get(name, 0) for name in MODEL_SOURCES) / drafts if drafts else 0.0
