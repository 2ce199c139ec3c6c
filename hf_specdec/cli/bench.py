"""`hf-specdec bench`: how much faster, on real prompts, and how sure that is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import batch_sizes_of, names_of, try_places
from .formats import Format, FormatOption


if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from ..tools.bench_report import BenchReport
    from ..tools.summaries import Summary

RESULTS = "results.json"
INTERRUPTED = 130  # what shells report for Ctrl-C
SPEED = ("", "tok/s", "speed-up", "quartiles", "worst", "ideal", "η")
TOKENS = ("", "tok/step", "accepted", "drafts from", "plain's text")
LATENCY = ("milliseconds", "first token", "token p50", "p90", "block p50", "p90")
WIDE = ("drafts from", "plain's text")  # columns that may take several lines
LEGEND = (
    "speed-up: plain seconds a token ÷ the method's, prompt included; runs in turns, median of the trials, geometric "
    "mean and quartiles of the prompts. ideal: if a round cost nothing but its forwards; η: speed-up ÷ ideal. "
    "block: from one arrival of tokens to the next; tokens that arrive together are 0 ms apart."
)
EXAMPLES = """Examples:

hf-specdec bench

hf-specdec bench Qwen/Qwen3-0.6B --drafter all --vs-transformers --out results

hf-specdec bench ./target --draft ./draft --batch 1,8 --prompts mine.jsonl"""


def bench(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]", help="Local folder or Hub id.", show_default="SmolLM2-135M-Instruct, fetched once"
        ),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model: local folder or Hub id.")] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Drafter by name, auto or all; repeat for more.", show_default="auto"),
    ] = None,
    vs_transformers: Annotated[
        bool, typer.Option("--vs-transformers", help="Measure Transformers' own loops too.")
    ] = False,
    categories: Annotated[
        str | None, typer.Option(help="Categories, comma-separated.", show_default="all of the prompts")
    ] = None,
    per_category: Annotated[int, typer.Option(min=1, help="Most prompts a category.")] = 4,
    prompts: Annotated[
        str | None,
        typer.Option(help="JSONL, or text with a prompt a line.", show_default="120 that come with the package"),
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Leave out longer prompts.")] = 1024,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens a prompt.")] = 64,
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    trials: Annotated[int, typer.Option(min=2, help="Runs of each method on each prompt.")] = 3,
    no_ideal: Annotated[
        bool, typer.Option("--no-ideal", help="Skip forwards alone: no ideal, no η, no cost curve.")
    ] = False,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write one JSON object; - is stdout.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for results.json and plots (PNG, SVG).")
    ] = None,
    output: FormatOption = Format.HUMAN,
) -> None:
    """Measure speed-up, latency and acceptance on real prompts.

    Plain runs and runs of each method take turns. Where the plain runs themselves differ by more than 10 %, no speed-up
    is given. Exit code 1 if a text differs by more than rounding explains, or a drafter fails. --format json is --json -;
    --format quiet prints batch size, method and speed-up of each on a line.
    """
    if json_to == "-" and output is Format.QUIET:
        raise typer.BadParameter("--json - prints JSON, which can't go with --format quiet.")
    output = Format.JSON if json_to == "-" else output
    json_to = None if json_to == "-" else json_to
    sizes = batch_sizes_of(batch)
    from ..selection.load import load_draft
    from ..tools.bench import BenchSettings, choose_methods, run_bench
    from ..tools.demo import load_demo_model
    from ..tools.progress import show_count
    from ..tools.suites import built_in_suite, read_suite

    settings = BenchSettings(
        categories=tuple(names_of(categories)) if categories else None,
        per_category=per_category,
        batch_sizes=sizes,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        trials=trials,
        ideal=not no_ideal,
    )
    suite = read_suite(prompts) if prompts else built_in_suite()
    # what is wrong is better known before a model is loaded
    suite.select(settings.categories)
    drafters = drafter or ("auto",)
    choose_methods(drafters, draft=draft)
    _make_places(json_to, out)
    loaded = load_demo_model(target, dtype=dtype)
    draft_model = None if draft is None else load_draft(loaded.model, draft)
    methods, skipped = choose_methods(drafters, draft=draft_model, vs_transformers=vs_transformers)
    command = ["hf-specdec", *sys.argv[1:]]
    with show_count() as tell:
        report = run_bench(
            loaded, suite, methods, settings, draft=draft_model, skipped=skipped, command=command, tell=tell
        )
    if output is Format.HUMAN:
        show(report)
    elif output is Format.QUIET:
        _show_ratios(report)
    _write(report, json_to, out, to_stdout=output is Format.JSON)
    raise typer.Exit(INTERRUPTED if report.interrupted else 0 if report.ok else 1)


def _make_places(json_to: str | None, out: Path | None) -> None:
    json_file = [Path(json_to)] if json_to else []
    try_places([*([out / RESULTS] if out else []), *json_file])


def _write(report: BenchReport, json_to: str | None, out: Path | None, *, to_stdout: bool) -> None:
    text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
    if to_stdout:
        print(text)
    if json_to:
        Path(json_to).write_text(text + "\n", encoding="utf-8")
        print(f"Written: {json_to}", file=sys.stderr)
    if out is None:
        return
    from ..tools.plots import has_matplotlib, write_plots

    results = out / RESULTS
    results.write_text(text + "\n", encoding="utf-8")
    if has_matplotlib():
        written = [results, *write_plots(report, out)]
    else:
        print("No plots: they need matplotlib. Install it with: pip install 'hf-specdec[bench]'", file=sys.stderr)
        written = [results]
    print(f"Written to {out}:", ", ".join(path.name for path in written), file=sys.stderr)


def _show_ratios(report: BenchReport) -> None:
    """A line for each batch size and method over all categories; `-` where no speed-up is given."""
    for batch in report.batch_sizes:
        whole = list(report.groups(batch))[-1]
        for each in report.summaries():
            if (each.batch, each.category) == (batch, whole) and each.method != "plain":
                print(batch, each.method, "-" if each.speedup is None else f"{each.speedup.geometric_mean:.3f}")


def show(report: BenchReport) -> None:
    """Print the tables of a report to stdout."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    summaries = report.summaries()
    for size in report.batch_sizes:
        own = [each for each in summaries if each.batch == size]
        console.rule(f"batch {size}", style="dim")
        for titles, row in ((SPEED, _speed), (TOKENS, _tokens), (LATENCY, _latency)):
            _print_table(console, titles, own, row)
    for note in report.notes():
        console.print(Text(f"! {note}", style="yellow"))
    if summaries:
        console.print(Text(LEGEND, style="dim"))
    console.print(Text(_conditions(report), style="dim"))


def _print_table(
    console: Console, titles: tuple[str, ...], summaries: list[Summary], row: Callable[[Summary], list[str]]
) -> None:
    """Print one table: a line that names the category, then a line for each method."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column(titles[0], no_wrap=True)
    for title in titles[1:]:
        wide = title in WIDE
        table.add_column(title, justify="left" if wide else "right", no_wrap=not wide, overflow="fold")
    for category in dict.fromkeys(each.category for each in summaries):
        own = [each for each in summaries if each.category == category]
        table.add_row(Text(category, style="bold"))
        for each in own:
            if any(cells := row(each)):
                table.add_row(Text(f"  {each.method}"), *cells)
    console.print(table)


def _speed(each: Summary) -> list[str]:
    tokens = f"{each.tokens_per_second:.1f}"
    if each.method == "plain":
        return [tokens, "", f"differ by {each.spread:.1%}", "", "", ""]
    if each.speedup is None:
        return [tokens, *["–"] * 5]
    ratio = each.speedup
    quartiles = f"{ratio.q1:.2f} – {ratio.q3:.2f}"
    efficiency = "" if each.efficiency is None else f"{each.efficiency:.2f}"
    return [tokens, _times(ratio.geometric_mean), quartiles, _times(ratio.worst), _times(each.ideal), efficiency]


def _tokens(each: Summary) -> list[str]:
    length = "" if each.acceptance_length is None else f"{each.acceptance_length:.2f}"
    rate = "" if each.acceptance_rate is None else f"{each.acceptance_rate:.0%}"
    sources = ", ".join(f"{name} {share:.0%}" for name, share in each.rounds_by_source.items())
    return [length, rate, sources, _same_text(each)]


def _same_text(each: Summary) -> str:
    texts = each.texts
    if texts is None:
        return ""
    kinds = [(texts.ties, "tie"), (texts.near_ties, "near-tie"), (texts.mismatches, "MISMATCH")]
    others = ", ".join(f"{count} {name}" for count, name in kinds if count)
    known = [gap for gap in texts.gaps if gap is not None]
    gap = f" (gap ≤ {max(known):.2g})" if known and max(known) > 0 else ""
    return f"{texts.same}/{texts.texts}" + (f", {others}{gap}" if others else "")


def _latency(each: Summary) -> list[str]:
    found = each.latency
    if found is None:
        return [""] * 5
    seconds = (found.first_token, found.token_p50, found.token_p90, found.block_p50, found.block_p90)
    return ["" if value is None else f"{1000 * value:.1f}" for value in seconds]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"


def _conditions(report: BenchReport) -> str:
    target, environment = report.target, report.environment
    hardware = target["hardware"] or f"{environment['cpu']}, {environment['torch_threads']} threads"
    versions = environment["versions"]
    return (
        f"{target['name']} ({target['parameters'] / 1e6:,.3g} M parameters), {target['dtype']}, {target['device']} "
        f"({hardware}), greedy, up to {report.settings.max_new_tokens} new tokens, {report.settings.trials} trials, "
        f"prompts: {report.suite.name}, torch {versions['torch']}, transformers {versions['transformers']}"
    )
