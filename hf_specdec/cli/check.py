"""`hf-specdec check`: does speculation pay on these prompts, is it lossless here, and with which settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .arguments import batch_sizes_of, try_places
from .formats import Format, FormatOption


if TYPE_CHECKING:
    from rich.console import Console

    from ..check.tables import Section
    from ..tools.prompt_files import Reading

QUICK: dict[str, Any] = {
    "batch_sizes": (1,), "most_prompts": 8, "timed_prompts": 5, "max_new_tokens": 32, "temperatures": (1.0,),
    "curve_prompts": 2, "sampled_tokens": 600, "minutes": 2.0,
}  # fmt: skip
NARROW = 12  # columns of text that stay in one line
EXAMPLES = """Examples:

hf-specdec check Qwen/Qwen3-0.6B --prompts mine.jsonl

hf-specdec check ./target --draft ./draft --prompts log.csv --html report.html

hf-specdec check ./target --quick --format quiet

hf-specdec check Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --static"""


def check(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]", help="Local folder or Hub id.", show_default="SmolLM2-135M-Instruct, fetched once"
        ),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model: local folder or Hub id.")] = None,
    drafter: Annotated[str, typer.Option(help="Drafter by name, or auto: what speculative=True does.")] = "auto",
    prompts: Annotated[
        str | None,
        typer.Option(
            help="JSONL (prompt, turns or messages), text, CSV or Parquet; - is stdin.",
            show_default="some that come with the package",
        ),
    ] = None,
    column: Annotated[str | None, typer.Option(help="Field or column with the prompts.")] = None,
    batch: Annotated[
        str | None, typer.Option(help="Your batch sizes, comma-separated.", show_default="1,4; quick: 1")
    ] = None,
    max_prompts: Annotated[
        int | None, typer.Option(min=1, help="Most prompts, of all categories.", show_default="24; quick: 8")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=8, help="Most tokens a prompt.", show_default="64; quick: 32")
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Leave out longer prompts.")] = 1024,
    temperature: Annotated[float, typer.Option(help="Of your sampling, above 0.")] = 1.0,
    sampled_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to test sampling on.", show_default="2000; quick: 600")
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option(min=1, max=128, help="Draft length to measure acceptance at.")] = 8,
    trials: Annotated[int, typer.Option(min=2, help="Timed runs of each side on each prompt.")] = 2,
    minutes: Annotated[
        float | None,
        typer.Option(help="How long it should take, roughly.", show_default="9; quick: 2"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A first look in about two minutes.")] = False,
    static: Annotated[bool, typer.Option("--static", help="Stop before weights are loaded.")] = False,
    save: Annotated[
        Path | None, typer.Option(file_okay=False, help="Where to keep what is finished.", show_default="the cache")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Measure anew, don't go on.")] = False,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write one JSON object; - is stdout.")
    ] = None,
    html_to: Annotated[Path | None, typer.Option("--html", dir_okay=False, help="Write a page with plots.")] = None,
    markdown_to: Annotated[Path | None, typer.Option("--markdown", dir_okay=False, help="Write Markdown.")] = None,
    output: FormatOption = Format.HUMAN,
) -> None:
    """Find out, on your prompts, whether speculation pays and is lossless, and with which settings.

    Exit code 0: it passed and pays; 1: a text or a distribution is wrong, or a part failed; 2: it passed and isn't shown to
    pay; 130: interrupted, and the same command goes on.
    """
    if json_to == "-" and output is Format.QUIET:
        raise typer.BadParameter("--json - prints JSON, which can't go with --format quiet.")
    from ..check.run import CheckSettings, run_check
    from ..check.verdict import exit_code
    from ..tools.chat_model import fetch_chat_model
    from ..tools.demo import load_demo_model
    from ..tools.progress import show_count

    given = {
        "batch_sizes": None if batch is None else batch_sizes_of(batch), "most_prompts": max_prompts, "max_new_tokens": max_new_tokens,
        "sampled_tokens": sampled_tokens, "minutes": minutes,
    }  # fmt: skip
    chosen = (QUICK if quick else {}) | {name: value for name, value in given.items() if value is not None}
    settings = CheckSettings(
        target=target or str(fetch_chat_model()), draft=draft, drafter=drafter, dtype=dtype, trials=trials,
        max_prompt_tokens=max_prompt_tokens, temperature=temperature, num_draft_tokens=num_draft_tokens, **chosen,
    )  # fmt: skip
    try_places(Path(file) for file in (json_to, html_to, markdown_to) if file and str(file) != "-")
    reading = _read(prompts, column)
    with show_count() as tell:
        report = run_check(
            settings, reading, lambda: load_demo_model(settings.target, dtype=dtype), folder=save, restart=restart,
            static_only=static, tell=tell, say=lambda line: print(line, file=sys.stderr),
        )  # fmt: skip
    _print(report, Format.JSON if json_to == "-" else output)
    _write(report, json_to, html_to, markdown_to)
    raise typer.Exit(exit_code(report))


def _read(prompts: str | None, column: str | None) -> Reading:
    from ..tools.printable import printable
    from ..tools.prompt_files import JSON_LINES, Reading, read_prompts
    from ..tools.suites import built_in_suite

    if prompts is None:
        if column is not None:
            raise typer.BadParameter("--column says where in --prompts the prompts are; give that too.")
        return Reading(built_in_suite(), JSON_LINES)
    reading = read_prompts(prompts, column)
    for bad in reading.bad[:10]:
        print(f"skipped: {printable(str(bad))}", file=sys.stderr)
    if len(reading.bad) > 10:
        print(f"skipped: {len(reading.bad) - 10} more", file=sys.stderr)
    return reading


def _print(report: Mapping[str, Any], output: Format) -> None:
    if output is Format.JSON:
        print(json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False))
    elif output is Format.QUIET:
        print(report["recommendation"]["verdict"] if report["passed"] else "FAIL")
    else:
        show(report)


def _write(report: Mapping[str, Any], json_to: str | None, html_to: Path | None, markdown_to: Path | None) -> None:
    texts: dict[Path, str] = {}
    if json_to and json_to != "-":
        texts[Path(json_to)] = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if html_to:
        from ..check.html import to_html

        texts[html_to] = to_html(report)
    if markdown_to:
        from ..check.markdown import to_markdown

        texts[markdown_to] = to_markdown(report)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(f"Written: {path}", file=sys.stderr)


def show(report: Mapping[str, Any]) -> None:
    """Print the tables and the verdict to stdout."""
    from rich.console import Console
    from rich.text import Text

    from ..check.tables import code_line, conditions, headline, notes, reasons, sections

    console = Console(highlight=False)
    for section in sections(report):
        _show_section(console, section)
    for note in notes(report):
        console.print(Text(f"! {note}", style="yellow"))
    console.print(Text(conditions(report), style="dim"))
    console.rule(style="dim")
    good = report["passed"] and report["recommendation"]["verdict"] != "off"
    console.print(
        Text(headline(report), style="bold green" if good else "bold yellow" if report["passed"] else "bold red")
    )
    for reason in reasons(report):
        console.print(Text(f"- {reason}"))
    if code := code_line(report):
        console.print(Text("Pass to model.generate:"))
        print(code)  # one line however wide, so that it can be copied


def _show_section(console: Console, section: Section) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console.print(Text(section.title, style="bold"))
    titled = any(section.columns)
    table = Table(box=box.SIMPLE_HEAD if titled else None, padding=(0, 1), pad_edge=False, show_header=titled)
    for place, title in enumerate(section.columns):
        longest = max([len(title), *(len(row[place]) for row in section.rows)])
        words = longest > NARROW and place > 0
        table.add_column(
            title, justify="left" if place == 0 or longest > 2 * NARROW else "right", no_wrap=not words and longest <= 20,
            overflow="fold",
        )  # fmt: skip
    for row in section.rows:
        table.add_row(*(Text(cell, style="bold red" if cell == "FAIL" else "") for cell in row))
    console.print(table)
    for note in section.notes:
        console.print(Text(note, style="dim"))
    console.print()
