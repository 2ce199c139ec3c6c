"""The user's cache: taken over at the start of a generation, given back as plain decoding would leave it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import compat
from .cache import fill
from .forward import RowModel
from .rows import Rows


class Handover:
    """A cache between the user and one generation.

    Args:
        target: The target with its own cache.
        rows: The texts.
        cache: What the user passed, or `None`.
        mask: Attention mask of what is in the cache and in the prompts, `[batch, length]`, or `None` for all ones.
        wanted: Whether the keys and values are wanted at the end.
    """

    def __init__(self, target: RowModel, rows: Rows, cache: Any, mask: Tensor | None, wanted: bool) -> None:
        self.target, self.rows, self.cache, self.mask = target, rows, cache, mask
        self.wanted = wanted or compat.is_users_cache(cache)
        self.finished: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.unpassed = 0  # tokens in the user's cache that were not passed again

    def take_over(self, seen: int) -> list[list[int]]:
        """Copy what the user's cache holds.

        Args:
            seen: Tokens of a row that cache and prompt hold together.

        Returns:
            The tokens of each row that are still to be read.
        """
        texts = self.rows.texts
        past = compat.seq_length(self.cache) if self.cache is not None else 0
        if not past:
            return texts
        keep = torch.ones(len(texts), past, dtype=torch.bool, device="cpu")
        self.target.cache.load(self.cache, keep if self.mask is None else self.mask[:, :past].bool().cpu())
        if seen != self.rows.padded_prompt:  # only the new tokens were passed
            self.unpassed = past
            return texts
        # the last token is read again if the cache already holds it: its logits are needed
        known = [min(count, len(text) - 1) for count, text in zip(self.target.cache.lengths, texts, strict=True)]
        self.target.cache.roll_back(known)
        return [text[count:] for text, count in zip(texts, known, strict=True)]

    def let_go(self, index: int, row: int) -> None:
        """Keep a finished row's keys and values, before it leaves the batch."""
        if self.wanted:
            self.finished[row] = self.target.cache.take(index)

    def give_back(self, model: Any) -> Any:
        """The user's cache, or a new one, filled as plain decoding would have; or untouched if it isn't wanted.

        A row that ended early reads its last token and padding, as in plain decoding.
        """
        cache = self.cache if self.cache is not None else compat.new_cache(model)
        if not self.wanted:
            return cache
        rows, batch = self.rows, range(len(self.rows.texts))
        longest = max(map(rows.num_new, batch))
        prompt = torch.ones(len(batch), self.unpassed + rows.padded_prompt, device="cpu")
        prompt = prompt if self.mask is None else self.mask.cpu()
        slots = [row.nonzero()[:, 0] for row in torch.nn.functional.pad(prompt, (0, longest - 1), value=1)]
        ends = [[text[-1], *[rows.pad_token] * longest] for text in rows.texts]
        unread = [ends[row][: longest - rows.num_new(row)] for row in batch]
        taken = self.target.read_on([self.finished[row] for row in batch], unread)
        fill(cache, taken, slots, self.unpassed + rows.padded_prompt + longest - 1)
        return cache
