"""Attention masks of a block of new tokens: what each token sees of its row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import compat


Mask = Tensor | Mapping[str | None, Tensor | None] | None


class Branches(NamedTuple):
    """The shape of a block that is a tree.

    Attributes:
        depth: Tokens between the root and each block index, int64 `[rows, n]`.
        ancestors: Which block indices each block index sees, itself included: bool `[rows, n, n]`.
    """

    depth: Tensor
    ancestors: Tensor


class Masks:
    """The masks that a model wants, by layer type.

    Attributes:
        windows: Layer type (or `None` for one mask for all) → window, `None` for full attention.
        eager: Whether the attention is Transformers' `eager` one.
        dtype: Of the masks.
    """

    def __init__(self, model: Any) -> None:
        self.windows = compat.mask_windows(model)
        self.eager = compat.attention_implementation(model) == "eager"
        self.dtype: torch.dtype = model.dtype

    def __call__(self, keys: Tensor, slots: Tensor, uniform: int | None, branches: Branches | None) -> Mask:
        """Masks `[rows, 1, n, stop]`: a token sees the slots of its row up to its own, or its ancestors.

        Args:
            keys: All slots that there are: 0, 1, 2 …, int64 `[stop]`.
            slots: The slot of every new token, int64 `[rows, n]`, or `[1, n]` where all rows are equally long.
            uniform: Slots before the block, where every row has as many; else `None`.
            branches: The shape of the block, if it is a tree.
        """
        masks = {
            kind: self._chain(keys, slots, uniform, window)
            if branches is None
            else self._tree(keys, slots, branches, window)
            for kind, window in self.windows.items()
        }
        return masks.get(None, masks)

    def _chain(self, keys: Tensor, slots: Tensor, uniform: int | None, window: int | None) -> Tensor | None:
        windowed = window is not None and len(keys) > window
        if not windowed and uniform is not None and (slots.shape[1] == 1 or (uniform == 0 and not self.eager)):
            return None  # every slot is visible, or the attention kernel's own causal mask is right
        own = slots[:, None, :, None]
        hidden = keys > own
        if window is not None and windowed:
            hidden |= keys <= own - window
        return self._additive(hidden)

    def _tree(self, keys: Tensor, slots: Tensor, branches: Branches, window: int | None) -> Tensor:
        """A token sees what was committed, and its ancestors in the block; windows count positions, not slots."""
        depth, ancestors = branches
        rows, width = depth.shape
        start = slots[:, :1].expand(rows, 1)
        inside = keys - start  # index in the block, negative for committed slots; [rows, stop]
        index = inside.clamp(0, width - 1)
        kin = ancestors.gather(2, index[:, None].expand(rows, width, -1))
        visible = (inside < 0)[:, None] | (kin & (inside < width)[:, None])
        if window is not None and len(keys) > window:
            positions = torch.where(inside < 0, keys, start + depth.gather(1, index))
            visible &= positions[:, None] > (start + depth)[..., None] - window
        return self._additive(~visible[:, None])

    def _additive(self, hidden: Tensor) -> Tensor:
        """A mask to add, for both implementations: sdpa would turn a boolean one into this in every layer."""
        return torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device).masked_fill(
            hidden, torch.finfo(self.dtype).min if self.eager else float("-inf")
        )
