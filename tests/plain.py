"""What plain `generate` says, to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hf_specdec

from .tiny import Oracle


def options(**changes: Any) -> dict[str, Any]:
    """Greedy decoding of 24 tokens; the tiny models know no padding token."""
    return {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0} | changes


def new_tokens(output: Tensor, prompts: dict[str, Tensor]) -> list[list[int]]:
    """What each row of `generate`'s output says behind its prompt."""
    return output[:, prompts["input_ids"].shape[1] :].tolist()


def plain_texts(model: Any, prompts: dict[str, Tensor], **changes: Any) -> list[list[int]]:
    """New tokens of plain greedy decoding, row by row: what an `Oracle` knows."""
    return new_tokens(model.generate(**prompts, **options(**changes)), prompts)


def make_drafter(name: str, texts: list[list[int]], draft: Any = None) -> Any:
    """A `speculative=` argument by name."""
    if name.startswith("oracle"):
        return Oracle(texts, float(name.split()[1]))
    if name == "draft_model fixed":
        return hf_specdec.SpecConfig(
            drafter="draft_model", draft_model=draft, num_draft_tokens=4, draft_length="fixed"
        )
    if name in ("draft_model", "hybrid"):
        return hf_specdec.SpecConfig(drafter=name, draft_model=draft)
    return name


def ends_apart(texts: list[list[int]], earliest: int = 2) -> list[int]:
    """End tokens that stop the rows of a batch at different steps, each after `earliest` tokens at least."""
    firsts: list[dict[int, int]] = []
    for text in texts:
        first: dict[int, int] = {}
        for place, token in enumerate(text):
            first.setdefault(token, place)
        firsts.append(first)
    chosen: list[int] = []
    for row, first in enumerate(firsts):
        fitting = [
            token
            for token, place in sorted(first.items(), key=lambda pair: pair[1])
            if place >= earliest + 3 * row and all(other.get(token, earliest) >= earliest for other in firsts)
        ]
        if fitting:
            chosen.append(fitting[0])
    return chosen


def stops(texts: list[list[int]], ends: list[int]) -> list[int]:
    """How many tokens each row emits if these tokens end it."""
    return [next((i + 1 for i, token in enumerate(text) if token in ends), len(text)) for text in texts]


def assert_sound(stats: hf_specdec.SpecStats, emitted: int | None = None) -> None:
    """What holds for the statistics of any generation."""
    assert stats.num_accepted_draft_tokens <= stats.num_draft_tokens
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps
    assert sum(n * count for n, count in enumerate(stats.acceptance_histogram)) == stats.num_accepted_draft_tokens
    if stats.rows:  # none where the call was decoded plainly
        assert sum(row.num_emitted_tokens for row in stats.rows) == stats.num_emitted_tokens
    if emitted is not None:
        assert stats.num_emitted_tokens == emitted


def same_cache(one: Any, other: Any, tolerance: float = 2e-5) -> None:
    """Two Transformers caches hold the same keys and values, layer by layer."""
    assert len(one.layers) == len(other.layers)
    for layer, expected in zip(one.layers, other.layers, strict=True):
        assert layer.get_seq_length() == expected.get_seq_length()
        assert layer.keys.shape == expected.keys.shape
        torch.testing.assert_close(layer.keys, expected.keys, atol=tolerance, rtol=1e-4)
        torch.testing.assert_close(layer.values, expected.values, atol=tolerance, rtol=1e-4)
