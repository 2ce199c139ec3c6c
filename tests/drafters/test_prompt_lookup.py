"""Lookup finds what a brute-force search finds, and copies what followed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import PromptLookup
from hf_specdec.drafters.prompt_lookup import BUCKETS, CANDIDATES, LONGEST_MATCH, Index
from hf_specdec.engine.rows import Rows


def brute_force(text: list[int], max_ngram: int) -> tuple[int, int]:
    """The longest match of the text's end, the latest among equals.

    Of the places that share the longest hashed n-gram only the last few are compared, which is part of the rule.
    """
    for seed in range(min(max_ngram, len(text)), 0, -1):
        places = [p for p in range(seed, len(text)) if text[p - seed : p] == text[-seed:]]
        best = (0, 0)
        for place in places[-CANDIDATES:]:
            match = 0
            while match < min(LONGEST_MATCH, place) and text[place - 1 - match] == text[-1 - match]:
                match += 1
            if match >= best[1]:
                best = (place, match)
        if best[1]:
            return best
    return 0, 0


def start(texts: list[list[int]], ends: tuple[int, ...] = (), **arguments: Any) -> tuple[PromptLookup, Rows]:
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    keep = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :] = torch.tensor(text)
        keep[row, longest - len(text) :] = True
    rows = Rows(ids, keep, 100, 0)
    lookup = PromptLookup(**arguments)
    lookup.start(SimpleNamespace(rows=rows, end_tokens=frozenset(ends)))
    return lookup, rows


def drafts(lookup: PromptLookup, rows: Rows, length: int) -> list[list[int]]:
    lookup.outlook(rows)
    draft = lookup.propose(rows, length)
    assert draft.probs is None
    return [line[:count] for line, count in zip(draft.tokens.tolist(), draft.counts, strict=True)]


small = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@settings(max_examples=300, deadline=None)
@given(small, st.integers(1, 5))
def test_same_as_brute_force(text: list[int], max_ngram: int) -> None:
    index = Index(max_ngram)
    index.update(text)
    assert (index.find(text) or [(0, 0)])[0] == brute_force(text, max_ngram)


@settings(max_examples=100, deadline=None)
@given(small, st.lists(st.integers(1, 7), max_size=12), st.integers(1, 4))
def test_growing_index_is_the_index_of_the_whole(text: list[int], steps: list[int], max_ngram: int) -> None:
    growing, at = Index(max_ngram), 0
    for step in [*steps, len(text)]:
        at = min(len(text), at + step)
        growing.update(text[:at])
        assert (growing.find(text[:at]) or [(0, 0)])[0] == brute_force(text[:at], max_ngram)
    whole = Index(max_ngram)
    whole.update(text)
    assert growing.places == whole.places


@settings(max_examples=200, deadline=None)
@given(small, st.integers(1, 20), st.integers(1, 4), st.sets(st.integers(0, 3), max_size=2))
def test_copy_is_what_followed(text: list[int], length: int, least: int, ends: set[int]) -> None:
    lookup, rows = start([text], tuple(ends), min_match=least)
    draft = drafts(lookup, rows, length)[0]
    place, match = brute_force(text, 4)
    if match < least:
        assert draft == []
        return
    assert 1 <= len(draft) <= length
    extended = [*text]
    for token in draft:  # a copy that reaches the end of the text goes on with itself
        assert token == extended[place]
        extended.append(token)
        place += 1
    assert not ends.intersection(draft[:-1])
    assert len(draft) == length or draft[-1] in ends


def test_longest_match_wins_over_a_later_one() -> None:
    lookup, rows = start([[1, 2, 3, 4, 50, 9, 3, 4, 60, 7, 1, 2, 3, 4]])
    assert drafts(lookup, rows, 1) == [[50]]


def test_latest_wins_among_equals() -> None:
    lookup, rows = start([[1, 2, 50, 1, 2, 60, 1, 2]])
    assert drafts(lookup, rows, 1) == [[60]]


def test_repetition_copies_itself() -> None:
    lookup, rows = start([[9, 5, 6, 7, 5, 6, 7]])
    assert drafts(lookup, rows, 8) == [[5, 6, 7, 5, 6, 7, 5, 6]]


def test_one_token_over_and_over() -> None:
    lookup, rows = start([[4, 4, 4]])
    assert drafts(lookup, rows, 5) == [[4] * 5]


def test_draft_ends_behind_an_end_token() -> None:
    lookup, rows = start([[1, 2, 3, 8, 4, 1, 2, 3]], (8,))
    assert drafts(lookup, rows, 5) == [[8]]


def test_nothing_to_find() -> None:
    lookup, rows = start([[1, 2, 3, 4], [5]])
    assert drafts(lookup, rows, 5) == [[], []]
    assert [each.acceptance for each in lookup.outlook(rows)] == [0.0, 0.0]
    assert all(each.free for each in lookup.outlook(rows))


def test_rows_have_their_own_texts() -> None:
    lookup, rows = start([[1, 2, 50, 1, 2], [1, 2], [7, 1, 2, 60, 70, 1, 2]])
    assert drafts(lookup, rows, 2) == [[50, 1], [], [60, 70]]
    rows.live = [0, 2]
    assert drafts(lookup, rows, 2) == [[50, 1], [60, 70]]
    rows.write(2, [60])
    assert drafts(lookup, rows, 2) == [[50, 1], [70, 1]]


def test_output_is_searched_too() -> None:
    lookup, rows = start([[1, 2, 3]])
    assert drafts(lookup, rows, 2) == [[]]
    rows.write(0, [11, 12, 13, 11])
    assert drafts(lookup, rows, 2) == [[12, 13]]


@pytest.mark.parametrize("match", [1, 2, 3, 4, 5, 8, 16, 40])
def test_bucket_is_the_length_of_the_match(match: int) -> None:
    run = list(range(100, 100 + match))
    lookup, rows = start([[1, *run, 2, 3, *run]])
    outlook = lookup.outlook(rows)[0]
    assert outlook.bucket == max(least for least, _ in BUCKETS if least <= match)
    assert outlook.acceptance == dict(BUCKETS)[outlook.bucket]


def test_match_is_cut_at_sixty_four() -> None:
    run = list(range(100, 300))
    lookup, rows = start([[1, *run, 2, 3, *run]])
    lookup.outlook(rows)
    assert lookup.indexes[0].find(rows.texts[0]) == [(1 + len(run), LONGEST_MATCH)]


def test_continuations_differ_and_the_longest_match_comes_first() -> None:
    text = [7, 8, 9, 1, 8, 9, 2, 8, 9, 1, 5, 9, 3, 7, 8, 9]
    index = Index(4)
    index.update(text)
    assert index.find(text, 3) == [(3, 3), (6, 2), (12, 1)]  # [8, 9] also stands in front of 7, which says 1 as well
    assert index.find(text, 2) == [(3, 3), (6, 2)]
    assert index.find(text) == [(3, 3)]
    assert Index(4).find([1, 2], 3) == []


def test_outlook_tells_the_guess() -> None:
    """So that its acceptance is learnt without verifying it; no more of it than that takes."""
    lookup, rows = start([[1, 2, *range(10, 40), 1, 2], [5, 6]])
    found = lookup.outlook(rows)
    assert found[0].guess == list(range(10, 18))
    assert list(found[1].guess) == []


def test_shortest_match_can_be_asked_for() -> None:
    lookup, rows = start([[1, 2, 50, 9, 1, 2]], min_match=3)
    assert drafts(lookup, rows, 4) == [[]]


def test_instance_keeps_nothing_of_a_generation() -> None:
    lookup = PromptLookup()
    assert set(vars(lookup)) == {"max_ngram", "min_match"}
