"""Scores, logits, hidden states and attentions, kept so that the output has plain decoding's lengths and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Records:
    """What `return_dict_in_generate` asks for, one entry a generated token.

    Attributes:
        options: What to ask of every forward.
    """

    def __init__(
        self, generation_config: Any, places: Sequence[Tensor], padded_prompt: int, windows: list[int | None]
    ) -> None:
        """Choose what to keep.

        Args:
            generation_config: The call's settings.
            places: Where each row's tokens stand in the padded prompt, int64 `[length]`.
            padded_prompt: Length of the padded prompts.
            windows: Sliding window of each layer, `None` for full attention.
        """
        wanted = generation_config.return_dict_in_generate
        self.keeps_scores = bool(wanted and generation_config.output_scores)
        self.keeps_logits = bool(wanted and generation_config.output_logits)
        self.keeps_hidden = bool(wanted and generation_config.output_hidden_states)
        self.keeps_attentions = bool(wanted and generation_config.output_attentions)
        self.keeps_anything = self.keeps_scores or self.keeps_logits or self.keeps_hidden or self.keeps_attentions
        self.options: dict[str, bool] = {}
        if self.keeps_hidden:
            self.options["output_hidden_states"] = True
        if self.keeps_attentions:
            self.options["output_attentions"] = True
        self.places, self.padded_prompt, self.windows = list(places), padded_prompt, windows
        batch = range(len(self.places))
        self.row_scores: list[list[Tensor]] = [[] for _ in batch]
        self.row_logits: list[list[Tensor]] = [[] for _ in batch]
        self.row_hidden: list[list[tuple[Tensor, ...]]] = [[] for _ in batch]
        self.row_attentions: list[list[tuple[Tensor, ...]]] = [[] for _ in batch]
        self.first: Any = None

    def keep_prefill(self, output: Any, lengths: Sequence[int]) -> None:
        """Keep the prompt's hidden states and attentions, moved from right to left padding."""
        if self.options:
            self.first = output
            self.lengths = list(lengths)

    def keep(
        self, index: int, row: int, tokens: int, scores: Tensor, logits: Tensor, output: Any, length: int
    ) -> None:
        """Keep what a round computed for one row.

        Args:
            index: The row's place among the live rows.
            row: Its index in the batch.
            tokens: Tokens it emitted.
            scores: Processed scores `[live, k + 1, vocabulary]`.
            logits: Raw logits of the same shape.
            output: The forward's output; `None` for the prefill's.
            length: Slots in the row's cache before the round.
        """
        if self.keeps_scores:
            self.row_scores[row] += list(scores[index, :tokens].clone())
        if self.keeps_logits:
            self.row_logits[row] += list(logits[index, :tokens].to(torch.float32, copy=True))
        if output is None:
            return
        for position in range(tokens):
            if self.keeps_hidden:
                self.row_hidden[row].append(tuple(layer[index, position].clone() for layer in output.hidden_states))
            if self.keeps_attentions:
                seen = length + position + 1
                self.row_attentions[row].append(
                    tuple(layer[index, :, position, :seen].clone() for layer in output.attentions)
                )

    def drop_extra(self, row: int, tokens: int) -> None:
        """Forget what was kept of a row behind its first `tokens` tokens."""
        del self.row_scores[row][tokens:], self.row_logits[row][tokens:]
        del self.row_hidden[row][max(tokens - 1, 0) :], self.row_attentions[row][max(tokens - 1, 0) :]

    def fields(self, pad_token: int) -> dict[str, Any]:
        """The fields of the output; a finished row's later entries say "padding" with certainty, or are zero."""
        fields: dict[str, Any] = {}
        if self.keeps_scores:
            fields["scores"] = self._stacked(self.row_scores, pad_token)
        if self.keeps_logits:
            fields["logits"] = self._stacked(self.row_logits, pad_token)
        if self.keeps_hidden:
            later = _by_token(self.row_hidden, lambda layers, row, token, n: [each[None] for each in layers])
            fields["hidden_states"] = (self._first_hidden(), *later)
        if self.keeps_attentions:
            fields["attentions"] = (self._first_attentions(), *_by_token(self.row_attentions, self._lay_attention))
        return fields

    def _stacked(self, rows: list[list[Tensor]], pad_token: int) -> tuple[Tensor, ...]:
        certain = torch.full_like(rows[0][0], float("-inf"))
        certain[pad_token] = 0.0
        longest = max(map(len, rows))
        return tuple(
            torch.stack([row[token] if token < len(row) else certain for row in rows]) for token in range(longest)
        )

    def _first_hidden(self) -> tuple[Tensor, ...]:
        laid = []
        for layer in self.first.hidden_states:
            whole = layer.new_zeros(layer.shape[0], self.padded_prompt, layer.shape[2])
            for row, (places, length) in enumerate(zip(self.places, self.lengths, strict=True)):
                whole[row, places.to(layer.device)] = layer[row, :length]
            laid.append(whole)
        return tuple(laid)

    def _first_attentions(self) -> tuple[Tensor, ...]:
        laid = []
        for layer in self.first.attentions:
            whole = layer.new_zeros(layer.shape[0], layer.shape[1], self.padded_prompt, self.padded_prompt)
            for row, (places, length) in enumerate(zip(self.places, self.lengths, strict=True)):
                at = places.to(layer.device)
                whole[row, :, at[:, None], at] = layer[row, :, :length, :length]
            laid.append(whole)
        return tuple(laid)

    def _lay_attention(self, layers: tuple[Tensor, ...], row: int, token: int, n: int) -> list[Tensor]:
        """One token's attentions over the slots that Transformers' cache would hold, `[heads, 1, slots]` a layer."""
        laid: list[Tensor] = []
        if not layers:  # sdpa and flash attention give none, and plain decoding says so with an empty tuple
            return laid
        new = torch.arange(self.padded_prompt, self.padded_prompt + token + 1)
        places = torch.cat([self.places[row], new])
        for layer, window in zip(layers, self.windows, strict=True):
            whole = layer.new_zeros(layer.shape[0], self.padded_prompt + token + 1)
            whole[:, places.to(layer.device)] = layer
            laid.append((whole if window is None else whole[:, -window:])[:, None])
        return laid


def _by_token(rows: list[list[tuple[Tensor, ...]]], lay: Any) -> list[tuple[Tensor, ...]]:
    """Turn per-row lists of per-layer tensors into one tuple of batched layers a token; ended rows are zero."""
    tokens: list[tuple[Tensor, ...]] = []
    for token in range(max(map(len, rows))):
        pieces = [
            lay(row[token], index, token, len(row)) if token < len(row) else None for index, row in enumerate(rows)
        ]
        model = next(piece for piece in pieces if piece is not None)
        filled = [piece if piece is not None else [torch.zeros_like(each) for each in model] for piece in pieces]
        tokens.append(tuple(torch.stack(layer) for layer in zip(*filled, strict=True)))
    return tokens
