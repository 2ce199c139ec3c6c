"""A tiny target that knows its mind about as well as a real one, and a draft that mostly agrees with it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from hf_specdec.tools.loading import LoadedModel
from hf_specdec.tools.suites import BenchPrompt

from ..tiny import exact_pair
from ..tools.tiny_chat import byte_tokenizer


PROMPTS = tuple(
    BenchPrompt(f"tiny {number}", "own", text)
    for number, text in enumerate(
        (
            "Why is the sky blue?",
            "def add(a, b):",
            "one two three one two three one two",
            "Write a poem.",
            "7 x 8 =",
            "aaaa",
        )
    )
)
LAYERS = 2


@cache
def tiny_pair(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[LoadedModel, Any]:
    """The target with its tokenizer, and the draft."""
    target, draft = exact_pair(LAYERS, NOISE, vocab_size=len(byte_tokenizer()), **changes)
    with torch.no_grad():
        for model in (target, draft):
            model.lm_head.weight.mul_(SHARPNESS)
            attention = model.model.layers[0].self_attn  # else what stands before the last token hardly matters
            for name, factor in ATTENTION.items():
                getattr(attention, name).weight.mul_(factor)
    return LoadedModel("tiny", target.to(dtype), byte_tokenizer()), draft.to(dtype)


# acceptance of sampled drafts is 60 to 70 % with these, and the target's entropy about 2 nats
SHARPNESS, NOISE = 0.4, 0.3
ATTENTION = {"q_proj": 4.0, "k_proj": 4.0, "o_proj": 4.0}
