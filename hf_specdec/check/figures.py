"""Pictures for the report in HTML: SVG that takes its colours from the page, so that it is read in light and in dark.

Needs matplotlib (`pip install "hf-specdec[check]"`). What is drawn is in the tables too.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..tools.suites import ALL


if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRID, LINE, MARK = "#010203", "#040506", "#070809", "#0a0b0c"  # stand for the page's own colours
VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)", LINE: "var(--line)", MARK: "var(--mark)"}
WIDTH, HEIGHT = 4.3, 2.5  # inches; narrow, so that letters are large enough on a phone
BAR, MOST_BARS = 0.32, 20
STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "hf_specdec",
    "text.parse_math": False,  # a category may hold dollar signs
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def draw_figures(report: Mapping[str, Any]) -> dict[str, str]:
    """Draw what the report has figures for.

    Args:
        report: From `report.assemble`.

    Returns:
        SVG elements to put into a page that sets `--ink`, `--grid`, `--line` and `--mark`; by the names that the tables
            give.
    """
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    drawings: dict[str, tuple[str, Callable[[Mapping[str, Any], Axes], bool]]] = {
        "speed": ("Speed-up by batch size, with 95 % intervals", _speed),
        "categories": ("Acceptance by category, with 95 % intervals", _categories),
        "positions": ("Acceptance by position in the draft, with 95 % intervals", _positions),
        "draft_length": ("Predicted speed-up by draft length", _draft_length),
        "output_length": ("Speed-up by length of the output", _output_length),
        "temperature": ("Speed-up by temperature", _temperature),
    }
    found = {}
    with matplotlib.rc_context(STYLE | {"axes.prop_cycle": cycler(color=[LINE])}):
        for name, (title, draw) in drawings.items():
            bars = (
                min(len((report["acceptance"] or {}).get("by_category", ())), MOST_BARS) if name == "categories" else 0
            )
            figure = Figure(
                figsize=(WIDTH, max(HEIGHT, 0.9 + BAR * bars)), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
            )
            if draw(report, figure.subplots()):
                file = io.StringIO()
                figure.savefig(file, format="svg", metadata={"Date": None})
                found[name] = _embedded(file.getvalue(), name, title)
    return found


def _embedded(svg: str, name: str, title: str) -> str:
    """An SVG file as an element of a page: without its head, with names of its own and the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    view = re.search(r'viewBox="([^"]*)"', svg)
    assert view is not None
    svg = re.sub(r"<svg[^>]*>", f'<svg viewBox="{view[1]}" role="img" aria-label="{title}">', svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def _speed(report: Mapping[str, Any], axes: Axes) -> bool:
    points = [each for each in report["curves"]["batch"] if each["speedup"]]
    if not points:
        return False
    places = list(range(len(points)))
    ratios = [each["speedup"] for each in points]
    _points(axes, places, ratios, [each["interval"] or [each["speedup"]] * 2 for each in points])
    _at_one(axes)
    axes.set_xticks(places, [str(each["batch"]) for each in points])
    axes.set_xlim(-0.5, len(points) - 0.5)
    _labels(axes, "batch size", "speed-up (×)")
    return True


def _categories(report: Mapping[str, Any], axes: Axes) -> bool:
    found = (report["acceptance"] or {}).get("by_category", {})
    bars = [(name, each) for name, each in found.items() if each["draft_acceptance_rate"] is not None][-MOST_BARS:]
    if len(bars) == 2:
        bars = [bar for bar in bars if bar[0] == ALL]
    if not bars:
        return False
    rates = [100 * each["draft_acceptance_rate"] for _, each in bars]
    spans = [[100 * end for end in each["draft_acceptance_rate_interval"]] for _, each in bars]
    axes.barh(range(len(bars)), rates, 0.62, color=LINE)
    axes.errorbar(
        rates, range(len(bars)), xerr=_whiskers(rates, spans), fmt="none", ecolor=INK, elinewidth=0.9, capsize=2
    )
    axes.set_yticks(range(len(bars)), [_short(name) for name, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("draft tokens accepted (%)")
    return True


def _positions(report: Mapping[str, Any], axes: Axes) -> bool:
    found = (report["acceptance"] or {}).get("by_category", {}).get(ALL, {}).get("positions", [])
    found = [each for each in found if each["drafted"]]
    if not found:
        return False
    rates = [100 * each["rate"] for each in found]
    _points(
        axes, [each["position"] for each in found], rates, [[100 * end for end in each["interval"]] for each in found]
    )
    axes.set_ylim(0, 103)
    axes.set_xticks([each["position"] for each in found])
    _labels(axes, "position in the draft", "accepted, if all before (%)")
    return True


def _draft_length(report: Mapping[str, Any], axes: Axes) -> bool:
    found = report["draft_length"]
    if found is None:
        return False
    lengths, ratios = ([each[name] for each in found["curve"]] for name in ("num_draft_tokens", "speedup"))
    _points(axes, lengths, ratios)
    if found["best"]:
        place = (found["best"], ratios[lengths.index(found["best"])])
        axes.plot(*place, "o", color=MARK, markersize=8)
        axes.annotate("best", place, (0, 7), textcoords="offset points", ha="center", color=INK)
    _at_one(axes)
    axes.set_xticks(lengths)
    _labels(axes, "draft tokens a round", "predicted speed-up (×)")
    return True


def _output_length(report: Mapping[str, Any], axes: Axes) -> bool:
    found = report["curves"]["output_length"]
    clock = (report["speed"].get("1", {}).get("on") or {}).get("speedup")
    if not found or not clock:
        return False
    axes.set_xscale("log", base=2)
    lengths = [each["tokens"] for each in found]
    _points(axes, lengths, [each["speedup"] for each in found])
    _at_one(axes)
    axes.set_xticks(lengths, list(map(str, lengths)))
    axes.minorticks_off()
    _labels(axes, "new tokens", "speed-up (×)")
    return True


def _temperature(report: Mapping[str, Any], axes: Axes) -> bool:
    found = [each for each in report["curves"]["temperature"] if not each["refused"]]
    if not found:
        return False
    _points(axes, [each["temperature"] for each in found], [each["speedup"] for each in found])
    _at_one(axes)
    _labels(axes, "temperature", "speed-up (×)")
    return True


def _points(
    axes: Axes, x: Sequence[float], y: Sequence[float], spans: Sequence[Sequence[float]] | None = None
) -> None:
    axes.errorbar(
        x, y, yerr=None if spans is None else _whiskers(y, spans), color=LINE, marker="o", markersize=4.5, capsize=3,
        elinewidth=1,
    )  # fmt: skip
    tops = [*y, *(high for _, high in spans or ())]
    axes.set_ylim(0, 1.2 * max(*tops, 1.0))


def _whiskers(values: Sequence[float], spans: Sequence[Sequence[float]]) -> list[list[float]]:
    return [
        [max(value - low, 0) for value, (low, _) in zip(values, spans, strict=True)],
        [max(high - value, 0) for value, (_, high) in zip(values, spans, strict=True)],
    ]


def _at_one(axes: Axes) -> None:
    axes.axhline(1.0, color=MARK, lw=1, ls="--", zorder=1)


def _labels(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"
