"""What each token adds to the text: together it is the text, and no character comes in halves."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from hf_specdec.web.detokenizer import UNFINISHED, Detokenizer

from ..tools.tiny_chat import END, byte_tokenizer
from ..vocabularies import ASCII, sentencepiece


@cache
def bytes_alone() -> Any:
    return byte_tokenizer()


@cache
def sentences() -> Any:
    """Like Llama 2's: spaces are stripped from the front of what is decoded, and other characters are bytes."""
    pieces = [each for each in ASCII if each >= b" "]
    merges = [(" ", "a"), ("a", "b"), (" ", "ab")]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = sentencepiece(["<s>", *fallback, *pieces, b" a", b"ab", b" ab"], merges[:2], prepend=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def pieces_of(tokenizer: Any, ids: list[int]) -> list[str]:
    words = Detokenizer(tokenizer)
    pieces = [words.add(id) for id in ids]
    return [*pieces, words.rest()]


def check(tokenizer: Any, ids: list[int]) -> None:
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any(piece.endswith(UNFINISHED) for piece in pieces[:-1])


@settings(deadline=None)
@given(st.lists(st.integers(0, 256), max_size=40))
def test_any_bytes(ids: list[int]) -> None:
    check(bytes_alone(), ids)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_text(text: str) -> None:
    ids = bytes_alone()(text).input_ids
    pieces = pieces_of(bytes_alone(), ids)
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces if UNFINISHED not in text)


@settings(deadline=None)
@given(st.text("ab c,.\nä你👩\u200d", max_size=20))
def test_stripped_spaces(text: str) -> None:
    ids = sentences()(text).input_ids
    check(sentences(), ids)


def test_characters_of_several_tokens_come_whole() -> None:
    pieces = pieces_of(bytes_alone(), bytes_alone()("é👩‍🚀你!").input_ids)
    assert pieces == ["", "é", "", "", "", "👩", "", "", "\u200d", "", "", "", "🚀", "", "", "你", "!", ""]


def test_special_tokens_say_nothing() -> None:
    end = bytes_alone().convert_tokens_to_ids(END)
    a, b = bytes_alone()("ab").input_ids
    assert pieces_of(bytes_alone(), [end, a, end, end, b, end]) == ["", "a", "", "", "b", "", ""]


def test_half_a_character_at_the_end_is_the_rest() -> None:
    ids = bytes_alone()("a👩").input_ids[:-1]
    assert pieces_of(bytes_alone(), ids) == ["a", "", "", "", UNFINISHED]


def test_rest_is_said_once() -> None:
    words = Detokenizer(bytes_alone())
    words.add(bytes_alone()("é").input_ids[0])
    assert words.rest() == UNFINISHED
    assert words.rest() == ""


@pytest.mark.smollm2
def test_real_tokenizer(smollm2_path: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    def any_ids(ids: list[int]) -> None:
        check(tokenizer, ids)

    any_ids()
    check(tokenizer, tokenizer("Hello, world ! It 's 👩‍🚀 你好, ok ? <|im_end|> שלום").input_ids)
