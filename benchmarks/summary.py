"""From the results files of `peers.py` to tables: by group, against the peers, and against the project's bars."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import geometric_mean, spread, table


OURS = "ours"
RIVALS = {"transformers_lookup": 1.15, "flashspec_ngram": 1.1, "economize_lookup": 1.1}
GROUP_BARS = {"code_edit": 1.8, "humaneval": 1.7, "summarization+rag": 1.6, "chat": 1.15}

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure next to what it has to reach; `None` where it wasn't measured."""

    name: str
    bar: float
    figure: float | None

    @property
    def met(self) -> bool | None:
        """Whether the figure reaches the bar."""
        return None if self.figure is None else self.figure >= self.bar


def key(record: Record) -> tuple[Any, ...]:
    """What makes a measurement: the same key is never measured twice with one method."""
    named = (record[name] for name in ("mode", "model", "dtype", "batch", "max_new_tokens", "group"))
    return (*named, tuple(record["ids"]))


def merged(records: Sequence[Record]) -> list[Record]:
    """One record for each measurement, the methods of several runs together."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        if record.get("kind") == "result":
            known = found.setdefault(key(record), record | {"results": {}})
            known["results"] |= record["results"]
    return list(found.values())


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """All figures of results files.

    Returns:
        For each run ("mode, model, dtype, batch, tokens") its groups, all prompts, comparisons with rivals; and the
        bars.
    """
    runs: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in merged(records):
        runs[key(record)[:5]].append(record)
    return {
        "runs": [
            dict(zip(("mode", "model", "dtype", "batch", "max_new_tokens"), name, strict=True)) | _run(found)
            for name, found in sorted(runs.items(), key=str)
        ],
        "bars": [asdict(bar) | {"met": bar.met} for bar in bars(records)],
    }


def _run(records: Sequence[Record]) -> dict[str, Any]:
    methods = list(dict.fromkeys(name for record in records for name in record["results"]))
    return {
        "methods": {name: figures(records, name) for name in methods},
        "ours_vs": {name: versus(records, name) for name in methods if name != OURS},
    }


def values_of(records: Sequence[Record], method: str, what: str = "speedup") -> dict[str, list[float]]:
    """A method's values by group, where it ran and has one."""
    found: dict[str, list[float]] = defaultdict(list)
    for record in records:
        value = record["results"].get(method, {}).get(what)
        if value is not None:
            found[record["group"]].append(value)
    return dict(found)


def overall(groups: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Spread by group and over everything; `by_group` weighs every group the same, `all` every prompt."""
    if not groups:
        return {}
    together = [value for values in groups.values() for value in values]
    return {
        "groups": {name: spread(values) for name, values in groups.items()},
        "all": spread(together),
        "by_group": round(geometric_mean([geometric_mean(values) for values in groups.values()]), 4),
    }


def versus(records: Sequence[Record], rival: str) -> dict[str, Any]:
    """Our tokens per second over a rival's on the prompts that both ran."""
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        ours, theirs = (record["results"].get(name, {}).get("rate") for name in (OURS, rival))
        if ours and theirs:
            groups[record["group"]].append(ours / theirs)
    return overall(groups)


def figures(records: Sequence[Record], method: str) -> dict[str, Any]:
    """Speed-ups of a method, its texts, its acceptance, its efficiency, its errors."""
    results = [record["results"][method] for record in records if method in record["results"]]
    ran = [result for result in results if "error" not in result]
    differences = [each for result in ran for each in result["differences"]]
    gaps = [each["gap"] for each in differences if each["gap"] is not None]
    lengths = [result["acceptance_length"] for result in ran if result["acceptance_length"] is not None]
    return overall(values_of(records, method)) | {
        "texts": sum(result["texts"] for result in ran),
        "same_texts": sum(result["texts"] - len(result["differences"]) for result in ran),
        "near_ties": sum(each["near_tie"] for each in differences),
        "other_differences": sum(not each["near_tie"] for each in differences),
        "largest_gap": max(gaps, default=None),
        "acceptance_length": round(statistics.fmean(lengths), 3) if lengths else None,
        "eta": overall(values_of(records, method, "eta")).get("all"),
        "errors": sorted({result["error"] for result in results if "error" in result}),
    }


def bars(records: Sequence[Record]) -> list[Bar]:
    """The project's bars next to what was measured."""
    found = merged(records)
    half, full = (
        [r for r in found if r["mode"] == "run" and r["dtype"] == dtype] for dtype in ("bfloat16", "float32")
    )
    speedups = {name: values_of(half, name) for name in (OURS, "ours:adversarial")}
    means = {group: geometric_mean(values) for group, values in speedups[OURS].items()}
    single = values_of(full, OURS)
    lines = [
        Bar("bfloat16, worst group against plain", 0.98, min(means.values(), default=None)),
        Bar("bfloat16, adversarial drafts against plain", 0.97, overall(speedups["ours:adversarial"]).get("by_group")),
        *(Bar(f"bfloat16, {group} against plain", bar, means.get(group)) for group, bar in GROUP_BARS.items()),
        Bar("bfloat16, all groups against plain", 1.6, overall(speedups[OURS]).get("by_group")),
        *(Bar(f"bfloat16, all groups against {n}", bar, versus(half, n).get("by_group")) for n, bar in RIVALS.items()),
        Bar("bfloat16, η of a batch of 1", 0.9, _median(half, OURS, "eta")),
        Bar("float32, worst group against plain", 0.98, min(map(geometric_mean, single.values()), default=None)),
        Bar("float32, all groups against plain", 1.15, overall(single).get("by_group")),
    ]
    off = [record for record in found if record["mode"] == "off"]
    for dtype, batch in sorted({(record["dtype"], record["batch"]) for record in off}):
        these = [record for record in off if (record["dtype"], record["batch"]) == (dtype, batch)]
        for name in dict.fromkeys(name for record in these for name in record["results"]):
            lines.append(Bar(f"{dtype}, {name} against plain, batch of {batch} (median)", 0.99, _median(these, name)))
    for dtype, batch in sorted({(r["dtype"], r["batch"]) for r in found if r["mode"] == "ragged"}):
        these = [r for r in found if (r["mode"], r["dtype"], r["batch"]) == ("ragged", dtype, batch)]
        ragged = overall(values_of(these, OURS)).get("by_group")
        lines.append(Bar(f"{dtype}, ragged batch of {batch} against plain", 1.4, ragged))
        lines.append(Bar(f"{dtype}, η of a ragged batch of {batch}", 0.8, _median(these, OURS, "eta")))
    return lines


def _median(records: Sequence[Record], method: str, what: str = "speedup") -> float | None:
    values = [value for group in values_of(records, method, what).values() for value in group]
    return statistics.median(values) if values else None


def markdown(summary: dict[str, Any]) -> str:
    """The tables of a summary."""
    parts = []
    for run in summary["runs"]:
        parts.append("## {mode}: {model}, {dtype}, batch of {batch}, {max_new_tokens} tokens".format_map(run))
        parts.append("Speed-up over plain `generate`: geometric mean (median; quartiles; worst), number")
        parts.append(_spreads({name: each for name, each in run["methods"].items() if "groups" in each}))
        if any("groups" in each for each in run["ours_vs"].values()):
            parts.append("Ours over another method, the same figures")
            parts.append(_spreads({name: each for name, each in run["ours_vs"].items() if "groups" in each}))
        parts.append(
            table(
                ("method", "same text", "near-ties", "other", "largest gap", "tokens a forward", "η", "errors"),
                [
                    (
                        name,
                        f"{each['same_texts']}/{each['texts']}",
                        each["near_ties"],
                        each["other_differences"],
                        _short(each["largest_gap"]),
                        _short(each["acceptance_length"]),
                        _short(each["eta"] and each["eta"]["median"]),
                        "; ".join(each["errors"]) or "–",
                    )
                    for name, each in run["methods"].items()
                ],
            )
        )
    parts.append("## Bars")
    verdicts = {True: "yes", False: "no", None: "not measured"}
    lines = [(each["name"], each["bar"], _short(each["figure"]), verdicts[each["met"]]) for each in summary["bars"]]
    parts.append(table(("figure", "bar", "measured", "met"), lines))
    return "\n\n".join(parts)


def _spreads(methods: Mapping[str, Any]) -> str:
    """Groups down, methods across."""
    groups = list(dict.fromkeys(group for each in methods.values() for group in each["groups"]))
    rows: list[Sequence[object]] = [
        [group, *(_cell(each["groups"].get(group)) for each in methods.values())] for group in groups
    ]
    rows.append(["all, each prompt the same", *(_cell(each["all"]) for each in methods.values())])
    rows.append(["all, each group the same", *(_short(each["by_group"]) for each in methods.values())])
    return table(["", *methods], rows)


def _cell(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "–"
    return "{gmean:.2f} ({median:.2f}; {q1:.2f}–{q3:.2f}; {worst:.2f}), {n}".format_map(spread)


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
