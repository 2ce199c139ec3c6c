"""Tiny tokenizers, of both families, whose every id is known."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_specdec.engine.tokens import _byte_characters


BYTES = {byte: character for character, byte in _byte_characters().items()}
ASCII = [bytes([byte]) for byte in (*range(0x20, 0x7F), 0x0A, 0x09)]  # 97 of them


def written(piece: bytes) -> str:
    """How a byte-level tokenizer writes a piece of text."""
    return "".join(BYTES[byte] for byte in piece)


def byte_level(
    pieces: Sequence[bytes | str], merges: Iterable[tuple[bytes, bytes]] = (), added: Sequence[str] = (),
    prefix: bool = False, **roles: str,
) -> Any:  # fmt: skip
    """A byte-level BPE.

    Args:
        pieces: The tokens in the order of their ids: bytes of a text, or the name of a special token.
        merges: Its merges, first ones first.
        added: Tokens behind them that are not special.
        prefix: Whether texts begin with `bos_token`.
        **roles: `bos_token`, `eos_token`, ….
    """
    vocabulary = {piece if isinstance(piece, str) else written(piece): index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[(written(a), written(b)) for a, b in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend, pieces, added, prefix, roles)


def sentencepiece(
    pieces: Sequence[bytes | str], merges: Iterable[tuple[str, str]] = (), prepend: bool = False,
    prefix: bool = False, **roles: str,
) -> Any:  # fmt: skip
    """A BPE as SentencePiece makes it: `▁` for a space, `<0x0A>` for a byte that no other token has.

    Args:
        pieces: The tokens: bytes of a text, a byte token such as `"<0x0A>"`, or the name of a special token.
        merges: Its merges, of characters.
        prepend: Whether it puts a space in front of every text.
        prefix: Whether texts begin with `bos_token`.
        **roles: `bos_token`, `eos_token`, ….
    """
    names = [piece if isinstance(piece, str) else piece.decode().replace(" ", "▁") for piece in pieces]
    pairs = [(a.replace(" ", "▁"), b.replace(" ", "▁")) for a, b in merges]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prepend else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [piece for piece in pieces if not (isinstance(piece, str) and piece.startswith("<0x"))]
    return _finished(backend, special, (), prefix, roles)


def _finished(backend: Tokenizer, pieces: Sequence[Any], added: Sequence[str], prefix: bool, roles: Any) -> Any:
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in pieces if isinstance(piece, str)])
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    if prefix:
        first = roles["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, backend.token_to_id(first))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def permuted(model: Any, order: Sequence[int]) -> Any:
    """A copy of a model in which what was id `order[i]` is id `i`."""
    changed, index = copy.deepcopy(model), torch.tensor(order)
    with torch.no_grad():
        for layer in (changed.get_input_embeddings(), changed.get_output_embeddings()):
            layer.weight.copy_(layer.weight[index].clone())
    return changed
