"""Logits processors over whole blocks: each position is processed with its own prefix, as in plain decoding."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from .purity import OpaqueState, fingerprint
from .rows import Rows


# read the scores alone: one call for all positions
POSITION_FREE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
    hf.SuppressTokensLogitsProcessor,
)
# read the prefix of the row: one call for all rows and positions whose prefix is equally long
ROW_WISE = (
    hf.NoRepeatNGramLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.SuppressTokensAtBeginLogitsProcessor,
)
# know which row of the batch is which: one call of the whole batch for each prefix length
BATCH_WISE = (
    hf.RepetitionPenaltyLogitsProcessor,
    hf.EncoderRepetitionPenaltyLogitsProcessor,
    hf.EncoderNoRepeatNGramLogitsProcessor,
)


def unsupported_reason(processors: Sequence[Any]) -> str | None:
    """Why these processors can't be called on a draft, or `None`."""
    for processor in processors:
        kind = type(processor)
        if kind in POSITION_FREE or kind in ROW_WISE or kind in BATCH_WISE:
            continue
        if kind.__module__ == hf.__name__ and kind is not hf.PrefixConstrainedLogitsProcessor:
            return f"{kind.__name__} keeps state between calls"
        try:
            fingerprint(processor)
            copy.deepcopy(processor)
        except OpaqueState as hidden:
            return f"the logits processor {kind.__name__} may keep state in a {hidden}"
        except Exception as error:
            return f"the logits processor {kind.__name__} can't be copied ({error})"
    return None


class BlockLogits:
    """The processors of one generation, applied to `[rows, k + 1, vocabulary]` at once.

    Attributes:
        impure: Name of a custom processor that turned out to keep state between calls; then only position 0 of a
            block is right, which is all that plain decoding asks for.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        self.processors = list(processors)
        self.impure: str | None = None
        # custom processors see drafts through a copy, so that their own state follows the real text alone
        self._copies = {
            index: copy.deepcopy(processor)
            for index, processor in enumerate(self.processors)
            if type(processor) not in POSITION_FREE + ROW_WISE + BATCH_WISE
        }

    @property
    def has_custom(self) -> bool:
        """Whether some processor isn't Transformers' own."""
        return bool(self._copies)

    @property
    def needs_prefix(self) -> bool:
        """Whether some processor reads the prefix."""
        return any(type(processor) not in POSITION_FREE for processor in self.processors)

    def __call__(
        self, logits: Tensor, rows: Rows, counts: Sequence[int], first: int = 0, draft_only: bool = False
    ) -> Tensor:
        """Process a block.

        Args:
            logits: Raw logits, `[live, positions, vocabulary]`.
            rows: The texts; where a processor reads prefixes, the draft lies behind each live row (`lay_draft`).
            counts: Draft tokens of each live row; positions behind them are left as they come.
            first: Draft tokens in front of the block's first position.
            draft_only: Leave custom processors out (for a draft, whose distribution is free).

        Returns:
            Scores as plain decoding would have them, float32 `[live, positions, vocabulary]`.
        """
        scores = logits.to(torch.float32)
        if scores is logits:
            scores = scores.clone()
        for index, processor in enumerate(self.processors):
            if type(processor) in POSITION_FREE:
                flat = scores.reshape(-1, scores.shape[-1])
                scores = processor(rows.padded[:1, :1], flat).reshape(scores.shape)
            elif index not in self._copies:
                self._by_length(processor, scores, rows, counts, first, type(processor) in BATCH_WISE)
            elif not draft_only:
                self._custom(index, scores, rows, counts)
        return scores

    def _by_length(
        self, processor: Any, scores: Tensor, rows: Rows, counts: Sequence[int], first: int, whole_batch: bool,
        positions: range | None = None,
    ) -> None:  # fmt: skip
        """Call a processor once for each length of prefix, and write its results into `scores`."""
        groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, (row, count) in enumerate(zip(rows.live, counts, strict=True)):
            for position in positions or range(scores.shape[1]):
                if first + position <= count:
                    groups[rows.end(row) + first + position].append((index, position))
        for length in sorted(groups):
            at, positions_at = [pair[0] for pair in groups[length]], [pair[1] for pair in groups[length]]
            batch_rows = [rows.live[i] for i in at]
            if whole_batch:
                batch = scores.new_zeros(rows.padded.shape[0], scores.shape[-1])
                batch[batch_rows] = scores[at, positions_at]
                scores[at, positions_at] = processor(rows.padded[:, :length], batch)[batch_rows]
            else:
                scores[at, positions_at] = processor(rows.padded[batch_rows, :length], scores[at, positions_at])

    def _custom(self, index: int, scores: Tensor, rows: Rows, counts: Sequence[int]) -> None:
        """Call a custom processor on the real text, and its copy on drafts as long as both show no state."""
        processor = self.processors[index]
        before = fingerprint(processor)
        self._by_length(processor, scores, rows, counts, 0, True, range(1))
        pure = fingerprint(processor) == before
        if pure and scores.shape[1] > 1 and self.impure is None:
            copied = self._copies[index]
            before = fingerprint(copied)
            self._by_length(copied, scores, rows, counts, 0, True, range(1, scores.shape[1]))
            pure = fingerprint(copied) == before
        if not pure and self.impure is None:
            self.impure = type(processor).__name__
