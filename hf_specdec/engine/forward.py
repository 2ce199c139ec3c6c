"""One forward of a causal language model over rows of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import compat
from .cache import RowCache, layer_count, upload
from .fast import FastForward
from .lean import LeanForward
from .masks import Branches, Mask, Masks
from .products import Way
from .ranks import ALONE, Ranks
from .tree import Tree


class LogitsOnly(NamedTuple):
    """Output of a lean forward."""

    logits: Tensor


class Prefilled(NamedTuple):
    """What a prefill gives.

    Attributes:
        output: The model's output of the last forward.
        logits: Those behind the last token of each row that has new ones, `[rows, vocabulary]`.
        successors: The most likely next tokens behind every token, int64 `[rows, longest, n]`, if they were asked for.
    """

    output: Any
    logits: Tensor
    successors: Tensor | None = None


def unsupported_reason(model: Any) -> str | None:
    """Why a model can't run on a `RowCache`, or `None` if it can."""
    return compat.row_forward_reason(model) or layer_count(compat.text_config(model))[1]


class RowModel:
    """A causal language model together with the `RowCache` of one generation.

    Attributes:
        model: The model; it is called, never changed.
        cache: Its keys and values, one length per row.
        lean: Its lean forward, or `None` where the model's own runs.
        fast: Forwards of fixed shape, captured or compiled; `None` where every forward runs eagerly.
        max_positions: The longest text the model has positions for, or `None`.
        ranks: The processes that the model is spread over; its own forward is what talks to the others.
    """

    def __init__(
        self, model: Any, rows: int, reserve: int, compile: bool = False, most: int | None = None, ranks: Ranks = ALONE
    ) -> None:
        self.model, self.ranks = model, ranks
        self.device = compat.input_device(model)
        self.cache = RowCache(layer_count(compat.text_config(model))[0], rows, reserve)
        self.cache.offsets.most = most
        self.max_positions = compat.max_positions(model)
        self.masks = Masks(model)
        self.lean = LeanForward.of(model) if ranks.alone else None
        self.fast = FastForward.of(model, RowModel.at if compile else None, shared=not ranks.alone)
        self._ladder = torch.arange(rows, device=self.device)
        self._keeps_logits = "logits_to_keep" in compat.forward_parameters(model)

    def forward(
        self, tokens: Tensor, counts: Sequence[int], keep: Tensor | int = 0, tree: Tree | None = None, **options: Any
    ) -> Any:
        """Run one block of new tokens and write its keys and values; the caller commits them.

        Args:
            tokens: New tokens, int64 `[rows, n]`, right-padded.
            counts: Real tokens of each row; those behind them are dummies whose results mean nothing.
            keep: Positions of the block whose logits are wanted: an int64 index `[m]`, or how many of the last; 0 for
                all of them.
            tree: The shape of the block, if it is more than a chain.
            **options: Passed to the model, such as `output_hidden_states=True`.

        Returns:
            The model's output; its logits are `[rows, m or n, vocabulary]`.
        """
        rows, width = tokens.shape
        if self.fast is not None and not options:
            logits = self.fast.block(self, tokens, tree)
            if logits is not None:
                return LogitsOnly(_kept(logits, keep))
        if len(self._ladder) < max(self.cache.lengths) + max(rows, width):
            self._ladder = torch.arange(2 * (max(self.cache.lengths) + max(rows, width)), device=self.device)
        slots = self.cache.begin(self._ladder, width)
        positions = slots.expand(rows, width)
        if tree is not None:
            positions = slots[:, :1] + tree.depth
        elif min(counts) < width:
            # a dummy must not ask for a position the model doesn't have
            last = slots[:, :1] + upload(counts, self.device)[:, None] - 1
            positions = torch.minimum(positions, last.clamp(min=0))
        branches = None if tree is None else Branches(tree.depth, tree.ancestors)
        mask = self.masks(self._ladder[: self.cache.stop], slots, self.cache.uniform, branches)
        return self._run(tokens, positions, mask, self.cache, keep, options)

    def at(
        self, tokens: Tensor, lengths: Tensor, cache: RowCache, ladder: Tensor,
        branches: Branches | None = None, way: Way | None = None,
    ) -> Tensor:  # fmt: skip
        """The same forward as a function of device tensors and of shapes alone, so that it can be captured or compiled.

        Args:
            tokens: New tokens, int64 `[rows, n]`, dummies behind them.
            lengths: Committed slots of each row, int64 `[rows]`.
            cache: Where keys and values go.
            ladder: 0, 1, 2 … for every slot that a token may look at, int64; those behind its own are masked.
            branches: The shape of the block, if it is a tree.
            way: How a lean forward multiplies.

        Returns:
            Logits `[rows, n, vocabulary]`.
        """
        slots = cache.begin_at(ladder, lengths, tokens.shape[1])
        positions = slots if branches is None else slots[:, :1] + branches.depth
        if self.max_positions is not None:
            positions = positions.clamp(max=self.max_positions - 1)  # dummies
        mask = self.masks(ladder, slots, None, branches)
        return compat.all_token_logits(self._run(tokens, positions, mask, cache, 0, {}, way))

    def _run(
        self, tokens: Tensor, positions: Tensor, mask: Mask, cache: RowCache, keep: Tensor | int,
        options: dict[str, Any], way: Way | None = None,
    ) -> Any:  # fmt: skip
        """The lean forward, or the model's own."""
        if self.lean is not None and not options:
            return LogitsOnly(self.lean(tokens, positions, mask, cache, keep, way))
        if self._keeps_logits:
            options["logits_to_keep"] = keep
        self.ranks.announce()
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{compat.CACHE: cache},
            **options,
        )
        if not self._keeps_logits:
            output.logits = _kept(output.logits, keep)
        return output

    def dummy(self) -> None:
        """A forward that means nothing, for the ranks that need one."""
        self.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)

    def prefill(
        self, rows: Sequence[Sequence[int]], chunk: int | None = None, successors: int = 0, **options: Any
    ) -> Prefilled:
        """Run and commit each row's new tokens, as many as the row has.

        Args:
            rows: New tokens of each row; rows may differ in length.
            chunk: Most tokens a forward, or `None` for one forward.
            successors: How many of the most likely next tokens to tell behind every token.
            **options: Passed to the model.
        """
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        block = upload([[*row, *[0] * (longest - len(row))] for row in rows], self.device)
        if min(lengths) == longest and not chunk and not successors:
            output = self.forward(block, lengths, 1, **options)
            self.cache.commit(lengths)
            return Prefilled(output, compat.all_token_logits(output)[:, -1])
        step = chunk or longest
        found: list[Tensor | None] = [None] * len(rows)
        tops = []
        for first in range(0, longest, step):
            piece = block[:, first : first + step]
            counts = [min(max(length - first, 0), step) for length in lengths]
            ends = sorted(
                {count - 1 for count, length in zip(counts, lengths, strict=True) if 0 < length - first <= step}
            )
            keep = 0 if successors else upload(ends or [0], self.device)
            output = self.forward(piece, counts, keep, **options)
            self.cache.commit(counts)
            logits = compat.all_token_logits(output)
            if successors:
                tops.append(logits.topk(min(successors, logits.shape[-1])).indices)
            for index, length in enumerate(lengths):
                if 0 < length - first <= step:
                    last = counts[index] - 1
                    found[index] = logits[index, last if successors else ends.index(last)]
        behind = torch.stack([row for row in found if row is not None])
        return Prefilled(output, behind, torch.cat(tops, 1) if successors else None)

    def read_on(
        self, rows: Sequence[list[tuple[Tensor, Tensor]]], tokens: Sequence[Sequence[int]]
    ) -> Sequence[list[tuple[Tensor, Tensor]]]:
        """Let rows that the cache gave away (`RowCache.take`) read more tokens, some or none each; gives them back."""
        if not any(tokens):
            return rows
        self.cache.put(rows)
        self.prefill(tokens)
        return [self.cache.take(row) for row in range(len(rows))]


def _kept(logits: Tensor, keep: Tensor | int) -> Tensor:
    """The wanted positions: an index, or how many of the last."""
    return logits[:, keep if isinstance(keep, Tensor) else slice(-keep, None)]
