"""From the results files of `peers.py` to tables: by group, against the peers, and against the project's bars."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import spread, table
from hf_specdec.tools.timing import geometric_mean


OURS = "ours"
RIVALS = {"transformers_lookup": 1.15, "flashspec_ngram": 1.1, "economize_lookup": 1.1}
GROUP_BARS = {"code_edit": 1.8, "humaneval": 1.7, "summarization+rag": 1.6, "chat": 1.15}

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of a model and a length next to what it has to reach; `None` where it wasn't measured."""

    model: str
    max_new_tokens: int
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


def changed(records: Sequence[Record]) -> list[str]:
    """Conditions in which the runs of a results file differ; one that an older run didn't record is taken as the same."""
    runs = [record for record in records if record.get("kind") == "about"]
    named = ("git_revision", "torch_threads")
    return [name for name in named if len({record[name] for record in runs if record.get(name) is not None}) > 1]


def merged(records: Sequence[Record]) -> list[Record]:
    """One record for each measurement, the methods of several runs together; a later result replaces an error."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        if record.get("kind") == "result":
            known = found.setdefault(key(record), record | {"results": {}})
            known["results"] |= {
                name: result
                for name, result in record["results"].items()
                if "error" not in result or name not in known["results"]
            }
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
    """Our speed-up over a rival's on the prompts that both ran; each is against the plain runs next to it."""
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        ours, theirs = (record["results"].get(name, {}).get("speedup") for name in (OURS, rival))
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
    """The project's bars next to what was measured, for each model and length by itself."""
    runs: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in merged(records):
        runs[record["model"], record["max_new_tokens"]].append(record)
    return [
        Bar(*run, *line)
        for run, found in sorted(runs.items())
        for line in (*_single_bars(found), *_off_bars(found), *_ragged_bars(found))
    ]


Line = tuple[str, float, float | None]  # name, bar, figure


def _single_bars(records: Sequence[Record]) -> Iterator[Line]:
    """One prompt at a time."""
    found = [record for record in records if (record["mode"], record["batch"]) == ("run", 1)]
    if not found:
        return
    half, full = ([record for record in found if record["dtype"] == dtype] for dtype in ("bfloat16", "float32"))
    speedups = {name: values_of(half, name) for name in (OURS, "ours:adversarial")}
    means = {group: geometric_mean(values) for group, values in speedups[OURS].items()}
    single = values_of(full, OURS)
    yield "bfloat16, worst group against plain", 0.98, min(means.values(), default=None)
    adversarial = overall(speedups["ours:adversarial"]).get("by_group")
    yield "bfloat16, adversarial drafts against plain", 0.97, adversarial
    for group, bar in GROUP_BARS.items():
        yield f"bfloat16, {group} against plain", bar, means.get(group)
    yield "bfloat16, all groups against plain", 1.6, overall(speedups[OURS]).get("by_group")
    for name, bar in RIVALS.items():
        yield f"bfloat16, all groups against {name}", bar, versus(half, name).get("by_group")
    yield "bfloat16, η of a batch of 1", 0.9, _median(half, OURS, "eta")
    yield "float32, worst group against plain", 0.98, min(map(geometric_mean, single.values()), default=None)
    yield "float32, all groups against plain", 1.15, overall(single).get("by_group")


def _off_bars(records: Sequence[Record]) -> Iterator[Line]:
    """Our loop without drafts."""
    for (dtype, batch), these in _by_size(records, "off"):
        for name in dict.fromkeys(name for record in these for name in record["results"]):
            yield f"{dtype}, {name} against plain, batch of {batch} (median)", 0.99, _median(these, name)


def _ragged_bars(records: Sequence[Record]) -> Iterator[Line]:
    """Prompts of different length at once."""
    for (dtype, batch), these in _by_size(records, "ragged"):
        ragged = overall(values_of(these, OURS)).get("by_group")
        yield f"{dtype}, ragged batch of {batch} against plain", 1.4, ragged
        yield f"{dtype}, η of a ragged batch of {batch}", 0.8, _median(these, OURS, "eta")


def _by_size(records: Sequence[Record], mode: str) -> list[tuple[tuple[str, int], list[Record]]]:
    found: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        if record["mode"] == mode:
            found[record["dtype"], record["batch"]].append(record)
    return sorted(found.items(), key=lambda each: each[0])


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
    verdicts = {True: "yes", False: "no", None: "not measured"}
    tables: dict[str, list[Sequence[object]]] = defaultdict(list)
    for each in summary["bars"]:
        title = "## Bars: {model}, {max_new_tokens} tokens".format_map(each)
        tables[title].append((each["name"], each["bar"], _short(each["figure"]), verdicts[each["met"]]))
    for title, lines in tables.items():
        parts += [title, table(("figure", "bar", "measured", "met"), lines)]
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
