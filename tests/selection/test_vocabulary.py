"""Vocabularies are compared id by id: what is the same, what is padding, what differs, and what other engines make of it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizer

from hf_specdec.engine.tokens import Codec, Vocabulary, behind
from hf_specdec.selection.vocabulary import Comparison, compare, different_ids_reason, engine_warnings

from ..tiny import tiny_model
from ..vocabularies import ASCII, byte_level, sentencepiece


SPECIAL = ["<s>", "</s>"]
MERGES = [(b"t", b"h"), (b"th", b"e"), (b" ", b"the"), (b"a", b"n")]
PIECES: list[bytes | str] = [*SPECIAL, *ASCII, *(a + b for a, b in MERGES)]
ROLES = {"bos_token": "<s>", "eos_token": "</s>"}


def vocabulary(pieces: Sequence[bytes | str] = PIECES, size: int | None = None, **options: Any) -> Vocabulary:
    return Vocabulary.of(byte_level(pieces, **({"merges": MERGES} | ROLES | options)), size)


def compared(**options: Any) -> Comparison:
    return compare(vocabulary(), vocabulary(**options))


def test_the_same() -> None:
    found = compared()
    assert (found.verdict, found.differences, found.num_different) == ("same", (), 0)
    assert (found.overlap, found.fits, found.reasons) == (1.0, True, ())


def test_padding_of_the_output_layer() -> None:
    found = compare(vocabulary(size=128), vocabulary(size=192))
    assert (found.verdict, found.fits, found.num_different) == ("same-with-padding", True, 0)
    assert "128 and 192 rows" in found.reasons[0]
    assert compare(vocabulary(size=128), vocabulary(size=128)).verdict == "same"
    assert compare(vocabulary(size=128), vocabulary()).verdict == "same"  # one size isn't known


def test_two_ids_exchanged() -> None:
    other = [*PIECES]
    other[40], other[70] = other[70], other[40]
    found = compared(pieces=other)
    assert found.verdict == "different"
    assert [(each.id, each.target, each.draft) for each in found.differences] == [
        (40, PIECES[40].decode(), PIECES[70].decode()), (70, PIECES[70].decode(), PIECES[40].decode()),
    ]  # fmt: skip
    assert found.num_different == 2
    assert found.overlap == 1.0  # the tokens are there, under other ids
    assert not found.fits  # two of 103 are more than one in a hundred
    assert "2 of 103 ids" in found.reasons[0]
    assert "40: 'F'" in found.reasons[0]


def test_all_ids_moved_shows_five() -> None:
    found = compared(pieces=[*SPECIAL, *PIECES[3:], PIECES[2]])
    assert found.verdict == "different"
    assert [each.id for each in found.differences] == [2, 3, 4, 5, 6]
    assert found.num_different == len(PIECES) - 2


def test_extra_added_tokens() -> None:
    found = compared(added=["<think>", "</think>"])
    assert (found.verdict, found.fits, found.num_different) == ("same-with-padding", True, 2)
    assert found.differences[0].draft == "<think>"
    assert found.differences[0].target is None
    assert "2 added tokens are the draft's alone, first '<think>' (103)" in found.reasons
    back = compare(vocabulary(added=["<think>", "</think>"]), vocabulary())
    assert (back.verdict, back.fits) == ("same-with-padding", True)
    assert back.overlap == pytest.approx(101 / 103)


def test_extra_tokens_that_are_no_added_ones() -> None:
    found = compared(pieces=[*PIECES, b"xy", b"xyz"])
    assert found.verdict == "different"
    assert found.fits  # every id of the smaller one is the same
    assert "2 tokens are the draft's alone, first 'xy' (103)" in found.reasons


def test_other_special_ids() -> None:
    found = compared(pieces=["</s>", "<s>", *PIECES[2:]])
    assert found.verdict == "different"
    assert found.differences[0].target == "<s>"
    assert "the eos_token is '</s>' (1) in the target and '</s>' (0) in the draft" in found.reasons


def test_other_roles_are_no_other_ids() -> None:
    """A chat model that ends its texts with another token than its base model."""
    found = compared(eos_token="<s>")
    assert (found.verdict, found.fits) == ("same", True)
    assert found.reasons == ("the eos_token is '</s>' (1) in the target and '<s>' (0) in the draft",)


def test_other_merges_with_the_same_tokens() -> None:
    found = compared(merges=[MERGES[3], *MERGES[:3]])
    assert (found.verdict, found.fits, found.num_different) == ("different", False, 0)
    assert found.reasons == ("the merges differ, so texts are split into other tokens",)


def test_byte_level_and_sentencepiece() -> None:
    """The same words, written in two ways: no id is the same, most tokens are."""
    other = Vocabulary.of(sentencepiece([*SPECIAL, *ASCII, b" the", "<0xE2>"], **ROLES))
    assert other.kind == "sentencepiece"
    assert other.tokens["▁the"] == 99
    assert (other.pieces[99], other.pieces[100]) == (b" the", b"\xe2")
    found = compare(vocabulary(), other)
    assert found.verdict == "different"
    assert "the target's tokens are byte-level and the draft's sentencepiece" in found.reasons
    assert found.overlap == pytest.approx(98 / 101)


def test_special_tokens_are_no_text() -> None:
    known = vocabulary(added=["<think>"])
    assert known.special == {0, 1}
    assert 0 not in known.pieces
    assert known.pieces[103] == b"<think>"
    assert (known.roles["bos_token"], known.roles["eos_token"], known.size) == (0, 1, 104)


@pytest.mark.parametrize("prefix", [False, True])
def test_from_files(tmp_path: Path, prefix: bool) -> None:
    """A folder with tokenizer files alone says the same as the loaded tokenizer."""
    tokenizer = byte_level(PIECES, MERGES, ["<think>"], prefix, **ROLES)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 128}}))
    loaded = Vocabulary.load(tmp_path)
    assert replace(loaded, name="") == replace(Vocabulary.of(tokenizer, 128), name="")
    assert loaded.prefix == ((0,) if prefix else ())
    (tmp_path / "config.json").unlink()
    assert Vocabulary.load(tmp_path).output_size is None
    assert Vocabulary.load(tmp_path, 256).output_size == 256


def test_from_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        Vocabulary.load(tmp_path)


def test_from_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer"):
        Vocabulary.load(tmp_path)


def test_an_end_that_is_not_marked_as_special(tmp_path: Path) -> None:
    Tokenizer(models.BPE(vocab={"a": 0, "</s>": 1}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    found = Vocabulary.load(tmp_path)
    assert found.roles == {"eos_token": 1}
    assert found.pieces == {0: b" a"}  # one token a word


class Slow(PreTrainedTokenizer):
    """A tokenizer without a Rust backend, one token a word."""

    def __init__(self) -> None:
        self.words = {"</s>": 0, "▁the": 1, "n": 2, "<0x0A>": 3}
        super().__init__(eos_token="</s>")

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return self.words

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return re.findall("▁the|n", text.replace(" ", "▁"))

    def _convert_token_to_id(self, token: str) -> int:
        return self.words[token]

    def _convert_id_to_token(self, index: int) -> str:
        return {index: word for word, index in self.words.items()}[index]


def test_a_slow_tokenizer() -> None:
    found = Vocabulary.of(Slow())
    assert (found.kind, found.prefix, found.special, found.roles) == ("sentencepiece", (), {0}, {"eos_token": 0})
    assert found.pieces == {1: b" the", 2: b"n", 3: b"\n"}
    assert Codec(Slow()).ids_of(b" then") == [1, 2]


# text and ids


@pytest.mark.parametrize("text", ["the man and the\nthen", " the", "", "a  b", "<s> is no marker"])
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "sentencepiece that prepends"])
def test_text_there_and_back(text: str, kind: str) -> None:
    if kind == "byte-level":
        codec = Codec(byte_level(PIECES, MERGES, **ROLES))
    else:
        pieces = [*SPECIAL, *ASCII, b" the"]
        codec = Codec(sentencepiece(pieces, prepend="prepends" in kind, **ROLES))
    ids = codec.ids_of(text.encode())
    assert codec.text_of(ids) == text.encode()
    assert not set(ids) & {0, 1}


def test_parts_of_characters() -> None:
    """A piece of text may begin and end within a character."""
    every = [bytes([byte]) for byte in range(256)]
    codec = Codec(byte_level(every))
    whole = "né €".encode()
    for start in range(len(whole)):
        for stop in range(start, len(whole)):
            assert codec.text_of(codec.ids_of(whole[start:stop])) == whole[start:stop]
    assert Codec(byte_level(ASCII)).ids_of(b"a\xe2b") == [ord("a") - 0x20, ord("b") - 0x20]  # it has no such byte


def test_tail() -> None:
    every = ["<s>", *(bytes([byte]) for byte in range(256))]
    codec = Codec(byte_level(every, bos_token="<s>"))
    ids = [0, *codec.ids_of("ab€".encode())]
    assert codec.text_of(codec.tail(ids, 1)) == "€".encode()  # not within a character
    assert codec.text_of(codec.tail(ids, 4)) == "b€".encode()
    assert codec.text_of(codec.tail(ids, 9)) == "ab€".encode()  # not beyond a marker
    assert codec.tail([0], 3) == codec.tail([], 3) == []


def test_behind() -> None:
    codec = Codec(byte_level(PIECES, MERGES, **ROLES))
    ids = codec.ids_of(b"n the n")
    assert codec.text_of(behind(codec, ids, 1) or []) == b" the n"
    assert behind(codec, ids, 3) is None  # within a token
    assert behind(codec, ids, 7) == []


def test_the_tokenizer_is_not_changed() -> None:
    tokenizer = byte_level(PIECES, MERGES, **ROLES)
    tokenizer.backend_tokenizer.enable_truncation(3)
    before, state = tokenizer.backend_tokenizer.to_str(), copy.copy(vars(tokenizer))
    assert len(Codec(tokenizer).ids_of(b"abcdef")) == 6
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer.backend_tokenizer.encode_special_tokens is False
    assert vars(tokenizer) == state


# other engines


def test_engines_take_an_equal_pair() -> None:
    assert engine_warnings(vocabulary(size=128), vocabulary(size=128)) == {"vllm": [], "llama.cpp": [], "sglang": []}


def test_engines_and_padding() -> None:
    found = engine_warnings(vocabulary(size=128), vocabulary(size=192))
    assert "128 for the target and 192" in found["vllm"][0]
    assert "use_heterogeneous_vocab" in found["vllm"][0]
    assert "refused" in found["sglang"][0]
    assert found["llama.cpp"] == []  # at most 128 apart
    far = engine_warnings(vocabulary(size=128), vocabulary(size=300))
    assert "more than 128 (128 and 300)" in far["llama.cpp"][0]


def test_engines_and_other_ids() -> None:
    other = [*PIECES]
    other[40], other[70] = other[70], other[40]
    found = engine_warnings(vocabulary(size=128), vocabulary(other, 128))
    assert "hardly any draft" in found["vllm"][0]  # it doesn't look
    assert "id 40: 'F' in the target" in found["llama.cpp"][0]
    assert found["sglang"] == ["the vocabularies differ: refused"]


def test_llama_cpp_does_not_look_at_the_first_five_ids() -> None:
    other = [*PIECES]
    other[3], other[4] = other[4], other[3]
    assert engine_warnings(vocabulary(), vocabulary(other))["llama.cpp"] == []


def test_llama_cpp_and_a_bos_of_one_side() -> None:
    (warning,) = engine_warnings(vocabulary(), vocabulary(prefix=True))["llama.cpp"]
    assert "begins texts with a BOS" in warning


def test_llama_cpp_and_other_eos() -> None:
    """Such as a chat model's and a base model's: it compares them only where texts are given one at their end."""
    assert engine_warnings(vocabulary(), vocabulary(eos_token="<s>"))["llama.cpp"] == []


def test_llama_cpp_and_other_bos() -> None:
    found = engine_warnings(vocabulary(prefix=True), vocabulary(prefix=True, bos_token="</s>"))
    assert "the bos_token ids differ (0 and 1)" in found["llama.cpp"][0]


def test_llama_cpp_and_another_kind() -> None:
    other = Vocabulary.of(sentencepiece([*SPECIAL, *ASCII, *(a + b for a, b in MERGES)], **ROLES))
    assert "(BPE and SPM)" in engine_warnings(vocabulary(), other)["llama.cpp"][0]


# what routing asks


def test_routing_without_tokenizers_goes_by_size() -> None:
    assert different_ids_reason(tiny_model(), tiny_model(vocab_size=128)) is None
    reason = different_ids_reason(tiny_model(), tiny_model(vocab_size=3000))
    assert reason is not None
    assert "3000 token ids and the target 97" in reason


def test_routing_with_tokenizers_goes_by_ids() -> None:
    target, draft = tiny_model(), tiny_model(vocab_size=3000)
    assert different_ids_reason(target, draft, byte_level(PIECES, MERGES), byte_level(PIECES, MERGES)) is None
    reason = different_ids_reason(target, draft, byte_level(PIECES, MERGES), byte_level(PIECES[::-1], MERGES))
    assert reason is not None
    assert "stand for another token" in reason


def test_a_renamed_marker_is_no_hindrance() -> None:
    """As in distilled models, which share all ids with their origin but a few markers."""
    large = [*PIECES, *(bytes([byte]) for byte in range(0x80, 0x100))]
    one, other = byte_level(large, MERGES), byte_level(["<begin>", *large[1:]], MERGES)
    assert compare(Vocabulary.of(one), Vocabulary.of(other)).verdict == "different"
    assert different_ids_reason(None, None, one, other) is None


def test_tokens_added_later_count() -> None:
    one, other = byte_level(PIECES, MERGES), byte_level(PIECES, MERGES)
    assert different_ids_reason(None, None, one, other) is None
    one.add_tokens([f"<{index}>" for index in range(9)])
    other.add_tokens([f"<{index}>" for index in reversed(range(9))])
    assert different_ids_reason(None, None, one, other) is not None
