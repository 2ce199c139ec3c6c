"""`hf-specdec export`: what to type into vLLM, llama.cpp, TGI and other engines."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..export.engines import ENGINES, ExportRefused, load_engine
from ..tools.printable import printable
from .formats import Format, FormatOption, JsonOption, chosen


if TYPE_CHECKING:
    from ..export.acceptance import Prediction
    from ..export.record import Checked
    from ..export.render import Export, Setup
    from ..export.vocabularies import VocabularyCheck

SCHEMA_VERSION = 1
EXAMPLES = """Examples:

hf-specdec export vllm ./target --draft ./draft --num-draft-tokens 4

hf-specdec export tgi ./target --method prompt_lookup --num-draft-tokens 3

hf-specdec export llama-cpp --from check.json --engine-version b11312

hf-specdec export sglang --from check.json -q | sh"""


def export(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help=f"One of {', '.join(ENGINES)}.")],
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="Local folder or Hub id; with --from the one checked.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model: local folder or Hub id.")] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="draft_model or prompt_lookup; custom-generate takes every drafter.", show_default="by --draft"
        ),
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(min=1, max=128, metavar="K", help="Tokens drafted a step; see hf-specdec check.")
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option(metavar="V", help="The engine's version.", show_default="the newest known")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--from", dir_okay=False, metavar="FILE", help="Take the rest from a check (JSON)."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Of the requests; 0 is greedy.")] = 0.0,
    confidence_threshold: Annotated[
        float,
        typer.Option(min=0, max=1, metavar="P", help="Draft no token less likely, where the engine can."),
    ] = 0.4,
    out: Annotated[
        Path, typer.Option(file_okay=False, metavar="FOLDER", help="custom-generate: the folder to write.")
    ] = Path("speculative"),
    offline: Annotated[bool, typer.Option("--offline", help="Read tokenizers from this disk alone.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="The same as --format quiet: the bare command.")
    ] = False,
    output: FormatOption = Format.HUMAN,
    as_json: JsonOption = False,
) -> None:
    """Write what was measured here as the command of another engine, for the version that runs there.

    Says which rule it followed, whether the engine takes the pair's vocabularies, how much it will accept, and what to look at
    after the launch. What an engine can't do is refused with the reason and exit code 1. Weights are never read.
    """
    if quiet and (as_json or output is Format.JSON):
        raise typer.BadParameter("-q is --format quiet, which can't go with JSON.")
    output = Format.QUIET if quiet else chosen(output, as_json)
    try:
        result = _work_out(
            engine, target, draft, method, num_draft_tokens, engine_version, record, temperature, confidence_threshold,
            out, offline,
        )  # fmt: skip
    except ExportRefused as refusal:
        if output is Format.JSON:
            refused = {"reason": refusal.reason, "instead": refusal.instead}
            found = {"schema_version": SCHEMA_VERSION, "kind": "export", "engine": engine, "refused": refused}
            print(json.dumps(found, indent=2, ensure_ascii=False))
        raise
    _report(output, *result, record)


def _work_out(
    engine: str, target: str | None, draft: str | None, method: str | None, num_draft_tokens: int | None,
    engine_version: str | None, record: Path | None, temperature: float, confidence: float, out: Path, offline: bool,
) -> tuple[Export, Setup, VocabularyCheck | None, Prediction]:  # fmt: skip
    """Write the files, if there are any, and say what was found."""
    from ..export.acceptance import predict
    from ..export.folder import write_folder
    from ..export.record import read_check
    from ..export.render import export as render

    if engine not in ENGINES:
        raise typer.BadParameter(f"There is no engine {engine!r} to export to. Choose one of {', '.join(ENGINES)}.")
    known = load_engine(engine)
    checked = None if record is None else read_check(record)
    setup = _setup(checked, target, draft, method, num_draft_tokens, temperature, confidence, out)
    if setup.num_draft_tokens is None and engine != "custom-generate":
        raise typer.BadParameter(
            "--num-draft-tokens is needed: engines draft a fixed number. hf-specdec check finds it."
        )
    # refuses what no pair could have, before anything is looked up
    exported = render(engine, setup, version=engine_version)
    vocabularies = None
    if setup.draft is not None and known.vocabulary != "any":
        vocabularies = _compare(known.title, known.vocabulary, setup, offline)
        if vocabularies.verdict == "other sizes":
            exported = render(engine, setup, version=engine_version, other_sizes=True)
    if engine == "custom-generate":
        write_folder(out, exported.files)
        typer.echo(f"Written: {', '.join(str(out / name) for name in exported.files)}", err=True)
    measured = checked is not None and checked.target == setup.target and setup.draft in (None, checked.draft)
    return exported, setup, vocabularies, predict(exported, setup, checked.record if checked and measured else None)


def _setup(
    checked: Checked | None, target: str | None, draft: str | None, method: str | None, num_draft_tokens: int | None,
    temperature: float, confidence: float, out: Path,
) -> Setup:  # fmt: skip
    """Options, and what they leave open from the check."""
    from ..export.render import Setup

    if checked is None and target is None:
        raise typer.BadParameter("Name the target: a local folder, a Hub id, or --from a check.")
    if checked is not None and draft is None and method is None:
        checked.refuse_if_off()
        draft, method = checked.draft, checked.method
    elif checked is not None and draft is None and method != "prompt_lookup":
        draft = checked.draft
    if method is None:
        method = "prompt_lookup" if draft is None else "draft_model"
    if draft is None and method in ("draft_model", "hybrid", "cross_vocabulary"):
        raise typer.BadParameter(f"--method {method} needs a --draft.")
    tokens = num_draft_tokens or (checked.num_draft_tokens if checked is not None else None)
    return Setup(
        target=target or (checked.target if checked is not None else ""),
        method=method,
        draft=None if method in ("prompt_lookup", "recycling") else draft,
        num_draft_tokens=tokens,
        temperature=temperature,
        confidence=confidence,
        max_batch=None if checked is None else checked.max_batch,
        greedy_drafts=checked is not None and checked.greedy_drafts,
        folder=str(out),
    )


def _compare(title: str, rule: str, setup: Setup, offline: bool) -> VocabularyCheck:
    """Whether the engine takes the pair.

    Raises:
        ExportRefused: If it doesn't.
    """
    from ..export.vocabularies import REFUSED, check

    found = check(rule, setup.target, setup.draft or "", local_files_only=offline)
    if found.verdict == REFUSED:
        raise ExportRefused(
            f"{title} won't speculate with this pair: {'; '.join(found.warnings)}",
            f"Take another draft model; `hf-specdec drafts {setup.target}` lists them",
        )
    return found


def _report(
    output: Format, exported: Export, setup: Setup, vocabularies: VocabularyCheck | None, predicted: Prediction,
    record: Path | None,
) -> None:  # fmt: skip
    warnings = _warnings(exported, vocabularies)
    if output is Format.JSON:
        found = to_dict(exported, setup, vocabularies, predicted, record)
        print(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False))
        return
    for warning in warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    print(exported.command)
    if output is Format.HUMAN:
        _show(exported, setup, vocabularies, predicted, record)


def _warnings(exported: Export, vocabularies: VocabularyCheck | None) -> list[str]:
    """What must be seen even where the bare command is asked for."""
    found = [exported.doubt] if exported.doubt else []
    if vocabularies is not None and vocabularies.warnings:
        word = {"unverified": "the vocabularies are unverified: "}.get(vocabularies.verdict, "")
        found.append(word + "; ".join(vocabularies.warnings))
    return found


def after_launch(exported: Export, record: Path | None) -> list[str]:
    """What to run, or to look at, when it serves."""
    engine = load_engine(exported.engine)
    compared = "" if record is None else f" --compare {shlex.quote(str(record))}"
    watch = [f"hf-specdec watch {engine.url}{compared}"] if engine.watched and engine.url else []
    return [*watch, engine.after_launch]


def to_dict(
    exported: Export, setup: Setup, vocabularies: VocabularyCheck | None, predicted: Prediction, record: Path | None
) -> dict[str, Any]:
    """What `--format json` prints."""
    engine = load_engine(exported.engine)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "export",
        "engine": exported.engine,
        "engine_version": exported.version,
        "checked_version": f"b{engine.newest}" if engine.is_build else engine.newest,
        "target": setup.target,
        "draft": setup.draft,
        "method": exported.method,
        "num_draft_tokens": setup.num_draft_tokens,
        "command": exported.command,
        "language": exported.language,
        "argv": list(exported.argv),
        "files": exported.files,
        "vocabulary": None
        if vocabularies is None
        else {"verdict": vocabularies.verdict, "warnings": list(vocabularies.warnings)},
        "acceptance": predicted.to_dict(),
        "after_launch": after_launch(exported, record),
        "notes": list(exported.notes),
        "warnings": _warnings(exported, vocabularies),
        "sources": list(exported.sources),
        "checked": list(exported.checked),
        "refused": None,
    }


def _show(
    exported: Export, setup: Setup, vocabularies: VocabularyCheck | None, predicted: Prediction, record: Path | None
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, *lines: str) -> None:
        for index, line in enumerate(lines):
            table.add_row("" if index else name, Text(printable(line)))

    tokens = setup.num_draft_tokens
    length = f"{tokens} draft tokens a step" if tokens else "a draft length that adapts itself"
    row("for", f"{exported.title} {exported.version}, {exported.method}, {length}")
    if vocabularies is not None:
        row(
            "vocabulary",
            ": ".join([vocabularies.verdict, *["; ".join(vocabularies.warnings)] * bool(vocabularies.warnings)]),
        )
    row("acceptance", *_spoken(predicted))
    row("after launch", *after_launch(exported, record))
    row("notes", *exported.notes)
    row("checked", *(map(_place, exported.checked) if exported.checked else ["by reading about it alone"]))
    row("sources", ", ".join(exported.sources))
    console = Console(highlight=False)
    console.print()
    console.print(table)


def _spoken(predicted: Prediction) -> list[str]:
    name = f"family {predicted.family}: " if predicted.family in ("A1", "A2", "B1", "B2") else ""
    lines = [f"{name}{predicted.rule}"]
    if predicted.draft_acceptance_rate is None:
        return [*lines, f"no prediction: {predicted.reason}"] if predicted.reason != predicted.rule else lines
    figures = (
        f"predicted: {predicted.draft_acceptance_rate:.0%} of the draft tokens accepted, "
        f"{predicted.mean_acceptance_length:.2f} tokens a step"
    )
    return [*lines, f"{figures} ({predicted.reason})" if predicted.reason else figures]


def _place(checked: dict[str, Any]) -> str:
    if "package" in checked:
        return f"{checked['package']} {checked['version']}, {checked['file']}"
    return f"{checked['repository']}@{checked['commit'][:8]}, {checked['file']}"
