"""The texts of a batch: which rows are live, what each has said, and how far it may go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Rows:
    """Every row's tokens, on the host for drafters and stopping, on the device for logits processors.

    Attributes:
        texts: Tokens of each row of the batch, padding left out: prompt, then output.
        prompt_lengths: How many of them are prompt.
        live: Rows that are still generating, by index in the batch.
        max_new_tokens: Most tokens a row may emit.
        padded_prompt: Length of the padded prompts.
    """

    def __init__(self, input_ids: Tensor, keep: Tensor | None, max_new_tokens: int, pad_token: int) -> None:
        """Read the prompts.

        Args:
            input_ids: Padded prompts, int64 `[batch, length]`.
            keep: Which of them are real tokens, bool `[batch, length]`; `None` for all.
            max_new_tokens: Most tokens a row may emit.
            pad_token: What to fill finished rows with.
        """
        self._padded = input_ids
        self._unwritten: list[tuple[int, int, Sequence[int]]] = []  # row, slot, tokens
        self.padded_prompt = input_ids.shape[1]
        self.pad_token = pad_token
        host = input_ids.cpu()
        kept = torch.ones_like(host, dtype=torch.bool) if keep is None else keep.cpu()
        self.texts: list[list[int]] = [row[mask].tolist() for row, mask in zip(host, kept, strict=True)]
        self.prompt_lengths = [len(text) for text in self.texts]
        self.live = list(range(len(self.texts)))
        self.max_new_tokens = max_new_tokens

    def num_new(self, row: int) -> int:
        """Tokens that a row has emitted."""
        return len(self.texts[row]) - self.prompt_lengths[row]

    def output(self, row: int) -> list[int]:
        """The tokens that a row has emitted."""
        return self.texts[row][self.prompt_lengths[row] :]

    def end(self, row: int) -> int:
        """Where a row ends in the padded layout."""
        return self.padded_prompt + self.num_new(row)

    def draft_room(self) -> int:
        """Most draft tokens that any live row could still use: one less than it may emit."""
        return max((self.max_new_tokens - self.num_new(row) for row in self.live), default=0) - 1

    @property
    def padded(self) -> Tensor:
        """All rows as Transformers lays them out, left padding included: int64 `[batch, ≥ length]`."""
        if self._unwritten:
            rows = [row for row, _, tokens in self._unwritten for _ in tokens]
            slots = [slot + offset for _, slot, tokens in self._unwritten for offset in range(len(tokens))]
            values = [token for _, _, tokens in self._unwritten for token in tokens]
            self._unwritten = []
            self._reserve(max(slots) + 1)
            index = torch.tensor([rows, slots, values], device=self._padded.device)
            self._padded[index[0], index[1]] = index[2]
        return self._padded

    def write(self, row: int, tokens: Sequence[int]) -> None:
        """Append emitted tokens to a row; the device hears of them when `padded` is next read."""
        self._unwritten.append((row, self.end(row), tokens))
        self.texts[row].extend(tokens)

    def lay_draft(self, draft: Tensor) -> None:
        """Put draft tokens `[live, k]` behind the live rows in `padded`; what is emitted later overwrites them."""
        padded = self.padded
        ends = torch.tensor([self.end(row) for row in self.live], device=padded.device)
        self._reserve(max(map(self.end, self.live)) + draft.shape[1])
        rows = torch.tensor(self.live, device=padded.device)[:, None]
        slots = ends[:, None] + torch.arange(draft.shape[1], device=padded.device)
        self._padded[rows, slots] = draft.to(padded.device)

    def sequences(self) -> Tensor:
        """The batch as `generate` returns it: prompts, then outputs, right-padded to the longest, int64."""
        longest = max(self.num_new(row) for row in range(len(self.texts)))
        result = self.padded.new_full((len(self.texts), self.padded_prompt + longest), self.pad_token)
        common = min(result.shape[1], self.padded.shape[1])
        result[:, :common] = self.padded[:, :common]
        ends = torch.tensor([self.end(row) for row in range(len(self.texts))], device=result.device)
        behind = torch.arange(result.shape[1], device=result.device) >= ends[:, None]
        return result.masked_fill(behind, self.pad_token)

    def _reserve(self, length: int) -> None:
        """Make room for `length` slots a row; the prompts that the user passed are never written to."""
        old = self._padded
        if length > old.shape[1]:
            self._padded = old.new_full((old.shape[0], max(length, 2 * old.shape[1])), self.pad_token)
            self._padded[:, : old.shape[1]] = old
