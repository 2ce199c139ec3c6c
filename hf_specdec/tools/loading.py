"""Load a model with its tokenizer and turn prompts into inputs, for the commands that generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecDecError


DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in eval mode and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any


def load_model(name: str, *, dtype: str = "auto", device: str | None = None) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name: Local folder or Hub id.
        dtype: One of `DTYPES`; "auto" is what the checkpoint was saved in.
        device: Where to put it. `None` is the first CUDA device, else the CPU.

    Raises:
        SpecDecError: If the dtype is unknown, or the model can't be loaded.
    """
    if dtype not in DTYPES:
        raise SpecDecError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False).to(device)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise SpecDecError(
            f"The model {name!r} can't be loaded: {reason} Pass a local folder or a Hub id of a causal language model."
        ) from error
    return LoadedModel(name=name, model=model.eval(), tokenizer=tokenizer)


def encode_prompt(loaded: LoadedModel, prompt: str | list[dict[str, Any]], *, chat: bool | None = None) -> Any:
    """Turn a prompt into the inputs of `generate`, on the model's device. Takes and raises what `tokenize` does."""
    return tokenize(loaded, prompt, chat=chat).to(loaded.model.device)


def tokenize(loaded: LoadedModel, prompt: str | list[dict[str, Any]], *, chat: bool | None = None) -> Any:
    """Turn a prompt into the inputs of `generate`, on the CPU.

    Args:
        loaded: The model and its tokenizer.
        prompt: What the user wrote, or the messages of a chat, which need the chat template.
        chat: Wrap it in the chat template. `None` does so where the tokenizer has one.

    Raises:
        SpecDecError: If `chat` is true and the tokenizer has no chat template, or the prompt has no tokens.
    """
    tokenizer = loaded.tokenizer
    has_template = tokenizer.chat_template is not None
    is_chat = not isinstance(prompt, str)
    if (chat or is_chat) and not has_template:
        way_out = "Give it a text." if is_chat else "Use --no-chat."
        raise SpecDecError(f"The tokenizer of {loaded.name!r} has no chat template. {way_out}")
    if is_chat or (has_template if chat is None else chat):
        messages = prompt if is_chat else [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise SpecDecError("The prompt has no tokens. Give it at least one character.")
    return inputs


def encode_batch(loaded: LoadedModel, prompts: Sequence[str | list[dict[str, Any]]]) -> dict[str, Any]:
    """Turn prompts into one batch, padded on the left.

    Args:
        loaded: The model and its tokenizer.
        prompts: What the user wrote, or the messages of a chat, one prompt a row.

    Returns:
        `input_ids` and `attention_mask`, int64 `[rows, longest]`, on the model's device.
    """
    return pad_batch(loaded, [encode_prompt(loaded, prompt)["input_ids"][0] for prompt in prompts])


def pad_batch(loaded: LoadedModel, rows: Sequence[Any]) -> dict[str, Any]:
    """Pad encoded prompts on the left.

    Args:
        loaded: The model and its tokenizer.
        rows: Token ids, int64 `[length]` each.

    Returns:
        `input_ids` and `attention_mask`, int64 `[rows, longest]`.
    """
    import torch

    rows = list(rows)
    ids = torch.nn.utils.rnn.pad_sequence(rows, True, pad_token(loaded), padding_side="left")
    real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True, 0, padding_side="left")
    return {"input_ids": ids, "attention_mask": real}


def pad_token(loaded: LoadedModel) -> int:
    """The id to pad with: the generation config's, else the tokenizer's, else the first end token, else 0."""
    ends = end_tokens(loaded)
    for found in (loaded.model.generation_config.pad_token_id, loaded.tokenizer.pad_token_id, *ends[:1]):
        if found is not None:
            return int(found)
    return 0


def end_tokens(loaded: LoadedModel) -> list[int]:
    """The ids that end a text."""
    ends = loaded.model.generation_config.eos_token_id
    return [] if ends is None else [int(end) for end in (ends if isinstance(ends, Sequence) else [ends])]
