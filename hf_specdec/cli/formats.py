"""`--format`, which every command has: for people, for programs, or the bare essential."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Format(StrEnum):
    """How a result is printed.

    Attributes:
        HUMAN: Tables and sentences.
        JSON: One JSON object with a `schema_version`.
        QUIET: The bare essential, which a script can take as it is; each command says what that is.
    """

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


FormatOption = Annotated[
    Format, typer.Option("--format", help="For people, for programs, or the bare essential.", show_choices=True)
]
JsonOption = Annotated[bool, typer.Option("--json", help="The same as --format json.")]


def chosen(output: Format, as_json: bool) -> Format:
    """What `--format` and its short form `--json` together ask for.

    Raises:
        typer.BadParameter: If they contradict each other.
    """
    if as_json and output is Format.QUIET:
        raise typer.BadParameter("--json is --format json, which can't go with --format quiet.")
    return Format.JSON if as_json else output
