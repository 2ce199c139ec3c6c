"""The command `hf-specdec`. One file a command; torch and transformers are imported when a command runs."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import SpecDecError
from ..tools.printable import printable


# in the order of the help; each is the function of that name in the module of that name, beside its `EXAMPLES`
COMMANDS = ("demo", "generate", "bench", "check", "drafts", "explain", "export", "watch", "env")
EXAMPLES = """Examples:

hf-specdec demo

hf-specdec generate Qwen/Qwen3-0.6B --prompt "Name three rivers." """


def examples(text: str) -> str:
    """Commands one a line, as they are."""
    return "\b\n" + text.replace("\n\n", "\n")


class _Commands(TyperGroup):
    """Imports a command when it is called; the list of them all is the only one that needs each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _command(cmd_name)
        return self.commands.get(cmd_name)


def _command(name: str) -> Any:
    module = import_module(f".{name}", __name__)
    run = getattr(module, name)
    # a paragraph on one line, so that the terminal alone breaks lines
    paragraphs = inspect.cleandoc(run.__doc__ or "").split("\n\n")
    texts: dict[str, Any] = {
        "help": "\n\n".join(" ".join(each.split()) for each in paragraphs),
        "short_help": " ".join(paragraphs[0].split()),
    }
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(name, epilog=examples(module.EXAMPLES), **texts)(run)
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help in a third of the time
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; a `SpecDecError` becomes one line on stderr and exit code 1."""
    try:
        app()
    except SpecDecError as error:
        print("error:", printable(" ".join(str(error).split())), file=sys.stderr)
        raise SystemExit(1) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print("hf-specdec", version("hf-specdec"))
        except PackageNotFoundError:
            print("hf-specdec (not installed: run from a source tree)")
        raise typer.Exit


@app.callback(epilog=examples(EXAMPLES))
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Lossless speculative decoding for Hugging Face Transformers."""
