"""Pictures of a benchmark, as PNG and SVG.

Needs matplotlib (`pip install "hf-specdec[bench]"`). Lines differ in their markers too, not in colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpecDecError
from .bench_report import BenchReport
from .drawing import COLOURS, MARKERS, STYLE
from .drawing import has_matplotlib as has_matplotlib
from .suites import ALL
from .summaries import Speedup, Summary
from .trials import PLAIN


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT = ("#E69F00", "#CC79A7", "#56B4E9", "#F0E442")  # black is read better on these
LEAST_SEEN = 10  # a position that was reached less often says nothing about acceptance
FOOT = 0.36  # inches under a picture for the line that says how it was measured


def write_plots(report: BenchReport, folder: Path) -> list[Path]:
    """Draw what the report has figures for.

    Args:
        report: The benchmark.
        folder: Where to write; it must exist.

    Returns:
        The files: speed-up by category, acceptance by position, cost curve, speed-up by batch size, each as PNG and SVG.

    Raises:
        SpecDecError: If matplotlib isn't installed.
    """
    if not has_matplotlib():
        raise SpecDecError("Plots need matplotlib. Install it with: pip install 'hf-specdec[bench]'")
    import matplotlib

    drawings: dict[str, Callable[[BenchReport], Figure | None]] = {
        "speedup_by_category": speedup_by_category,
        "acceptance_by_position": acceptance_by_position,
        "cost_curve": cost_curve,
        "speedup_by_batch": speedup_by_batch,
    }
    written = []
    with matplotlib.rc_context(STYLE):
        for name, draw in drawings.items():
            figure = draw(report)
            if figure is None:
                continue
            figure.text(0.01, 0.01, _conditions(report), fontsize=6.5, color="0.4")
            for suffix in ("png", "svg"):
                path = folder / f"{name}.{suffix}"
                figure.savefig(path, metadata={"Date": None} if suffix == "svg" else None)
                written.append(path)
    return written


def speedup_by_category(report: BenchReport) -> Figure | None:
    """Bars: geometric mean; whiskers: quartiles of the prompts. One row of bars for each batch size."""
    found = report.summaries()
    if not any(each.speedup for each in found):
        return None
    sizes = report.batch_sizes
    figure = _figure(7.2, 0.9 + 2.5 * len(sizes))
    for axes, size in zip(figure.subplots(len(sizes), 1, squeeze=False)[:, 0], sizes, strict=True):
        categories = list(report.groups(size))
        thickness = 0.8 / len(report.methods)
        for index, method in enumerate(report.methods):
            left = -0.4 + thickness * (index + 0.5)
            bars = [
                (place + left, each.speedup)
                for place, name in enumerate(categories)
                for each in found
                if (each.batch, each.category, each.method) == (size, name, method) and each.speedup
            ]
            places, ratios = [place for place, _ in bars], [ratio for _, ratio in bars]
            axes.bar(
                places, [ratio.geometric_mean for ratio in ratios], 0.92 * thickness,
                yerr=_whiskers(ratios), color=_colour(index), label=_spoken(method), error_kw={"lw": 0.9, "capsize": 2},
            )  # fmt: skip
            if len(report.methods) * len(categories) <= 12:
                ink = "black" if _colour(index) in LIGHT else "white"
                for place, ratio in bars:
                    label = f"{ratio.geometric_mean:.2f}"
                    axes.text(place, 0.04, label, ha="center", va="bottom", color=ink, fontsize=8, rotation=90)
        for place, name in enumerate(categories):
            if any((each.batch, each.category) == (size, name) and each.refused for each in found):
                axes.text(place, 1.05, "refused:\nplain runs\ndiffer", ha="center", va="bottom", fontsize=7)
        _line_at_one(axes)
        axes.set_xticks(range(len(categories)), [_spoken(name) for name in categories])
        axes.set_xlim(-0.5, len(categories) - 0.5)
        axes.set_ylabel("speed-up (×)")
        axes.set_title(f"Speed-up by category, batch {size}", loc="left")
    _legend(figure.get_axes()[0])
    return figure


def acceptance_by_position(report: BenchReport) -> Figure | None:
    """Lines: chance that the draft token at a position is accepted, given that all before it were."""
    if not report.batch_sizes:
        return None
    size = report.batch_sizes[0]
    lines = {each.method: each.acceptance_by_position for each in _totals(report, size)}
    curves = {
        method: [(place, kept / tried) for place, (tried, kept) in enumerate(counts, 1) if tried >= LEAST_SEEN]
        for method, counts in lines.items()
    }
    if not any(curves.values()):
        return None
    figure = _figure(6.0, 3.6)
    axes = figure.subplots()
    for method, points in curves.items():
        if points:
            _line(axes, report, method, [place for place, _ in points], [100 * share for _, share in points])
    axes.set_ylim(0, 103)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, if all before were (%)")
    last = max(4, *(points[-1][0] for points in curves.values() if points))
    axes.set_xlim(0.5, last + 0.5)
    axes.set_xticks(range(1, last + 1))
    axes.set_title(f"Acceptance by position, batch {size}", loc="left")
    _legend(axes)
    return figure


def cost_curve(report: BenchReport) -> Figure | None:
    """Lines: what a forward over n tokens costs, in units of a plain step of the same batch."""
    if not report.curves:
        return None
    figure = _figure(6.0, 3.6)
    axes = figure.subplots()
    for index, (size, costs) in enumerate(report.curves.items()):
        widths = [tokens // costs.rows for tokens in costs.forward]
        ratios = [seconds / costs.plain_step for seconds in costs.forward.values()]
        step = f"plain step {1000 * costs.plain_step:.3g} ms"
        axes.plot(
            widths, ratios, label=f"batch {size} ({step}, {costs.context} tokens before)", color=_colour(index),
            marker=MARKERS[index % len(MARKERS)], markersize=4,
        )  # fmt: skip
        if costs.draft_step is not None:
            share = costs.draft_step / costs.plain_step
            axes.axhline(
                share, color=_colour(index), lw=1, ls=":", label=f"batch {size}: one draft step ({share:.2f})"
            )
    _line_at_one(axes)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens a row in one forward, n")
    axes.set_ylabel("v(n): seconds ÷ plain step")
    axes.set_title("Cost of a forward", loc="left")
    axes.legend(loc="upper left", fontsize=8)
    return figure


def speedup_by_batch(report: BenchReport) -> Figure | None:
    """Lines: geometric mean of all prompts by batch size; only with several batch sizes."""
    sizes = report.batch_sizes
    totals = [each for size in sizes for each in _totals(report, size) if each.speedup]
    if len(sizes) < 2 or not totals:
        return None
    figure = _figure(6.0, 3.6)
    axes = figure.subplots()
    for index, method in enumerate(report.methods):
        own = [(sizes.index(each.batch), each.speedup) for each in totals if each.method == method and each.speedup]
        if own:
            places = [place + 0.04 * (index - (len(report.methods) - 1) / 2) for place, _ in own]
            ratios = [ratio for _, ratio in own]
            _line(axes, report, method, places, [ratio.geometric_mean for ratio in ratios], _whiskers(ratios))
    _line_at_one(axes)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(sizes)), list(map(str, sizes)))
    axes.set_xlabel("batch size")
    axes.set_ylabel("speed-up (×)")
    axes.set_title("Speed-up by batch size", loc="left")
    _legend(axes)
    return figure


def _totals(report: BenchReport, size: int) -> list[Summary]:
    """The summaries over all categories of a batch size."""
    last = list(report.groups(size))[-1]
    wanted = ALL if ALL in report.groups(size) else last
    return [
        each
        for each in report.summaries()
        if each.batch == size and each.category == wanted and each.method != PLAIN.name
    ]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    below = FOOT / height
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(rect=(0, below, 1, 1 - below)))


def _line(
    axes: Axes, report: BenchReport, method: str, x: Sequence[float], y: Sequence[float], whiskers: Any = None
) -> None:
    index = report.methods.index(method)
    axes.errorbar(
        x, y, whiskers, label=_spoken(method), color=_colour(index), marker=MARKERS[index % len(MARKERS)],
        markersize=4, capsize=2, elinewidth=0.9,
    )  # fmt: skip


def _whiskers(ratios: Sequence[Speedup]) -> list[list[float]]:
    """From the mean down to the lower and up to the upper quartile; nothing where the mean lies outside."""
    return [
        [max(ratio.geometric_mean - ratio.q1, 0) for ratio in ratios],
        [max(ratio.q3 - ratio.geometric_mean, 0) for ratio in ratios],
    ]


def _line_at_one(axes: Axes) -> None:
    axes.axhline(1.0, color="0.35", lw=1, ls="--", zorder=0)


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _conditions(report: BenchReport) -> str:
    """The line under every picture: model, dtype, hardware, prompts, versions."""
    target, versions = report.target, report.environment["versions"]
    hardware = target["hardware"] or f"{report.environment['cpu']}, {report.environment['torch_threads']} threads"
    return (
        f"{Path(target['name']).name}, {target['dtype']}, {hardware}; up to {report.settings.max_new_tokens} new tokens, "
        f"prompts: {len(report.suite.prompts)}, trials: {report.settings.trials};\n"
        f"torch {versions['torch']}, transformers {versions['transformers']}, {report.date}"
    )
