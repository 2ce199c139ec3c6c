"""`hf-specdec demo`: the same prompts with speculation off and on, side by side."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SpecDecError
from .formats import Format, FormatOption, JsonOption, chosen


if TYPE_CHECKING:
    from rich.console import Console

    from ..tools.demo import DemoReport, DemoResult

EXAMPLES = """Examples:

hf-specdec demo

hf-specdec demo --dtype bfloat16 --trials 5

hf-specdec demo --model ./my-model --prompt "Hello" --json

hf-specdec demo --web"""
PROMPT_CHARACTERS = 150
NOT_ON_THE_PAGE = {
    "prompt": "--prompt", "max_new_tokens": "--max-new-tokens", "trials": "--trials", "drafter": "--drafter",
    "output": "--format", "as_json": "--json",
}  # fmt: skip
INSTALL = "pip install 'hf-specdec[demo,web]'"


def demo(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Local folder or Hub id.", show_default="SmolLM2-135M-Instruct, fetched once")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model: local folder or Hub id.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompt; repeat for more.", show_default="four that come with the package")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens a prompt.")] = 96,
    trials: Annotated[int, typer.Option(min=1, help="How often each side decodes each prompt.")] = 2,
    dtype: Annotated[
        str, typer.Option(help="float32 (same text, token by token), bfloat16, float16 or auto.")
    ] = "float32",
    drafter: Annotated[str, typer.Option(help="Drafter by name, or auto.")] = "auto",
    web: Annotated[bool, typer.Option("--web", help="Serve a page that shows both sides.")] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="With --web: where.", show_default="first free from 7860")
    ] = None,
    output: FormatOption = Format.HUMAN,
    as_json: JsonOption = False,
) -> None:
    """Decode prompts with speculation off and on; compare text and speed.

    Exit code 1 if a text differs by more than rounding explains. With --web the page has its own prompts and settings.
    --format quiet prints the speed-up alone.
    """
    output = chosen(output, as_json)
    if web:
        given = [flag for name, flag in NOT_ON_THE_PAGE.items() if _was_given(ctx, name)]
        if given:
            raise typer.BadParameter(f"{', '.join(given)} can't go with --web; the page has prompts and settings.")
        if draft is not None and model is None:
            raise typer.BadParameter("With --web, --draft needs --model, the target that it drafts for.")
        _serve(model, draft, dtype if _was_given(ctx, "dtype") else None, port)
        return
    if port is not None:
        raise typer.BadParameter("--port needs --web.")
    from ..tools.demo import load_demo_model, run_demo, user_prompts
    from ..tools.progress import show_steps

    loaded = load_demo_model(model, dtype=dtype)
    with show_steps() as steps:
        report = run_demo(
            loaded,
            prompts=user_prompts(prompt) if prompt else None,
            max_new_tokens=max_new_tokens,
            trials=trials,
            drafter=drafter,
            draft_model=draft,
            step=steps.step,
        )
    if output is Format.JSON:
        command = ["hf-specdec", *sys.argv[1:]]
        print(json.dumps(report.to_dict() | {"command": command}, indent=2, ensure_ascii=False))
    elif output is Format.QUIET:
        print(f"{report.speedup:.3f}")
    else:
        _show(report)
    raise typer.Exit(0 if report.ok else 1)


def _was_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _serve(model: str | None, draft: str | None, dtype: str | None, port: int | None) -> None:
    """Serve the page until Ctrl-C."""
    try:
        import gradio
    except ImportError as error:
        raise SpecDecError(f"--web needs Gradio, which isn't installed. Install it with: {INSTALL}") from error
    if int(gradio.__version__.partition(".")[0]) < 6:
        raise SpecDecError(f"--web needs Gradio 6, got {gradio.__version__}. Install it with: {INSTALL}")
    import torch

    from ..web.app import build, launch
    from ..web.models import families, own_family

    on_gpu = torch.cuda.is_available()
    if model is None:
        offered = families(on_gpu)
        for family in offered.values():
            family.dtype = dtype or family.dtype
    else:
        offered = {"own": own_family(model, draft, dtype or ("bfloat16" if on_gpu else "float32"))}
        offered["own"].load()  # what is wrong with it is better known now than at the first run
    page = build(offered)
    try:
        _, address, _ = launch(page, server_port=port, quiet=True, prevent_thread_lock=True)
    except OSError as error:
        where = "any port from 7860" if port is None else f"port {port}"
        raise SpecDecError(
            f"The page can't be served on {where}: it is taken. Name another one with --port."
        ) from error
    print(f"The page is at {address} (Ctrl-C ends it)", flush=True)
    page.block_thread()


def _show(report: DemoReport) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for result in report.results:
        _show_result(console, result)
    _show_summary(console, report)


def _show_result(console: Console, result: DemoResult) -> None:
    """Print one prompt and both answers, side by side."""
    from rich import box
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    prompt = " ".join(result.prompt.text.split())
    if len(prompt) > PROMPT_CHARACTERS:
        prompt = prompt[:PROMPT_CHARACTERS].rstrip() + " …"
    console.print(Rule(f"{result.prompt.title} ({result.prompt.id})", style="dim"))
    console.print(Text(prompt, style="dim"))
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1))
    table.add_column(f"off: {result.tokens_per_second_off:.1f} tokens/s", ratio=1, overflow="fold")
    table.add_column(f"on: {result.tokens_per_second_on:.1f} tokens/s", ratio=1, overflow="fold")
    table.add_row(Text(result.text_off), Text(result.text_on))
    console.print(table)
    console.print(f"{result.speedup:.2f}× as fast, {result.verdict}")
    if result.stats["fallback_reason"]:
        console.print(f"Decoded plainly: {result.stats['fallback_reason']}", markup=False)
    console.print()


def _show_summary(console: Console, report: DemoReport) -> None:
    """Print one line for each prompt and the conditions of the run."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("prompt", overflow="fold")
    for title in ("off tok/s", "on tok/s", "speed-up", "tok/step", "accepted", "same text"):
        table.add_column(title, justify="right", no_wrap=True)
    for result in report.results:
        stats = result.stats
        table.add_row(
            result.prompt.title,
            f"{result.tokens_per_second_off:.1f}",
            f"{result.tokens_per_second_on:.1f}",
            f"{result.speedup:.2f}×",
            f"{stats['mean_acceptance_length']:.2f}",
            f"{stats['num_accepted_draft_tokens']}/{stats['num_draft_tokens']}",
            "yes" if result.same_text else "near-tie" if result.ok else "NO",
        )
    console.print(table)
    console.print(f"[bold]{report.speedup:.2f}× as fast[/bold] (geometric mean), greedy, drafter: {report.drafter}")
    pair = report.model if report.draft_model is None else f"{report.model} with {report.draft_model}"
    conditions = (
        f"{pair}, {report.dtype}, {report.device} ({report.hardware}, {report.threads} threads), up to "
        f"{report.max_new_tokens} new tokens, median of {report.trials} trials, torch {report.versions['torch']}, "
        f"transformers {report.versions['transformers']}"
    )
    console.print(conditions, style="dim", markup=False)
