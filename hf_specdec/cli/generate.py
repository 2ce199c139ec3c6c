"""`hf-specdec generate`: stream an answer, or write those to a file of prompts; then print what speculation did."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .formats import Format, FormatOption, JsonOption, chosen


if TYPE_CHECKING:
    from ..config import SpecConfig

SCHEMA_VERSION = 1
INTERRUPTED = 130  # what shells report for Ctrl-C
ENGINES = ("local", "ray")
EXAMPLES = """Examples:

hf-specdec generate Qwen/Qwen3-0.6B --prompt "Name three rivers."

hf-specdec generate ./target --draft ./draft --prompt "Hello" --seed 1

hf-specdec generate ./target --prompt "Hello" --off --json

hf-specdec generate ./target --prompts in.jsonl --out out.jsonl

accelerate launch -m hf_specdec.cli generate ./target --prompts in.jsonl ..."""


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Local folder or Hub id.")],
    prompt: Annotated[str | None, typer.Option(help="What to answer.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(dir_okay=False, help="A file to answer: JSONL with prompt or messages.")
    ] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="With --prompts: the file for the answers.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model: local folder, Hub id, or auto.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter by name, such as prompt_lookup.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Seed for sampling.", show_default="another each time; 0 with --prompts")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    off: Annotated[bool, typer.Option("--off", help="Decode without speculation.")] = False,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template.", show_default="where there is one"),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="With --prompts: prompts at once.", show_default="8")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="With --prompts: start over, don't resume.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="With --prompts: exit code 1 if records were skipped.")
    ] = False,
    engine: Annotated[str, typer.Option(help="With --prompts: local, or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="With ray: how many models.", show_default="one a GPU")
    ] = None,
    output: FormatOption = Format.HUMAN,
    as_json: JsonOption = False,
) -> None:
    """Stream an answer to stdout, or write those to a file of prompts; print the statistics to stderr.

    A file's answers are written in its order once all are there. After a kill the same command goes on where it was. --format quiet leaves out the
    statistics.
    """
    output = chosen(output, as_json)
    if off and (draft or drafter):
        raise typer.BadParameter("--off decodes without a draft; leave out --draft and --drafter.")
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("Give either --prompt, a text to answer, or --prompts, a file.")
    if (prompts is None) != (out is None):
        raise typer.BadParameter("--prompts and --out go together.")
    if prompts is None and (batch_size or restart or strict or workers or engine != "local"):
        raise typer.BadParameter("--batch-size, --restart, --strict, --engine and --workers need --prompts.")
    if engine not in ENGINES or (workers and engine != "ray"):
        raise typer.BadParameter("--engine is local or ray, and --workers goes with ray.")
    if prompts is not None and out is not None:
        from ..tools.offline_records import JobSettings

        settings = JobSettings(
            model, draft, drafter, off, temperature, seed or 0, max_new_tokens, dtype, chat, batch_size or 8
        )
        summary = _run_job(settings, prompts, out, restart=restart, engine=engine, workers=workers)
        if summary is not None:  # only the first of several ranks has one
            _show_summary(summary, output)
            raise typer.Exit(1 if strict and summary["errors"] else 0)
        return
    import torch
    from transformers import TextStreamer

    import hf_specdec

    from ..tools.loading import encode_prompt, load_model
    from ..tools.offline_worker import ONE_TEXT

    loaded = load_model(model, dtype=dtype)
    inputs = encode_prompt(loaded, prompt or "", chat=chat)
    options: dict[str, Any] = ONE_TEXT | {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    options |= {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    if output is not Format.JSON:
        options["streamer"] = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    if seed is not None:
        torch.manual_seed(seed)
    if off:
        generated = loaded.model.generate(**inputs, **options)
    else:
        speculative = _config(draft, drafter, seed)
        generated = hf_specdec.generate(loaded.model, **inputs, **options, speculative=speculative)
    stats = None if off else generated.spec_stats
    if output is Format.JSON:
        tokens = generated.sequences[0, inputs["input_ids"].shape[1] :]
        text = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        result = {
            "schema_version": SCHEMA_VERSION,
            "model": model,
            "text": text,
            "num_tokens": len(tokens),
            "stats": stats.to_dict() if stats else None,
        }
        print(json.dumps(result, indent=2, ensure_ascii=False))
    elif output is Format.HUMAN:
        print(stats or "speculation: off", file=sys.stderr)


def _config(draft: str | None, drafter: str | None, seed: int | None) -> bool | SpecConfig:
    """Return what to pass as `speculative=`: `True` where nothing is chosen."""
    from ..config import SpecConfig

    if draft is None and drafter is None and seed is None:
        return True
    return SpecConfig(draft_model=draft, drafter=drafter, seed=seed)


def _run_job(settings: Any, prompts: Path, out: Path, **options: Any) -> dict[str, Any] | None:
    """Generate for a file, with progress on stderr."""
    from ..errors import SpecDecError
    from ..tools.offline import run_job
    from ..tools.progress import show_job

    try:
        with show_job() as (tell, warn):
            return run_job(settings, prompts, out, **options, tell=tell, warn=warn)
    except KeyboardInterrupt:
        print("Interrupted; the same command goes on from here.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        raise SpecDecError(f"{error} The same command goes on once that is mended.") from error


def _show_summary(summary: dict[str, Any], output: Format) -> None:
    if output is Format.QUIET:
        return
    if output is Format.JSON:
        print(json.dumps({"schema_version": SCHEMA_VERSION} | summary, indent=2, ensure_ascii=False))
        return
    print(f"Written: {summary['out']}, {summary['stats']}", file=sys.stderr)
    lines = [
        f"{summary['records']} records, {summary['tokens']} tokens, {summary['mean_acceptance_length']:.2f} tokens a step, "
        f"{summary['draft_acceptance_rate']:.0%} of the draft tokens accepted",
        f"{summary['generated_records']} records in this run"
        if summary["generated_records"]
        else "nothing left to do",
    ]
    if summary["generated_records"]:
        lines[1] += f", {summary['seconds']:.1f} s, {summary['tokens_per_second']:.1f} tokens/s"
    if summary["errors"]:
        lines.append(f"{summary['errors']} of {summary['records']} records skipped; `error` in the output says why")
    print(*lines, sep="\n", file=sys.stderr)
