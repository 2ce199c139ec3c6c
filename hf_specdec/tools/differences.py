"""Where two texts of one model first differ, and whether rounding explains it.

A forward over a block of tokens rounds a little differently from one token after the other, so that in half precision
two texts may part where the model is undecided. Anything larger is a bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


HALF_PRECISION = (torch.bfloat16, torch.float16)
# The gap below which two logits count as a near-tie, at least; rounding in a block of tokens differs from one by one.
NEAR_TIE_FLOOR_HALF = 0.05
NEAR_TIE_FLOOR_FLOAT32 = 1e-4


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where the two sides differ.

    Attributes:
        index: Index of the token, the prompt not counted.
        token_off: The token without speculation; `None` if that side had ended.
        token_on: The token with speculation; `None` if that side had ended.
        gap: The target's highest logit there minus that of `token_on`, from one plain forward over the text without
            speculation; 0 where that forward agrees with speculation, `None` if one side had ended or it is no finite
            number.
        band: Largest gap that rounding explains: max(0.05, 2 units in the last place of the highest logit), 0.05
            being 0.0001 in float32.
        apart: How far the logits of the two tokens are apart in that forward; `None` as above.
    """

    index: int
    token_off: int | None
    token_on: int | None
    gap: float | None
    band: float
    apart: float | None = None

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap is not None and self.gap <= self.band

    @property
    def kind(self) -> str:
        """`"tie"` (both logits are the same number), `"near-tie"` (rounding explains it) or `"mismatch"`."""
        if not self.near_tie:
            return "mismatch"
        return "tie" if self.apart == 0 else "near-tie"

    def __str__(self) -> str:
        if self.token_off is None or self.token_on is None:
            return f"one side ended at token {self.index}"
        if self.gap is None:
            return f"not a near-tie at token {self.index}, the logits there aren't finite"
        kind = "near-tie" if self.near_tie else "not a near-tie"
        return f"{kind} at token {self.index}, gap {self.gap:.2g}"


def find_difference(model: Any, prompt_ids: torch.Tensor, off: Sequence[int], on: Sequence[int]) -> Difference | None:
    """Return the first difference between two continuations of a prompt, `None` if they are equal.

    Args:
        model: The target.
        prompt_ids: The prompt, `[1, T]`.
        off: Tokens decoded without speculation.
        on: Tokens decoded with it.
    """

    def scores_at(index: int) -> Tensor:
        prefix = torch.cat([prompt_ids, prompt_ids.new_tensor([list(off[:index])])], dim=1)
        with torch.inference_mode():
            scores: Tensor = model(prefix).logits[0, -1].float()
        return scores

    return first_difference(model, off, on, scores_at)


def first_difference(
    model: Any, off: Sequence[int], on: Sequence[int], scores_at: Callable[[int], Tensor]
) -> Difference | None:
    """Return the first difference between two continuations, `None` if they are equal.

    Args:
        model: The target.
        off: Tokens decoded without speculation.
        on: Tokens decoded with it.
        scores_at: Gives the target's scores behind which the token of `off` at an index was chosen, float32 `[vocabulary]`.
    """
    if list(off) == list(on):
        return None
    shorter = min(len(off), len(on))
    index = next((i for i in range(shorter) if off[i] != on[i]), shorter)
    token_off, token_on = (text[index] if index < len(text) else None for text in (off, on))
    if token_off is None or token_on is None:
        return Difference(index, token_off, token_on, gap=None, band=near_tie_band(model, 0.0))
    scores = scores_at(index)
    highest = scores.max().item()
    score_off, score_on = (
        scores[token].item() if 0 <= token < len(scores) else -math.inf for token in (token_off, token_on)
    )
    gap, apart = (each if math.isfinite(each) else None for each in (highest - score_on, abs(score_off - score_on)))
    return Difference(index, token_off, token_on, gap, near_tie_band(model, highest), apart)


def near_tie_band(model: Any, highest_logit: float) -> float:
    """Return the gap that rounding in the model's dtype explains next to a logit of this size."""
    floor = NEAR_TIE_FLOOR_HALF if model.dtype in HALF_PRECISION else NEAR_TIE_FLOOR_FLOAT32
    if not math.isfinite(highest_logit):
        return floor
    unit = torch.finfo(model.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(highest_logit), 1e-6)))
    return max(floor, 2 * unit)
