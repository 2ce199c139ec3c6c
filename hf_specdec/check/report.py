"""The report of a check: made of the finished stages alone, as plain JSON types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from ..tools.measured import LEAST_TRIED
from .acceptance import DRAWS, FEWEST_PROMPTS, by_category, families, summarise
from .lengths import draft_lengths
from .prompts import Reading
from .verdict import failures, recommend


SCHEMA_VERSION = 1
TOTALS = ("draft_acceptance_rate", "mean_acceptance_length")
MOST_BAD = 100  # records that are named one by one


def assemble(
    header: Mapping[str, Any], reading: Reading, stages: Mapping[str, Any], problems: Mapping[str, str], *,
    interrupted: bool, static_only: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Put a report together.

    Args:
        header: `date`, `target`, `draft`, `drafter`, `settings`, `environment`, `static`, `seconds` (by stage).
        reading: The prompts that were chosen.
        stages: The finished stages, by name.
        problems: The stages that failed, and why.
        interrupted: Whether it was stopped before its end.
        static_only: Whether only the part without weights was asked for.

    Returns:
        `schema_version`, `kind`, the header, `prompts`, `plan`, `acceptance`, `speed` (by batch size), `costs`, `draft_length`, `best_by_batch`,
            `curves`, `lossless`, `problems`, `recommendation`, `passed`, `interrupted`, `static_only`.
    """
    accepted, sampled = stages.get("acceptance"), stages.get("acceptance sampled")
    settings = header["settings"]
    acceptance = None if accepted is None else _acceptance(accepted, sampled, settings)
    costs = stages.get("costs") or {}
    overall = None if accepted is None else summarise(accepted)
    speed = {
        str(size): _with_interval(stages[f"speed {size}"])
        for size in settings["batch_sizes"]
        if f"speed {size}" in stages
    }
    found = {int(size): overall and draft_lengths(overall, costs, int(size)) for size in costs}
    lengths = {size: each for size, each in found.items() if each}
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "check",
        "seconds": {},
        **header,
        "prompts": {
            "file": reading.suite.name,
            "sha256": reading.suite.sha256,
            "form": reading.form,
            "ids": [] if static_only else [prompt.id for prompt in reading.suite.prompts],
            "categories": list(reading.suite.categories),
            "left_out_too_long": reading.too_long,
            "num_bad_records": len(reading.bad),
            "bad_records": [asdict(each) for each in reading.bad[:MOST_BAD]],
        },
        "plan": stages.get("plan"),
        "acceptance": acceptance,
        "speed": speed,
        "costs": costs,
        "draft_length": lengths.get(min(lengths, default=0)),
        "best_by_batch": {str(size): each["best"] for size, each in lengths.items()},
        "curves": {
            "output_length": speed.get("1", {}).get("lengths", []),
            "temperature": stages.get("temperatures") or [],
            "batch": [
                {"batch": int(batch), "speedup": ratio and ratio["geometric_mean"], "interval": each["interval"]}
                for batch, each in speed.items()
                for ratio in [(each["on"] or {}).get("speedup")]
            ],
        },
        "lossless": {name: stages.get(name) for name in ("greedy", "sampled")},
        "problems": dict(problems),
        "interrupted": interrupted,
        "static_only": static_only,
    }
    report["passed"] = not failures(report)
    return report | {"recommendation": recommend(report)}


def _acceptance(
    greedy: list[dict[str, Any]], sampled: list[dict[str, Any]] | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    overall = summarise(greedy)
    known = [each for each in overall["positions"] if each["drafted"] >= LEAST_TRIED]
    return {
        "num_draft_tokens": settings["num_draft_tokens"],
        "drafter": next((row["drafter"] for row in greedy if row["drafter"] != "none"), "none"),
        **{name: overall[name] for name in (*TOTALS, *(f"{name}_interval" for name in TOTALS))},
        "per_position": [each["rate"] for each in known],
        "steps_by_source": overall["steps_by_source"],
        "by_category": by_category(greedy),
        "sampled": None
        if sampled is None
        else {"temperature": settings["temperature"], "by_category": by_category(sampled)},
        "families": families(sampled) if sampled is not None else dict.fromkeys(("A1", "A2", "B1", "B2")),
        "fallback_reasons": sorted({row["fallback_reason"] for row in greedy if row["fallback_reason"]}),
    }


def _with_interval(speed: Mapping[str, Any]) -> dict[str, Any]:
    """With a 95 % interval of the geometric mean over the cases that count, drawn anew; `None` with too few of them."""
    on = speed["on"]
    if not on or not on["speedup"]:
        return dict(speed) | {"interval": None}
    refused = {name for name, each in speed["categories"].items() if each["refused"]}
    ratios = np.log([case["speedup"] for case in speed["cases"] if case["category"] not in refused])
    if len(ratios) < FEWEST_PROMPTS:
        return dict(speed) | {"interval": None}
    means = ratios[np.random.default_rng(0).integers(len(ratios), size=(DRAWS, len(ratios)))].mean(1)
    return dict(speed) | {"interval": [float(each) for each in np.exp(np.percentile(means, [2.5, 97.5]))]}
