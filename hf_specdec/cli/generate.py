"""`hf-specdec generate`: stream an answer, then print what speculation did."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer


if TYPE_CHECKING:
    from ..config import SpecConfig

SCHEMA_VERSION = 1
EXAMPLES = """Examples:

hf-specdec generate Qwen/Qwen3-0.6B --prompt "Name three rivers."

hf-specdec generate ./target --draft ./draft --prompt "Hello" --seed 1

hf-specdec generate ./target --prompt "Hello" --off --json"""


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Local folder or Hub id.")],
    prompt: Annotated[str, typer.Option(help="What to answer.")],
    draft: Annotated[str | None, typer.Option(help="Draft model: local folder, Hub id, or auto.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter by name, such as prompt_lookup.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    off: Annotated[bool, typer.Option("--off", help="Decode without speculation.")] = False,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template.", show_default="where there is one"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Stream an answer to stdout and print the statistics to stderr."""
    if off and (draft or drafter):
        raise typer.BadParameter("--off decodes without a draft; leave out --draft and --drafter.")
    import torch
    from transformers import TextStreamer

    import hf_specdec

    from ..tools.loading import encode_prompt, load_model

    loaded = load_model(model, dtype=dtype)
    inputs = encode_prompt(loaded, prompt, chat=chat)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    options |= {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    if not as_json:
        options["streamer"] = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    if seed is not None:
        torch.manual_seed(seed)
    if off:
        output = loaded.model.generate(**inputs, **options)
    else:
        speculative = _config(draft, drafter, seed)
        output = hf_specdec.generate(loaded.model, **inputs, **options, speculative=speculative)
    stats = None if off else output.spec_stats
    if as_json:
        tokens = output.sequences[0, inputs["input_ids"].shape[1] :]
        text = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        result = {
            "schema_version": SCHEMA_VERSION,
            "model": model,
            "text": text,
            "num_tokens": len(tokens),
            "stats": stats.to_dict() if stats else None,
        }
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        print(stats or "speculation: off", file=sys.stderr)


def _config(draft: str | None, drafter: str | None, seed: int | None) -> bool | SpecConfig:
    """Return what to pass as `speculative=`: `True` where nothing is chosen."""
    from ..config import SpecConfig

    if draft is None and drafter is None and seed is None:
        return True
    return SpecConfig(draft_model=draft, drafter=drafter, seed=seed)
