"""Drafts from what the target has said elsewhere: its most likely next tokens after every token it has verified.

Idea: Token Recycling (Luo et al., arXiv 2408.08696). Every forward computes distributions at positions whose draft
tokens are then thrown away; the best tokens of each are kept as *successors* of the token that was read there. From them, and
from the text's own repetitions, a tree is grown best first. No model, no training, no weights; it helps where the text
doesn't repeat itself, which is where lookup has nothing to say.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..engine.length import Outlook
from ..engine.rows import Rows
from .base import Draft, DraftContext, Drafter, Rate
from .prompt_lookup import BUCKETS, Index, bucket_of


SUCCESSORS = 8
# chance that the target's next token is the successor of each rank, until it is measured
RANK_PRIORS = (0.35, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.02)
LEAST = 0.02  # a node less likely than this isn't grown
MOST_NODES = 32
CONTINUATIONS = 3  # of a lookup, that branch


@dataclass
class Memory:
    """What was learnt about one target; it serves later generations.

    Attributes:
        successors: For a token the target's most likely next ones, best first, as seen last.
        ranks: Chance of each rank.
        matches: Chance of a lookup's next token, by bucket of match length.
    """

    successors: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ranks: list[Rate] = field(default_factory=lambda: [Rate(prior) for prior in RANK_PRIORS])
    matches: dict[int, Rate] = field(default_factory=lambda: {least: Rate(prior) for least, prior in BUCKETS})

    def copy(self) -> Memory:
        """One that learns by itself from here on."""
        return Memory(dict(self.successors), copy.deepcopy(self.ranks), copy.deepcopy(self.matches))


@dataclass
class Grown:
    """A row's tree, best token first.

    Attributes:
        tokens: Its tokens.
        parents: The index of each one's parent, -1 for the root.
        gains: Chance of each to be accepted.
        bucket: Bucket of the lookup's match, 0 without one.
        copied: The lookup's first token.
    """

    tokens: list[int]
    parents: list[int]
    gains: list[float]
    bucket: int = 0
    copied: int = -1


_MEMORIES: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()


def snapshot(target: Any) -> Memory:
    """A copy of what was learnt about a target, for `restore`: a measurement must not learn from its own repetitions."""
    return _MEMORIES.get(target, Memory()).copy()


def restore(target: Any, saved: Memory) -> None:
    """Go back to what was known about a target at `snapshot`."""
    _MEMORIES[target] = saved.copy()


class Recycling(Drafter):
    """Draft a tree of recycled successors, merged with the best lookups.

    Args:
        max_ngram: Longest n-gram that lookup hashes.
    """

    name: ClassVar[str] = "recycling"
    num_successors: ClassVar[int] = SUCCESSORS

    def __init__(self, max_ngram: int = 4) -> None:
        self.max_ngram = max_ngram

    def start(self, context: DraftContext) -> None:
        """Take up what is known about the target, and the pairs of tokens in the prompts."""
        self.memory = _MEMORIES.setdefault(context.target, Memory())
        self.trees, self.end_tokens = context.trees, context.end_tokens
        self.indexes = [Index(self.max_ngram) for _ in context.rows.texts]
        self.grown: list[Grown] = []
        known = self.memory.successors
        for text in context.rows.texts:
            for token, following in zip(text, text[1:], strict=False):
                known.setdefault(token, (following,))  # what the target has said itself is better

    def outlook(self, rows: Rows) -> list[Outlook]:
        """Grow every row's tree: its gains are what to expect."""
        self.grown = [self._grow(row, rows.texts[row]) for row in rows.live]
        return [
            Outlook(self.name, 0, max(grown.gains, default=0.0), free=True, gains=grown.gains) for grown in self.grown
        ]

    def propose(self, rows: Rows, length: int) -> Draft:
        """The best `length` tokens of every row's tree."""
        draft = Draft.from_lists([grown.tokens[:length] for grown in self.grown])
        if not self.trees:
            return draft
        return Draft(draft.tokens, draft.counts, parents=[grown.parents[:length] for grown in self.grown])

    def prime(self, prompts: Sequence[Sequence[int]], successors: Sequence[Sequence[Sequence[int]]]) -> None:
        """Remember what the target would have said behind every token of the prompts."""
        for prompt, found in zip(prompts, successors, strict=True):
            self.memory.successors.update(zip(prompt, map(tuple, found), strict=False))

    def learn(
        self,
        blocks: Sequence[Sequence[int]],
        successors: Sequence[Sequence[Sequence[int]]],
        said: Sequence[Sequence[int]],
    ) -> None:
        """Note how good the guesses along the target's own path were, then remember its new ones."""
        paths = [self._measure(index, block, new) for index, (block, new) in enumerate(zip(blocks, said, strict=True))]
        known = self.memory.successors
        for block, found, path in zip(blocks, successors, paths, strict=True):
            # what was read on the path that stayed is stored last: it is what the text really goes on from
            rejected = [at for at in range(len(block)) if at not in path]
            for at in [*rejected, *path]:
                known[block[at]] = tuple(found[at])
        self.grown = []

    def _measure(self, index: int, block: Sequence[int], said: Sequence[int]) -> list[int]:
        """Count the guesses that were right along what the target said; the block indices on that path."""
        grown = self.grown[index] if index < len(self.grown) else Grown([], [], [])
        path, at = [0], 0
        for token in said:
            guesses = self.memory.successors.get(block[at], ())
            looked_up = at == 0 and grown.bucket > 0
            if looked_up:
                self.memory.matches[grown.bucket].update(token == grown.copied)
            if not (looked_up and token == grown.copied):
                for rate, guess in zip(self.memory.ranks, guesses, strict=False):
                    rate.update(guess == token)
            drafted = range(min(len(block) - 1, len(grown.parents)))
            step = next((node for node in drafted if grown.parents[node] == at - 1 and block[node + 1] == token), None)
            if step is None:
                break
            at = step + 1
            path.append(at)
        return path

    def _grow(self, row: int, text: Sequence[int]) -> Grown:
        """Grow a tree (a chain where trees can't be verified) from the text's end, the likeliest token first."""
        index, memory = self.indexes[row], self.memory
        index.update(text)
        matches = index.find(text, CONTINUATIONS)
        trusts = [memory.matches[bucket_of(match)[0]].value for _, match in matches]
        ranks = [rate.value for rate in memory.ranks]
        grown = Grown([], [], [])
        if matches:
            grown.bucket, grown.copied = bucket_of(matches[0][1])[0], text[matches[0][0]]
        # minus its chance, order of arrival, parent, token, and where lookups go on behind it: (place, trust)
        waiting: list[tuple[float, int, int, int, list[tuple[int, float]]]] = []
        arrivals = itertools.count()

        def offer(parent: int, token: int, chance: float, lookups: Sequence[tuple[int, float]]) -> None:
            copies: dict[int, list[tuple[int, float]]] = {}
            for place, trust in lookups:
                if place < len(text):
                    copies.setdefault(text[place], []).append((place + 1, trust))
            left = 1.0
            for copied, further in copies.items():
                heapq.heappush(waiting, (-chance * left * further[0][1], next(arrivals), parent, copied, further))
                left *= 1.0 - further[0][1]
            for rank, successor in zip(ranks, memory.successors.get(token, ()), strict=False):
                if successor not in copies and chance * left * rank >= LEAST:
                    heapq.heappush(waiting, (-chance * left * rank, next(arrivals), parent, successor, []))

        offer(-1, text[-1], 1.0, [(place, trust) for (place, _), trust in zip(matches, trusts, strict=True)])
        while waiting and len(grown.tokens) < MOST_NODES:
            chance, _, parent, token, lookups = heapq.heappop(waiting)
            if -chance < LEAST:
                break
            if not self.trees:
                waiting.clear()
            grown.tokens.append(token)
            grown.parents.append(parent)
            grown.gains.append(-chance)
            if token not in self.end_tokens:
                offer(len(grown.tokens) - 1, token, -chance, lookups)
        return grown
