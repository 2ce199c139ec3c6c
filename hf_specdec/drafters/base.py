"""The interface of a drafter: something that guesses the next tokens of every row."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..engine.length import Outlook
from ..engine.logits import BlockLogits
from ..engine.noise import Noise
from ..engine.rows import Rows


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for the live rows.

    Attributes:
        tokens: Draft tokens, int64 `[rows, k]`; what stands behind a row's count is ignored.
        counts: Draft tokens of each row, 0 to k.
        probs: The distribution that each token was sampled from, `[rows, k, vocabulary]`; `None` for a draft that is
            a function of the text alone (lookup, argmax). It must be the one really used, or the output is biased.
        sources: Name of each row's source for the statistics; `None`: the drafter's name.
        parents: The shape of a token tree, on the host: for each row the parent of each of its draft tokens, an
            earlier one's index or -1 for the row's last token. `None`: a chain. Only where `DraftContext.trees` is
            true, and only for deterministic drafts.
        healthy: False where the draft is broken (NaN); bool, no dimensions. It is read with the round's one copy.
        steady: False where more was done than drafting these tokens, such as reading the prompt first: the time it took
            then says nothing about the next draft.
    """

    tokens: Tensor
    counts: Sequence[int]
    probs: Tensor | None = None
    sources: Sequence[str] | None = None
    parents: Sequence[Sequence[int]] | None = None
    healthy: Tensor | None = None
    steady: bool = True

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> Draft:
        """A deterministic draft from one list of tokens a row."""
        counts = [len(row) for row in rows]
        tokens = torch.zeros(len(rows), max(counts, default=0), dtype=torch.long)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.as_tensor(row, dtype=torch.long)
        return cls(tokens, counts)


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may know about the generation it serves.

    Attributes:
        target: The target model.
        rows: The texts; they grow as tokens are emitted.
        device: Where the target's logits are.
        vocabulary: Number of ids in the target's logits.
        end_tokens: Tokens that end a text.
        do_sample: Whether the target samples (else it is greedy).
        logits: The target's logits processors.
        noise: Noise that drafts should share with the target (`verification="coupled"`), or `None`.
        generator: Source of randomness for sampled drafts.
        trees: Whether drafts may be trees: no processor reads the prefix, and no scores or states are recorded.
        pays: Whether one more token of each row's draft pays (`AdaptiveLength.pays`); `None` where the length is fixed.
        compile: Whether a draft model should be compiled (`SpecConfig.compile`).
    """

    target: Any
    rows: Rows
    device: torch.device
    vocabulary: int
    end_tokens: frozenset[int]
    do_sample: bool
    logits: BlockLogits
    noise: Noise | None
    generator: torch.Generator
    trees: bool = False
    pays: Callable[[float, int, int, int, bool], bool] | None = None
    compile: bool = False


@dataclass
class Rate:
    """A discounted chance that starts from a prior.

    Attributes:
        prior: What it is taken for until it is measured.
        weight: How many outcomes the prior counts for.
        discount: How fast old outcomes are forgotten.
    """

    prior: float
    weight: float = 20.0
    discount: float = 0.995
    hits: float = 0.0
    tried: float = 0.0

    def update(self, hit: bool) -> None:
        """Count one outcome."""
        self.hits, self.tried = self.discount * self.hits + hit, self.discount * self.tried + 1

    @property
    def value(self) -> float:
        """The estimate."""
        return (self.hits + self.weight * self.prior) / (self.tried + self.weight)


class Drafter(ABC):
    """Base class of drafters.

    Only `propose` is required. A generation works on a shallow copy of the instance that the user passed, made before
    `start`; so one instance serves many threads if state of one generation is set in `start` and never in `__init__`.

    Whatever a drafter does, the text stays right: a draft is only a guess. If a method raises, the generation warns
    once and goes on without drafts.
    """

    name: ClassVar[str] = "custom"
    num_successors: ClassVar[int] = 0  # how many of the target's most likely tokens `learn` wants at each position

    def start(self, context: DraftContext) -> None:
        """Begin a generation. `context.rows.texts` holds the prompts."""

    def outlook(self, rows: Rows) -> list[Outlook]:
        """What to expect of each live row's next draft."""
        return [Outlook(self.name)] * len(rows.live)

    @abstractmethod
    def propose(self, rows: Rows, length: int) -> Draft:
        """Guess the next tokens of every live row.

        Args:
            rows: The texts: `rows.texts[row]` for `row in rows.live`, prompt and output without padding.
            length: Most tokens to draft.
        """

    def prime(self, prompts: Sequence[Sequence[int]], successors: Sequence[Sequence[Sequence[int]]]) -> None:
        """Hear once, behind `start`, what the target would have said behind every token of the prompts.

        Not called where the logits of all prompt tokens would cost too much (small models with large vocabularies).

        Args:
            prompts: Tokens of each row.
            successors: For each of them the target's `num_successors` most likely next tokens, best first.
        """

    def learn(
        self,
        blocks: Sequence[Sequence[int]],
        successors: Sequence[Sequence[Sequence[int]]],
        said: Sequence[Sequence[int]],
    ) -> None:
        """Hear what the target would have said behind every verified token, rejected ones included.

        Args:
            blocks: For each live row the tokens that were read: the last token, then the draft.
            successors: For each of them the target's `num_successors` most likely next tokens, best first.
            said: For each live row what the target did say: the accepted draft tokens and the one behind them.
        """

    def commit(self, rows: Rows, accepted: Sequence[int]) -> None:
        """Hear after every round how much of its draft each live row accepted; `rows.texts` holds the new tokens."""

    def select(self, keep: Sequence[int]) -> None:
        """Hear that only these of the live rows (by place in `rows.live`) go on."""


def checked(draft: Draft, rows: int, length: int, vocabulary: int, device: torch.device, trees: bool = False) -> Draft:
    """The draft cut to `length`, on `device`, or a clear error if it isn't one for that many rows."""
    if not isinstance(draft, Draft):
        raise TypeError(f"`propose` must return a Draft, got {type(draft).__name__}")
    shape = tuple(draft.tokens.shape)
    if len(shape) != 2 or shape[0] != rows or len(draft.counts) != rows:
        raise ValueError(
            f"a draft for {rows} rows needs tokens [{rows}, k] and {rows} counts, got {shape} and {len(draft.counts)}"
        )
    if draft.tokens.is_floating_point():
        raise ValueError(f"draft tokens must be integers, got {draft.tokens.dtype}")
    if draft.sources is not None and len(draft.sources) != rows:
        raise ValueError(f"a draft for {rows} rows needs {rows} sources, got {len(draft.sources)}")
    whole = [operator.index(count) for count in draft.counts]
    if any(not 0 <= count <= shape[1] for count in whole):
        raise ValueError(f"draft counts must be from 0 to {shape[1]}, got {list(draft.counts)}")
    if draft.probs is not None and tuple(draft.probs.shape) != (*shape, vocabulary):
        raise ValueError(
            f"draft probabilities must be [{rows}, {shape[1]}, {vocabulary}], got {tuple(draft.probs.shape)}"
        )
    parents = None
    if draft.parents is not None:
        parents = [[operator.index(parent) for parent in row] for row in draft.parents]
        _check_tree(parents, draft.probs is not None, rows, whole, trees)
    counts = [min(count, length) for count in whole]
    probs = None if draft.probs is None else draft.probs.to(device, torch.float32)
    healthy = None if draft.healthy is None else torch.as_tensor(draft.healthy, device=device).all()
    if parents is not None:
        parents = [row[:count] for row, count in zip(parents, counts, strict=True)]
    width = max(counts, default=0)
    tokens, probs = draft.tokens[:, :width].to(device, torch.long), None if probs is None else probs[:, :width]
    return Draft(tokens, counts, probs, draft.sources, parents, healthy, draft.steady)


def _check_tree(
    parents: Sequence[Sequence[int]], sampled: bool, rows: int, counts: Sequence[int], trees: bool
) -> None:
    if not trees:
        raise ValueError("trees can't be verified in this generation (`DraftContext.trees` is False)")
    if sampled:
        raise ValueError("a tree must be deterministic: `probs` must be None")
    if len(parents) != rows or [len(row) for row in parents] != list(counts):
        raise ValueError(f"a tree needs the parent of each draft token: {list(counts)}, got {list(map(len, parents))}")
    if any(not -1 <= parent < index for row in parents for index, parent in enumerate(row)):
        raise ValueError("a parent must be an earlier draft token or -1 for the row's last token")
