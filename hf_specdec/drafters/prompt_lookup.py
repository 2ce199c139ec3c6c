"""Drafts copied from the row's own text: find where the text has said its last words before, and say what followed.

Idea: prompt lookup decoding (A. Saxena, 2023). Here the longest match wins, the latest among equals, and its length
tells how far to trust it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from ..engine.rows import Rows
from .base import Draft, DraftContext, Drafter, Outlook


# first-token acceptance by bucket of match length, measured on real texts: the prior until this text has its own
BUCKETS = ((16, 0.9), (8, 0.8), (5, 0.7), (4, 0.6), (3, 0.55), (2, 0.4), (1, 0.3))
LONGEST_MATCH = 64
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

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """The place whose past matches the end of `text` longest, latest first, and the length of the match.

        Returns:
            Where the continuation starts, and how many tokens match; (0, 0) without any match.
        """
        for length in range(min(self.max_ngram, len(text)), 0, -1):
            places = self.places.get(tuple(text[-length:]))
            if places:
                best_place, best_match = 0, 0
                for place in reversed(places[-CANDIDATES:]):
                    match = _match_length(text, place, length)
                    if match > best_match:
                        best_place, best_match = place, match
                return best_place, best_match
        return 0, 0


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
        self.matches = []
        for row in rows.live:
            self.indexes[row].update(rows.texts[row])
            place, match = self.indexes[row].find(rows.texts[row])
            self.matches.append((place, match) if match >= self.min_match else (0, 0))
        return [self._expect(match) for _, match in self.matches]

    def propose(self, rows: Rows, length: int) -> Draft:
        """Copy up to `length` tokens behind each row's match, cut behind a token that ends the text."""
        return Draft.from_lists(
            [
                self._copy(rows.texts[row], place, length) if match else []
                for row, (place, match) in zip(rows.live, self.matches, strict=True)
            ]
        )

    def _expect(self, match: int) -> Outlook:
        least, acceptance = bucket_of(match)
        return Outlook(self.name, least, acceptance, free=True)

    def _copy(self, text: Sequence[int], place: int, length: int) -> list[int]:
        draft: list[int] = []
        for source in range(place, place + length):
            # a match that reaches the end repeats itself: go on copying from the draft
            token = text[source] if source < len(text) else draft[source - len(text)]
            draft.append(token)
            if token in self.end_tokens:
                break
        return draft
