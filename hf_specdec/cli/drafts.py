"""`hf-specdec drafts`: which draft model for a target, and why not the others."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .formats import Format, FormatOption, JsonOption, chosen


if TYPE_CHECKING:
    from ..selection.candidates import Candidate, Choice

SCHEMA_VERSION = 1
COLOURS = {"fits": "green", "fits with padding": "green", "unverified": "yellow", "other vocabulary": "yellow"}
EXAMPLES = """Examples:

hf-specdec drafts Qwen/Qwen3-8B

hf-specdec drafts ./my-model --offline

hf-specdec drafts Qwen/Qwen3-8B --format quiet"""


def drafts(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Local folder or Hub id.")],
    offline: Annotated[bool, typer.Option("--offline", help="Ask the local cache and the catalog alone.")] = False,
    revision: Annotated[str | None, typer.Option(help="The target's branch, tag or commit.")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Forget the earlier pick for this target.")] = False,
    output: FormatOption = Format.HUMAN,
    as_json: JsonOption = False,
) -> None:
    """List draft models for a target, with verdicts and reasons.

    Reads configurations and tokenizers only, never weights. Where the Hub can't be reached, it answers from the catalog
    and says "unverified". --format quiet prints the id of the chosen draft model, or nothing.
    """
    output = chosen(output, as_json)
    from ..selection.pick import pick

    choice = pick(target, revision=revision, local_files_only=offline, refresh=refresh)
    if output is Format.JSON:
        print(json.dumps(to_dict(choice), indent=2, ensure_ascii=False))
        for note in choice.notes:
            print(f"note: {note}", file=sys.stderr)
    elif output is Format.QUIET:
        if choice.chosen is not None:
            print(choice.chosen.id)
    else:
        _show(choice)


def to_dict(choice: Choice) -> dict[str, Any]:
    """What `--format json` prints."""
    chosen = choice.chosen
    return {
        "schema_version": SCHEMA_VERSION,
        "target": choice.target,
        "chosen": chosen and {"id": chosen.id, "kind": chosen.kind, "verified": chosen.verified},
        "candidates": [
            {
                "id": each.id,
                "kind": each.kind,
                "verdict": each.verdict,
                "reasons": list(each.reasons),
                "memory_bytes": each.memory_bytes,
                "predicted_speedup": each.predicted_speedup,
            }
            for each in choice.candidates
        ],
    }


def line_to_paste(choice: Choice) -> str:
    """The argument of `generate` that uses what was chosen."""
    if choice.chosen is None:
        return "speculative=True"
    draft = json.dumps(choice.chosen.id, ensure_ascii=False)
    return f"speculative=hf_specdec.SpecConfig(draft_model={draft})"


def _show(choice: Choice) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if choice.candidates:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        table.add_column("draft", overflow="fold", ratio=1)
        table.add_column("verdict", width=10)
        table.add_column("memory", justify="right", no_wrap=True)
        table.add_column("speed-up", justify="right", no_wrap=True)
        for each in choice.candidates:
            name = Text(each.id, style="bold" if each == choice.chosen else "")
            for reason in each.reasons:
                name.append(f"\n{reason}", style="dim")
            verdict = Text(each.verdict, style=COLOURS.get(each.verdict, "red"))
            table.add_row(name, verdict, _gigabytes(each.memory_bytes), _times(each.predicted_speedup))
        console.print(table)
    for note in choice.notes:
        console.print(Text(f"! {note}", style="yellow"))
    console.print(Text(_summary(choice)))
    print(line_to_paste(choice))  # one line however wide, so that it can be copied


def _summary(choice: Choice) -> str:
    chosen = choice.chosen
    if chosen is None and not choice.candidates:
        return f"Nothing was found for {choice.target}. Without a draft model prompt lookup drafts. Pass to model.generate:"
    if chosen is None:
        return f"No draft model for {choice.target}, so prompt lookup drafts. Pass to model.generate:"
    state = "" if chosen.verified else ", unverified"
    return f"Chosen for {choice.target}: {chosen.id}{state}{_download(chosen)}. Pass to model.generate:"


def _download(chosen: Candidate) -> str:
    if chosen.download_bytes is None:
        return ""
    return f", {_gigabytes(chosen.download_bytes)} to download" if chosen.download_bytes else ", on this disk"


def _gigabytes(size: int | None) -> str:
    if size is None:
        return ""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"
