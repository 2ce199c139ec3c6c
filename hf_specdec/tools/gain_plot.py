"""A picture of what speculation gains: by draft length, by acceptance and draft cost, by batch size.

Needs matplotlib (`pip install "hf-specdec[bench]"`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpecDecError
from .drawing import COLOURS, MARKERS, STYLE, need_matplotlib
from .explain import Conditions, Explanation
from .gain import expected_tokens, over_all_rounds, round_cost, speedup


if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
SHIFTS = (0.0, 0.1, -0.1)  # the acceptances that are drawn beside the given one
GRID = 60
DEAREST = 0.8  # draft cost at the top of the map
LEVELS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
BANDS = ("0.88", "#EFF6FB", "#D3E6F3", "#AFD1E8", "#82B5DA", "#5696C8", "#3478B2")  # from loses to more than 4×


def check_plot_file(path: Path) -> None:
    """Find out that a picture can be written there before anything is computed.

    Raises:
        SpecDecError: If matplotlib is missing, or the file's name has no known ending.
    """
    need_matplotlib()
    if path.suffix.lower() not in SUFFIXES:
        raise SpecDecError(f"The picture {path} must end in {', '.join(SUFFIXES)}.")


def write_gain_plot(found: Explanation, path: Path) -> None:
    """Draw an explanation.

    Args:
        found: What `explain` gave.
        path: A PNG, SVG or PDF file.

    Raises:
        SpecDecError: If it can't be written, or matplotlib isn't installed.
    """
    check_plot_file(path)
    import matplotlib

    with matplotlib.rc_context(STYLE):
        from matplotlib.figure import Figure

        panels = 3 if len(found.batches) > 1 else 2
        figure = Figure(figsize=(3.6 * panels, 3.4), layout="constrained")
        axes = figure.subplots(1, panels)
        _by_length(axes[0], found)
        _regions(axes[1], found.conditions)
        if panels == 3:
            _by_batch(axes[2], found)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise SpecDecError(f"{path} can't be written ({error.strerror}). Name another place.") from error


def _by_length(axes: Axes, found: Explanation) -> None:
    from matplotlib.ticker import MaxNLocator

    lengths = [each.num_draft_tokens for each in found.lengths]
    for index, shift in enumerate(SHIFTS):
        moved = replace(found.conditions, acceptance=_shifted(found.conditions.acceptance, shift))
        label = "as given" if not shift else f"acceptance {shift:+.0%}".replace("%", " points")
        axes.plot(
            lengths, [_speedup(moved, k) for k in lengths], color=COLOURS[index], marker=MARKERS[index], markersize=4,
            lw=1.8 if not shift else 1.0, label=label,
        )  # fmt: skip
    axes.axhline(1.0, color="0.35", lw=1, ls="--", zorder=0)
    axes.set_xlabel("draft tokens a round")
    axes.set_ylabel("speed-up (×)")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("By draft length", loc="left")
    axes.legend(fontsize=7.5)


def _regions(axes: Axes, conditions: Conditions) -> None:
    """The best speed-up by acceptance and draft cost, with the given point in it."""
    chances = [(column + 0.5) / GRID for column in range(GRID)]
    costs = [DEAREST * row / (GRID - 1) for row in range(GRID)]
    values = _best_speedups(conditions, chances, costs)
    axes.contourf(chances, costs, values, levels=[0, *LEVELS, 1000], colors=BANDS)
    lines = axes.contour(chances, costs, values, levels=LEVELS, colors="black", linewidths=0.6)
    axes.clabel(lines, fmt=lambda level: f"{level:g}×", fontsize=7)
    axes.text(0.03, 0.97, "loses", transform=axes.transAxes, va="top", fontsize=8)
    given = conditions.acceptance
    if isinstance(given, tuple):
        given = sum(given) / len(given)
    if conditions.draft_cost <= DEAREST:
        axes.plot(
            given, conditions.draft_cost, "o", color="#D55E00", markeredgecolor="white", markersize=7, clip_on=False
        )
    axes.set_xlabel("acceptance of a draft token")
    axes.set_ylabel("draft step ÷ target step")
    axes.set_title("Where it pays, at the best length", loc="left")


def _by_batch(axes: Axes, found: Explanation) -> None:
    sizes = [each.batch for each in found.batches]
    axes.plot(sizes, [each.speedup for each in found.batches], color=COLOURS[0], marker=MARKERS[0], markersize=4)
    for each in found.batches:
        axes.annotate(
            f"k={each.num_draft_tokens}", (each.batch, each.speedup), xytext=(0, 5), textcoords="offset points",
            ha="center", fontsize=7,
        )  # fmt: skip
    axes.axhline(1.0, color="0.35", lw=1, ls="--", zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(0, 1.12 * max(each.speedup for each in found.batches))
    axes.set_xlabel("batch size")
    axes.set_ylabel("speed-up (×)")
    axes.set_title("By batch size, at the best length k", loc="left")


def _shifted(acceptance: float | tuple[float, ...], shift: float) -> float | tuple[float, ...]:
    if isinstance(acceptance, tuple):
        return tuple(min(max(each + shift, 0.0), 1.0) for each in acceptance)
    return min(max(acceptance + shift, 0.0), 1.0)


def _speedup(conditions: Conditions, k: int) -> float:
    return speedup(
        conditions.acceptance, k, conditions.draft_cost, conditions.verify_cost, share=conditions.share,
        **_batch(conditions),
    )  # fmt: skip


def _best_speedups(conditions: Conditions, chances: list[float], costs: list[float]) -> list[list[float]]:
    """The best speed-up of drafting, also where that is under 1; a row for each draft cost."""
    lengths = range(1, conditions.most + 1)
    free = [round_cost(k, 0.0, conditions.verify_cost, **_batch(conditions)) for k in lengths]
    tokens = [[over_all_rounds(expected_tokens(chance, k), conditions.share) for k in lengths] for chance in chances]
    return [
        [
            max(
                given / over_all_rounds(verified + cost * k, conditions.share)
                for k, given, verified in zip(lengths, each, free, strict=True)
            )
            for each in tokens
        ]
        for cost in costs
    ]


def _batch(conditions: Conditions) -> dict[str, Any]:
    return {"batch": conditions.batch, "overhead": conditions.overhead}
