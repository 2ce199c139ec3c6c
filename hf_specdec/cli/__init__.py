"""The command `hf-specdec`. One file a command; torch and transformers are imported when a command runs."""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from ..errors import SpecDecError
from . import bench, check, demo, drafts, env, explain, export, generate, watch


EXAMPLES = """Examples:

hf-specdec demo

hf-specdec generate Qwen/Qwen3-0.6B --prompt "Name three rivers." """


def examples(text: str) -> str:
    """Commands one a line, as they are."""
    return "\b\n" + text.replace("\n\n", "\n")


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help in a third of the time
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo", epilog=demo.EXAMPLES)(demo.demo)
app.command("generate", epilog=generate.EXAMPLES)(generate.generate)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.command("check", epilog=check.EXAMPLES)(check.check)
app.command("drafts", epilog=drafts.EXAMPLES)(drafts.drafts)
app.command("explain", epilog=explain.EXAMPLES)(explain.explain)
app.command("export", epilog=export.EXAMPLES)(export.export)
app.command("watch", epilog=watch.EXAMPLES)(watch.watch)
app.command("env", epilog=env.EXAMPLES)(env.env)
for command in app.registered_commands:
    # a paragraph on one line, so that the terminal alone breaks lines
    paragraphs = inspect.cleandoc(getattr(command.callback, "__doc__", None) or "").split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    command.short_help = " ".join(paragraphs[0].split())
    command.epilog = examples(command.epilog or "")


def main() -> None:
    """Run the command line; a `SpecDecError` becomes one line on stderr and exit code 1."""
    try:
        app()
    except SpecDecError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(1) from None


def _print_version(wanted: bool) -> None:
    if wanted:
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
