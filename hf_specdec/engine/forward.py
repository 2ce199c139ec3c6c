"""One forward of a causal language model over rows of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import compat
from .cache import RowCache, layer_count


def unsupported_reason(model: Any) -> str | None:
    """Why a model can't run on a `RowCache`, or `None` if it can."""
    return compat.row_forward_reason(model) or layer_count(compat.text_config(model))[1]


class RowModel:
    """A causal language model together with the `RowCache` of one generation.

    Attributes:
        model: The model; it is called, never changed.
        cache: Its keys and values, one length per row.
        max_positions: The longest text the model has positions for, or `None`.
    """

    def __init__(self, model: Any, rows: int, reserve: int) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.cache = RowCache(layer_count(compat.text_config(model))[0], rows, reserve)
        self.max_positions = compat.max_positions(model)
        self._windows = compat.mask_windows(model)
        self._eager = compat.attention_implementation(model) == "eager"
        self._keeps_logits = "logits_to_keep" in compat.forward_parameters(model)

    def forward(self, tokens: Tensor, counts: Sequence[int], keep: Tensor | int = 0, **options: Any) -> Any:
        """Run one block of new tokens and write its keys and values; the caller commits them.

        Args:
            tokens: New tokens, int64 `[rows, n]`, right-padded.
            counts: Real tokens of each row; those behind them are dummies whose results mean nothing.
            keep: Positions of the block whose logits are wanted: an int64 index `[m]`, or 0 for all of them.
            **options: Passed to the model, such as `output_hidden_states=True`.

        Returns:
            The model's output; its logits are `[rows, m or n, vocabulary]`.
        """
        width = tokens.shape[1]
        starts = self.cache.begin(width, self.device)  # (rows, 1)
        offsets = torch.arange(width, device=self.device)
        positions = starts + offsets
        if min(counts) < width:
            # a dummy must not ask for a position the model doesn't have
            last = starts + torch.tensor(counts, device=self.device)[:, None] - 1
            positions = torch.minimum(positions, last.clamp(min=0))
        if self._keeps_logits:
            options["logits_to_keep"] = keep
        mask = self._mask(starts, starts + offsets)
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{compat.CACHE: self.cache},
            **options,
        )
        if not self._keeps_logits and isinstance(keep, Tensor):
            output.logits = output.logits[:, keep.to(output.logits.device)]
        return output

    def prefill(self, rows: Sequence[Sequence[int]], chunk: int | None = None, **options: Any) -> tuple[Any, Tensor]:
        """Run and commit each row's new tokens, as many as the row has.

        Args:
            rows: New tokens of each row; rows may differ in length.
            chunk: Most tokens a forward, or `None` for one forward.
            **options: Passed to the model.

        Returns:
            The output of the last forward, and the logits behind the last token of each row that has any,
            `[rows, vocabulary]`.
        """
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        block = torch.zeros(len(rows), longest, dtype=torch.long)
        for index, row in enumerate(rows):
            block[index, : len(row)] = torch.as_tensor(row)
        block = block.to(self.device)
        step = chunk or longest
        found: list[Tensor | None] = [None] * len(rows)
        for first in range(0, longest, step):
            piece = block[:, first : first + step]
            counts = [min(max(length - first, 0), step) for length in lengths]
            ends = sorted(
                {count - 1 for count, length in zip(counts, lengths, strict=True) if 0 < length - first <= step}
            )
            keep = torch.tensor(ends or [0], device=self.device)
            output = self.forward(piece, counts, keep, **options)
            self.cache.commit(counts)
            for index, length in enumerate(lengths):
                if 0 < length - first <= step:
                    found[index] = compat.all_token_logits(output)[index, ends.index(counts[index] - 1)]
        return output, torch.stack([logits for logits in found if logits is not None])

    def read_on(
        self, rows: Sequence[list[tuple[Tensor, Tensor]]], tokens: Sequence[Sequence[int]]
    ) -> Sequence[list[tuple[Tensor, Tensor]]]:
        """Let rows that the cache gave away (`RowCache.take`) read more tokens, some or none each; gives them back."""
        if not any(tokens):
            return rows
        self.cache.put(rows)
        self.prefill(tokens)
        return [self.cache.take(row) for row in range(len(rows))]

    def _mask(self, starts: Tensor, slots: Tensor) -> Tensor | dict[str | None, Tensor | None] | None:
        """Masks `[rows, 1, n, stop]` by layer type: a token sees the slots of its row up to its own."""
        masks = {kind: self._one_mask(starts, slots, window) for kind, window in self._windows.items()}
        return masks.get(None, masks)

    def _one_mask(self, starts: Tensor, slots: Tensor, window: int | None) -> Tensor | None:
        stop, width, uniform = self.cache.stop, slots.shape[1], self.cache.uniform
        windowed = window is not None and stop > window
        if not windowed and uniform is not None and (width == 1 or (uniform == 0 and not self._eager)):
            return None  # every slot is visible, or the attention kernel's own causal mask is right
        keys = torch.arange(stop, device=slots.device)
        rows = slots if uniform is None else slots[:1]
        visible = keys <= rows[:, None, :, None]
        if window is not None and windowed:
            visible &= keys > rows[:, None, :, None] - window
        if not self._eager:
            return visible
        dtype = self.model.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=slots.device).masked_fill(
            ~visible, torch.finfo(dtype).min
        )
