"""`hf-specdec explain`: what speculation gains from acceptance, costs, draft length and batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .formats import Format, FormatOption, JsonOption, chosen


if TYPE_CHECKING:
    from rich.console import Console

    from ..tools.explain import Conditions, Explanation

EXAMPLES = """Examples:

hf-specdec explain --acceptance 0.7 --cost-ratio 0.1

hf-specdec explain --acceptance 0.8,0.7,0.6 --num-draft-tokens 5 --batch 8

hf-specdec explain --verify-cost 1,1.05,1.1,1.3 --plot gain.png

hf-specdec explain --from check.json --format json"""
BAR = 24  # cells
MOST_ROWS = 10
ACCEPTANCE, COST_RATIO = 0.7, 0.1
HALVED = {
    "rejections": "half the rejections",
    "draft": "half the draft's cost",
    "verification": "half of what wider forwards cost more",
    "overhead": "half the overhead",
}
LIMITS = {
    "rejections": "acceptance",
    "draft": "the draft's cost",
    "verification": "wider forwards",
    "overhead": "overhead",
}


def explain(
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="Chance of a draft token; or those of position 1, 2, …, comma-separated.", show_default="0.7"
        ),
    ] = None,
    cost_ratio: Annotated[
        float | None,
        typer.Option(metavar="C", help="A draft step in steps of the target; 0 for copied text.", show_default="0.1"),
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(min=1, max=256, metavar="K", help="A draft length to look at.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Rows.", show_default="1")] = None,
    verify_cost: Annotated[
        str | None,
        typer.Option(
            metavar="V",
            help="Forwards over 1, 2, 3 … tokens a row, such as 1,1.05,1.1; or what each further token adds.",
            show_default="0.02",
        ),
    ] = None,
    overhead: Annotated[
        float | None,
        typer.Option(metavar="O", help="What a round costs besides its forwards, in steps.", show_default="0.05"),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--from", dir_okay=False, metavar="FILE", help="Take what check or bench measured (JSON)."),
    ] = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="With --from a benchmark: which method.")] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE", help="Draw it: PNG, SVG or PDF.")
    ] = None,
    output: FormatOption = Format.HUMAN,
    as_json: JsonOption = False,
) -> None:
    """Compute what speculation gains, and under which conditions it would pay.

    A calculator: no model is loaded. --format quiet prints the best draft length, 0 where drafting doesn't pay.
    """
    output = chosen(output, as_json)
    from ..tools.explain import explain as work_out
    from ..tools.gain_plot import check_plot_file, write_gain_plot

    if method is not None and record is None:
        raise typer.BadParameter("--method needs --from, a benchmark.")
    if plot is not None:
        check_plot_file(plot)
    conditions, origin = _conditions(acceptance, cost_ratio, batch, verify_cost, overhead, record, method)
    found = work_out(conditions, num_draft_tokens=num_draft_tokens)
    if plot is not None:
        write_gain_plot(found, plot)
        typer.echo(f"Written: {plot}", err=True)
    if output is Format.JSON:
        print(json.dumps(found.to_dict() | {"from": origin}, indent=2, ensure_ascii=False, allow_nan=False))
    elif output is Format.QUIET:
        print(found.best.num_draft_tokens)
    else:
        show(found, origin)


def _conditions(
    acceptance: str | None, cost_ratio: float | None, batch: int | None, verify_cost: str | None, overhead: float | None,
    record: Path | None, method: str | None,
) -> tuple[Conditions, str | None]:  # fmt: skip
    """Measured figures, then those given, then the usual ones."""
    from ..tools.explain import Conditions
    from ..tools.measured import conditions_of, read_record

    found: dict[str, Any] = {"acceptance": ACCEPTANCE, "draft_cost": COST_RATIO}
    origin = None
    if record is not None:
        measured, origin = conditions_of(read_record(record), method=method, batch=batch)
        found |= measured | {"most": len(measured["acceptance"])}
    given = {
        "acceptance": None if acceptance is None else _one_or_several("--acceptance", acceptance),
        "draft_cost": cost_ratio,
        "batch": batch,
        "verify_cost": None if verify_cost is None else _one_or_several("--verify-cost", verify_cost),
        "overhead": overhead,
    }
    return Conditions(**found | {name: value for name, value in given.items() if value is not None}), origin


def _one_or_several(option: str, text: str) -> float | tuple[float, ...]:
    try:
        numbers = tuple(float(each) for each in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} takes a number, or several with commas between; got {text!r}.") from None
    return numbers if len(numbers) > 1 else numbers[0]


def show(found: Explanation, origin: str | None = None) -> None:
    """Print the tables of an explanation to stdout."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if origin:
        console.print(Text(f"Measured: {origin}", style="dim"))
    console.print(Text(_given(found.conditions), style="dim"))
    _show_lengths(console, found)
    for line in _sentences(found):
        console.print(Text(line))
    _show_regions(console, found)
    _show_batches(console, found)


def _given(conditions: Conditions) -> str:
    chances = conditions.acceptance
    accepted = ", ".join(f"{each:.0%}" for each in chances) if isinstance(chances, tuple) else f"{chances:.0%}"
    wider = conditions.verify_cost
    verifying = f"{wider:g} for each further token" if isinstance(wider, float) else "as measured or given"
    drafting = "" if conditions.share == 1 else f", {conditions.share:.0%} of the rounds have a draft"
    return (
        f"acceptance {accepted}; in target steps: draft step {conditions.draft_cost:.3g}, wider forwards {verifying}, "
        f"overhead {conditions.overhead:g} a round; batch {conditions.batch}{drafting}"
    )


def _show_lengths(console: Console, found: Explanation) -> None:
    marks = {found.best.num_draft_tokens: "best"}
    if found.chosen is not None:
        k = found.chosen.num_draft_tokens
        marks[k] = "best, yours" if k in marks else "yours"
    shown = max(MOST_ROWS, *marks) + 1
    top = max(each.speedup for each in found.lengths)
    _table(
        console, ("draft", "tokens", "steps", "speed-up"),
        [
            (
                str(each.num_draft_tokens),
                f"{each.expected_tokens:.2f}",
                f"{each.round_cost:.2f}",
                f"{each.speedup:.2f}×",
                "█" * round(BAR * each.speedup / top),
                marks.get(each.num_draft_tokens, ""),
            )
            for each in found.lengths[:shown]
        ],
    )  # fmt: skip


def _sentences(found: Explanation) -> list[str]:
    best, chosen_length = found.best, found.chosen
    if found.pays:
        lines = [
            f"Best: {best.num_draft_tokens} draft token{'s'[: best.num_draft_tokens > 1]}, {best.speedup:.2f}× plain decoding."
        ]
    else:
        lines = ["Drafting doesn't pay under these conditions, at any length: leave it off."]
    if found.break_even_acceptance is None:
        lines.append("Break-even: none; it would lose even if every draft token were accepted.")
    else:
        lines.append(
            f"Break-even: it pays from {found.break_even_acceptance:.0%} acceptance on, with short enough drafts."
        )
    if chosen_length is not None:
        k, needed = chosen_length.num_draft_tokens, found.break_even_of_chosen
        needs = "can't pay" if needed is None else f"needs {needed:.0%}"
        lines.append(f"Yours: a fixed length of {k} gives {chosen_length.speedup:.2f}× and {needs}.")
    if found.dearest_draft is None:
        lines.append("At this acceptance not even a draft that costs nothing would pay.")
    else:
        lines.append(f"At this acceptance a draft step may cost up to {found.dearest_draft:.2f} of the target's.")
    first = next(iter(found.limits))
    halved = ", ".join(f"{HALVED[name]} {value:.2f}×" for name, value in found.limits.items())
    return [*lines, f"What limits most: {LIMITS[first]}. With {halved}."]


def _show_regions(console: Console, found: Explanation) -> None:
    wanted = list(found.regions[0].dearest)
    titles = ("acceptance", *("pays" if each == 1 else f"{each:g}×" for each in wanted))
    rows = [
        (f"{each.acceptance:.0%}", *("never" if cost is None else f"{cost:.2f}" for cost in each.dearest.values()))
        for each in found.regions
    ]
    _heading(console, "What a draft step may cost, in target steps, for a speed-up of")
    _table(console, titles, rows)


def _show_batches(console: Console, found: Explanation) -> None:
    if len(found.batches) < 2:
        return
    _heading(console, "By batch size, if acceptance and draft cost stay the same")
    titles = ("batch", *(str(each.batch) for each in found.batches))
    rows = [
        ("best length", *(str(each.num_draft_tokens) for each in found.batches)),
        ("speed-up", *(f"{each.speedup:.2f}×" for each in found.batches)),
    ]
    _table(console, titles, rows)


def _heading(console: Console, text: str) -> None:
    from rich.text import Text

    console.print()
    console.print(Text(text, style="bold"))


def _table(console: Console, titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for _ in range(max(map(len, rows)) - len(titles)):
        table.add_column("", justify="left", no_wrap=True, overflow="crop")
    for row in rows:
        table.add_row(*row)
    console.print(table)
