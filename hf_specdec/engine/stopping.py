"""Stopping inside a block: cut each row where one-by-one decoding would have stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from .ranks import ALONE, Ranks
from .rows import Rows


class Stopper:
    """The stopping criteria of one generation, seen token by token.

    End-of-text tokens and the length are checked on the host; every other criterion is called with each prefix. What it says
    may depend on the time, so of several ranks the leader's is believed.
    """

    def __init__(self, criteria: Sequence[Any], end_tokens: Sequence[int], ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.end_tokens = frozenset(end_tokens)
        self.others = [each for each in criteria if not isinstance(each, (EosTokenCriteria, MaxLengthCriteria))]

    def emit(self, rows: Rows, row: int, tokens: Sequence[int], scores: tuple[Tensor, ...] | None = None) -> bool:
        """Append tokens to a row up to the first stop.

        Args:
            rows: The texts.
            row: Row, by index in the batch.
            tokens: Its new tokens.
            scores: Scores `[1, vocabulary]` of every token of its output, the new ones included, for criteria that
                read them.

        Returns:
            Whether the row has stopped.
        """
        if not self.others:
            kept, stopped = self._cut(tokens, rows.max_new_tokens - rows.num_new(row))
            rows.write(row, kept)
            return stopped
        for token in tokens:
            rows.write(row, [token])
            stopped = token in self.end_tokens or rows.num_new(row) >= rows.max_new_tokens
            # the whole batch at this row's length, so that a criterion may know its rows
            prefix = rows.padded[:, : rows.end(row)]
            seen = scores[: rows.num_new(row)] if scores is not None else None
            # every criterion is called, as in a StoppingCriteriaList
            verdicts = [_says_stop(each, prefix, seen, row) for each in self.others]
            if stopped or self.ranks.same(any(verdicts)):
                return True
        return False

    def _cut(self, tokens: Sequence[int], room: int) -> tuple[Sequence[int], bool]:
        for index, token in enumerate(tokens[:room]):
            if token in self.end_tokens:
                return tokens[: index + 1], True
        return tokens[:room], len(tokens) >= room


def _says_stop(criterion: Any, prefix: Tensor, scores: tuple[Tensor, ...] | None, row: int) -> bool:
    verdict = criterion(prefix, scores)
    return bool(verdict[row]) if hasattr(verdict, "shape") and verdict.dim() else bool(verdict)
