"""Drafts copied from the row's own text: find where the text has said its last words before, and say what followed.

Idea: prompt lookup decoding (A. Saxena, 2023). Here the longest match wins, the latest among equals, and its length
tells how far to trust it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from ..engine.length import Outlook
from ..engine.rows import Rows
from .base import Draft, DraftContext, Drafter


# first-token acceptance by bucket of match length, measured on real texts: the prior until this text has its own
BUCKETS = ((16, 0.9), (8, 0.8), (5, 0.7), (4, 0.6), (3, 0.55), (2, 0.4), (1, 0.3))
LONGEST_MATCH = 64
SHADOW = 8  # tokens of a copy from which acceptance is learnt where it isn't drafted
CANDIDATES = 8  # earlier places compared for the longest match


class Index:
    """Every place of a growing text by the 1..n tokens in front of it."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.indexed = 0

    def update(self, text: Sequence[int]) -> None:
        """Index what was appended. The end itself has no continuation yet and stays out."""
        for place in range(max(self.indexed, 1), len(text)):
            for length in range(1, min(self.max_ngram, place) + 1):
                self.places[tuple(text[place - length : place])].append(place)
        self.indexed = max(self.indexed, len(text))

    def find(self, text: Sequence[int], most: int = 1) -> list[tuple[int, int]]:
        """The places whose past matches the end of `text` longest, latest first, each with another next token.

        Args:
            text: The text that is indexed.
            most: How many places to find.

        Returns:
            Where each continuation starts and how many tokens match there, best first; empty without any match.
        """
        found: dict[int, int] = {}
        for length in range(min(self.max_ngram, len(text)), 0, -1):
            for place in reversed(self.places.get(tuple(text[-length:]), ())[-CANDIDATES:]):
                if place not in found:
                    found[place] = _match_length(text, place, length)
            if found and (most == 1 or len(found) >= CANDIDATES):
                break
        best: dict[int, tuple[int, int]] = {}  # by next token
        for place, match in sorted(found.items(), key=lambda each: (each[1], each[0]), reverse=True):
            best.setdefault(text[place], (place, match))
            if len(best) == most:
                break
        return list(best.values())


def _match_length(text: Sequence[int], place: int, known: int) -> int:
    """How many tokens in front of `place` equal the end of `text`, `known` of them being known to."""
    longest = min(LONGEST_MATCH, place)
    while known < longest and text[place - 1 - known] == text[-1 - known]:
        known += 1
    return known


def bucket_of(match: int) -> tuple[int, float]:
    """The bucket of a match's length and its prior acceptance; (0, 0.0) without any match."""
    return next((bucket for bucket in BUCKETS if match >= bucket[0]), (0, 0.0))


class PromptLookup(Drafter):
    """Draft by copying what followed the longest earlier match of the text's end. No model, no training.

    Args:
        max_ngram: Longest n-gram that is hashed; matches are extended from there to 64 tokens.
        min_match: Shortest match that is used.
    """

    name: ClassVar[str] = "prompt_lookup"

    def __init__(self, max_ngram: int = 4, min_match: int = 1) -> None:
        self.max_ngram = max_ngram
        self.min_match = min_match

    def start(self, context: DraftContext) -> None:
        """Make an empty index for every row."""
        self.indexes = [Index(self.max_ngram) for _ in context.rows.texts]
        self.end_tokens = context.end_tokens
        self.matches: list[tuple[int, int]] = []

    def outlook(self, rows: Rows) -> list[Outlook]:
        """Find each row's match; its length is the bucket."""
        found = []
        self.matches = []
        for row in rows.live:
            text = rows.texts[row]
            self.indexes[row].update(text)
            place, match = next(iter(self.indexes[row].find(text)), (0, 0))
            self.matches.append((place, match) if match >= self.min_match else (0, 0))
            least, acceptance = bucket_of(self.matches[-1][1])
            guess = self._copy(text, place, SHADOW) if least else []
            found.append(Outlook(self.name, least, acceptance, free=True, guess=guess))
        return found

    def propose(self, rows: Rows, length: int) -> Draft:
        """Copy up to `length` tokens behind each row's match, cut behind a token that ends the text."""
        return Draft.from_lists(
            [
                self._copy(rows.texts[row], place, length) if match else []
                for row, (place, match) in zip(rows.live, self.matches, strict=True)
            ]
        )

    def _copy(self, text: Sequence[int], place: int, length: int) -> list[int]:
        draft: list[int] = []
        for source in range(place, place + length):
            # a match that reaches the end repeats itself: go on copying from the draft
            token = text[source] if source < len(text) else draft[source - len(text)]
            draft.append(token)
            if token in self.end_tokens:
                break
        return draft
