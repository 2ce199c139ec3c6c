"""What token ids stand for: the vocabulary of a tokenizer as a value, and the way from bytes to ids and back.

Token strings of different families can't be compared as they are: byte-level ones write a space as `Ġ`, SentencePiece
ones as `▁`, and either may split a character over several tokens. So every token has its bytes here, and texts too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from tokenizers import Tokenizer
from transformers import AutoTokenizer


logger = logging.getLogger(__name__)

T = TypeVar("T")
BYTE_LEVEL, SENTENCEPIECE, WORDS = "byte-level", "sentencepiece", "words"
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """The token ids of a tokenizer.

    Attributes:
        tokens: Token string → id, added tokens included.
        merges: A digest of a BPE's merges, in order; `None` where it has none or they aren't known.
        special: Ids of the tokens that are no text (end of text, chat markers, …).
        added: The added tokens among `tokens`, special ones included.
        roles: What the tokenizer uses as `bos_token`, `eos_token`, `unk_token` and `pad_token`: role → id.
        kind: How token strings stand for bytes: `"byte-level"`, `"sentencepiece"` or `"words"`.
        prefix: The id that the tokenizer puts in front of every text, if any.
        output_size: Rows of the model's output layer, padding included; `None` where it isn't known.
        name: What reports call it.
    """

    tokens: Mapping[str, int]
    merges: str | None = None
    special: frozenset[int] = frozenset()
    added: Mapping[str, int] = field(default_factory=dict)
    roles: Mapping[str, int] = field(default_factory=dict)
    kind: str = WORDS
    prefix: tuple[int, ...] = ()
    output_size: int | None = None
    name: str = "tokenizer"

    @classmethod
    def of(cls, tokenizer: Any, output_size: int | None = None) -> Vocabulary:
        """Read a loaded tokenizer, fast or slow. It isn't changed.

        Args:
            tokenizer: A `PreTrainedTokenizerBase`.
            output_size: Rows of the model's output layer (`config.vocab_size`).
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        roles = {role: _role_id(tokenizer, role) for role in ROLES}
        known = {role: index for role, index in roles.items() if index is not None}
        name = str(getattr(tokenizer, "name_or_path", "") or "tokenizer")
        if isinstance(backend, Tokenizer):
            return cls._of_document(backend.to_str(), backend, known, output_size, name)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {index for index, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        tokens = dict(tokenizer.get_vocab())
        strings = {str(token): index for index, token in added.items()}
        prefix = tuple(tokenizer.encode("")[:1])
        kind = _guessed_kind(tokens)
        return cls(tokens, None, frozenset(special), strings, known, kind, prefix, output_size, name)

    @classmethod
    def load(cls, folder: str | Path, output_size: int | None = None) -> Vocabulary:
        """Read the tokenizer files of a local folder; it needs no weights.

        Args:
            folder: A folder with `tokenizer.json`, or with whatever `AutoTokenizer` can read.
            output_size: Rows of the model's output layer; `None`: `vocab_size` of the folder's `config.json`, if any.

        Raises:
            OSError: If there is no tokenizer in it.
            ValueError: If its files can't be read.
        """
        folder = Path(folder)
        if output_size is None:
            config = _json(folder / "config.json")
            output_size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        document = folder / "tokenizer.json"
        if not document.is_file():
            return cls.of(_read_tokenizer(str(folder)), output_size)
        text = document.read_text(encoding="utf-8")
        try:
            vocabulary = cls._of_document(text, Tokenizer.from_str(text), {}, output_size, folder.name)
        except Exception as error:  # of whatever kind; the Rust side raises bare exceptions
            raise ValueError(f"{document} is no tokenizer that can be read: {error}. Download it again.") from error
        given = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        names = {role: _content(given.get(role)) for role in ROLES}
        roles = {role: vocabulary.tokens[name] for role, name in names.items() if name and name in vocabulary.tokens}
        return replace(vocabulary, roles=roles, special=vocabulary.special | _markers(roles))

    @classmethod
    def _of_document(
        cls, text: str, backend: Tokenizer, roles: Mapping[str, int], output_size: int | None, name: str
    ) -> Vocabulary:
        """Read the text of a `tokenizer.json`."""
        document = json.loads(text)
        model, entries = document["model"], document.get("added_tokens") or []
        listed = model["vocab"]  # a mapping, or for Unigram a list of [token, score]
        tokens = dict(listed) if isinstance(listed, dict) else {token: at for at, (token, _) in enumerate(listed)}
        added = {entry["content"]: entry["id"] for entry in entries}
        merges = None if model.get("merges") is None else _digest(model["merges"])
        special = frozenset(entry["id"] for entry in entries if entry["special"]) | _markers(roles)
        prefix = tuple(backend.encode("").ids[:1])
        return cls(tokens | added, merges, special, added, roles, _kind(document), prefix, output_size, name)

    @cached_property
    def strings(self) -> dict[int, str]:
        """Id → token string."""
        return {index: token for token, index in self.tokens.items()}

    @property
    def size(self) -> int:
        """One more than the highest id that has a token."""
        return max(self.tokens.values(), default=-1) + 1

    @cached_property
    def pieces(self) -> dict[int, bytes]:
        """Id → the bytes it stands for; special tokens have none."""
        return {
            index: _bytes_of(token, self.kind) for token, index in self.tokens.items() if index not in self.special
        }

    def by_preference(self) -> list[int]:
        """Ids of all text tokens; byte tokens last, as texts are made of them only where there is no other."""
        fallback = self.kind == SENTENCEPIECE
        return sorted(
            self.pieces, key=lambda index: (bool(fallback and _BYTE_TOKEN.fullmatch(self.strings[index])), index)
        )


class Codec:
    """A vocabulary together with its tokenizer's way from text to ids.

    It works on a copy of the tokenizer, as encoding changes its settings.

    Attributes:
        vocabulary: The vocabulary.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.vocabulary = vocabulary_of(tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Tokenizer | None = None
        if isinstance(backend, Tokenizer):
            self._backend = Tokenizer.from_str(backend.to_str())
            self._backend.no_padding()
            self._backend.no_truncation()
            self._backend.encode_special_tokens = True  # what a text spells out is text
        else:
            self._slow = copy.deepcopy(tokenizer)
        self._of_byte = {piece: index for index, piece in self.vocabulary.pieces.items() if len(piece) == 1}

    def text_of(self, ids: Iterable[int]) -> bytes:
        """The bytes of these ids; special and unknown ones have none."""
        pieces = self.vocabulary.pieces
        return b"".join(pieces.get(index, b"") for index in ids)

    def ids_of(self, text: bytes) -> list[int]:
        """Ids of a piece of a text, which need not begin or end with a whole character, without any special token."""
        ids: list[int] = []
        for part in re.split("([\udc80-\udcff]+)", text.decode("utf-8", "surrogateescape")):
            if part and "\udc80" <= part[0] <= "\udcff":
                single = (
                    self._of_byte.get(byte.to_bytes(1, "big")) for byte in part.encode("utf-8", "surrogateescape")
                )
                ids += [index for index in single if index is not None]
            elif part:
                ids += self._encode(part)
        return ids

    def tail(self, ids: Sequence[int], number: int) -> list[int]:
        """The last ids of a text that are one piece of it: `number`, more for a whole character, fewer behind a marker."""
        pieces = self.vocabulary.pieces
        start = len(ids)
        while start and ids[start - 1] in pieces:
            if len(ids) - start >= number and not _continues(pieces[ids[start]]):
                break
            start -= 1
        return list(ids[start:])

    def _encode(self, text: str) -> list[int]:
        """Ids of a text that goes on from another: the space that some tokenizers put in front is taken away again."""
        ids, wanted = self._raw(text), text.encode()
        if (found := self.text_of(ids)) == wanted or found != b" " + wanted:
            return ids
        if text[0] == " " and self.text_of(again := self._raw(text[1:])) == wanted:
            return again
        # behind a line break no word is begun
        anchored = behind(self, self._raw(f"\n{text}"), 2)
        return anchored if anchored is not None else ids

    def _raw(self, text: str) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self._slow.encode(text, add_special_tokens=False))


def behind(codec: Codec, ids: Sequence[int], size: int) -> list[int] | None:
    """What stands behind the first `size` bytes, or `None` where no token begins there."""
    done, pieces = 0, codec.vocabulary.pieces
    for place, index in enumerate(ids):
        if done >= size:
            return list(ids[place:]) if done == size else None
        done += len(pieces.get(index, b""))
    return [] if done == size else None


_VOCABULARIES: weakref.WeakKeyDictionary[Any, tuple[int, Vocabulary]] = weakref.WeakKeyDictionary()


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """`Vocabulary.of`, read once and again where tokens were added."""
    if tokenizer not in _VOCABULARIES or _VOCABULARIES[tokenizer][0] != len(tokenizer):
        _VOCABULARIES[tokenizer] = (len(tokenizer), Vocabulary.of(tokenizer))
    return _VOCABULARIES[tokenizer][1]


class PerPair(Generic[T]):
    """A value for two tokenizers: made once, made anew where one has got more tokens, forgotten with them."""

    def __init__(self, make: Callable[[Any, Any], T]) -> None:
        self._make = make
        self._known: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, tuple[Any, T]]] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, one: Any, other: Any) -> T:
        known = self._known.setdefault(one, weakref.WeakKeyDictionary())
        sizes = (len(one), len(other))
        if other not in known or known[other][0] != sizes:
            known[other] = (sizes, self._make(one, other))
        return known[other][1]


_SAVED: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def saved_tokenizer(model: Any) -> Any:
    """The tokenizer saved where a model was loaded from, or `None`; nothing is downloaded.

    Args:
        model: A loaded model.
    """
    if model not in _SAVED:
        name, found = getattr(model, "name_or_path", ""), None
        if name:
            try:
                found = _read_tokenizer(name)
            except Exception as error:  # whatever is wrong with it, it can't be used
                logger.info("no tokenizer is saved at %s: %s: %s", name, type(error).__name__, error)
        _SAVED[model] = found
    return _SAVED[model]


def _read_tokenizer(name: str) -> Any:
    """A tokenizer from this disk, without code of its own."""
    return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)


def _byte_characters() -> dict[str, int]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_characters()


def _bytes_of(token: str, kind: str) -> bytes:
    """The bytes that a token stands for within a text."""
    if kind == BYTE_LEVEL:
        if all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return token.encode()
    if kind == SENTENCEPIECE:
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()
    return (token[2:] if token.startswith("##") else f" {token}").encode()


def _kind(document: Mapping[str, Any]) -> str:
    """How a `tokenizer.json` writes bytes, from its decoder."""
    steps = json.dumps([document.get("decoder"), document.get("pre_tokenizer")], ensure_ascii=False)
    if '"ByteLevel"' in steps:
        return BYTE_LEVEL
    return SENTENCEPIECE if "▁" in steps else WORDS


def _digest(merges: Iterable[str | Sequence[str]]) -> str:
    """Equal for equal merges, whether they are written as `"a b"` or as `["a", "b"]`."""
    lines = (pair if isinstance(pair, str) else " ".join(pair) for pair in merges)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _guessed_kind(tokens: Iterable[str]) -> str:
    """The same for a tokenizer without one, from how its tokens begin."""
    starts = [token[:1] for token in tokens]
    if "▁" in starts:
        return SENTENCEPIECE
    return BYTE_LEVEL if "Ġ" in starts else WORDS


def _continues(piece: bytes) -> bool:
    """Whether a piece begins in the middle of a character."""
    return bool(piece) and piece[0] & 0xC0 == 0x80


def _markers(roles: Mapping[str, int]) -> frozenset[int]:
    """What begins and ends texts is no text, whatever the tokenizer's files say."""
    return frozenset(roles[role] for role in ("bos_token", "eos_token") if role in roles)


def _role_id(tokenizer: Any, role: str) -> int | None:
    index: int | None = getattr(tokenizer, f"{role}_id", None)
    return index


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read
