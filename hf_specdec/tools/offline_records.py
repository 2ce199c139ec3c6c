"""The input of an offline job: its settings, JSON lines to records, and records to batches that a restart repeats."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecDecError


WINDOW = 64  # batches whose records are sorted together
DEEPEST = 100  # levels of a record; far below what runs into the recursion limit on its way to the output


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt of the input, or why it is none.

    Attributes:
        index: Its number, from 0; blank lines have none.
        line: Its line in the file, from 1.
        id: What the user calls it; any JSON value.
        prompt: A text, or the messages of a chat.
        max_new_tokens: Most tokens to generate, where the record says so.
        seed: Its own seed, where the record has one.
        error: What is wrong with it, or `None`.
    """

    index: int
    line: int
    id: Any = None
    prompt: str | list[dict[str, Any]] = ""
    max_new_tokens: int | None = None
    seed: int | None = None
    error: str | None = None

    @property
    def size(self) -> int:
        """Characters of the prompt, roughly."""
        return len(self.prompt) if isinstance(self.prompt, str) else len(str(self.prompt))

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON types; `Record(**fields)` reads them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What the texts of a job depend on, next to its prompts.

    Attributes:
        model: The target: local folder or Hub id.
        draft: Draft model: local folder or Hub id.
        drafter: Drafter by name.
        off: Decode without speculation.
        temperature: 0 is greedy.
        seed: Each record's own seed is made from this one and its index.
        max_new_tokens: Most tokens a record.
        dtype: As in `load_model`.
        chat: Whether to use the chat template for prompts; `None` where there is one.
        batch_size: Records a batch.
    """

    model: str
    draft: str | None = None
    drafter: str | None = None
    off: bool = False
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = 256
    dtype: str = "auto"
    chat: bool | None = None
    batch_size: int = 8

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON types."""
        return asdict(self)

    def row_seed(self, record: Record) -> int:
        """The seed of a record's sampling noise: its own, else one made from the job's and its index."""
        if record.seed is not None:
            return record.seed
        digest = hashlib.blake2b(f"{self.seed}/{record.index}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class Batch:
    """Records that are generated together.

    Attributes:
        number: Its place among the batches of the job.
        records: Of similar length, longest first.
    """

    number: int
    records: tuple[Record, ...]


def inspect_input(path: Path) -> tuple[str, int]:
    """Read a prompts file once.

    Args:
        path: The file.

    Returns:
        Its SHA-256, and how many records it has.

    Raises:
        SpecDecError: If it can't be read.
    """
    digest, count = hashlib.sha256(), 0
    for line in _lines(path):
        digest.update(line)
        count += bool(line.strip())
    return digest.hexdigest(), count


def read_records(path: Path) -> Iterator[Record]:
    """Yield every record of a file of JSON lines; what is no record is one with an `error`.

    Args:
        path: One object a line: `prompt` or `messages`, and optionally `id`, `max_new_tokens` and `seed`. Other fields
            are left alone, and so are blank lines.

    Raises:
        SpecDecError: If the file can't be read.
    """
    index = 0
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield _record(index, number, line)
            index += 1


def batches(records: Iterable[Record], size: int) -> Iterator[Batch]:
    """Cut records into batches of similar length.

    Records are sorted inside windows of `WINDOW` batches, so memory stays bounded and the batches with numbers
    `WINDOW * k` to `WINDOW * (k + 1) - 1` hold neighbouring records. The cut depends on the input alone: a job that goes
    on after a kill makes the same batches.

    Args:
        records: In the order of the input.
        size: Records a batch.
    """
    records, number = iter(records), 0
    while window := list(itertools.islice(records, WINDOW * size)):
        # those that may generate more come first, as they fit together; of these the longest, which need most memory
        window.sort(key=lambda record: (-(record.max_new_tokens or 0), -record.size, record.index))
        for first in range(0, len(window), size):
            yield Batch(number, tuple(window[first : first + size]))
            number += 1


def _lines(path: Path) -> Iterator[bytes]:
    """The file's lines, cut at line feeds alone: JSON strings may hold other separators."""
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise SpecDecError(f"The prompts file {path} can't be read: {error.strerror or error}.") from error


def _record(index: int, line: int, data: bytes) -> Record:
    try:
        fields = json.loads(data.decode("utf-8-sig" if line == 1 else "utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return Record(index, line, error=f"not a line of JSON: {error}")
    if not isinstance(fields, dict):
        return Record(index, line, error=f"must be an object with `prompt` or `messages`, got {_kind(fields)}")
    if _deeper(fields, DEEPEST):
        return Record(index, line, error=f"is nested deeper than {DEEPEST} levels")
    name = fields.get("id")
    try:
        json.dumps(name, allow_nan=False)
    except ValueError as error:
        return Record(index, line, error=f"`id` can't be written as JSON: {error}")
    if reason := _wrong(fields):
        return Record(index, line, name, error=reason)
    prompt = fields["messages"] if fields.get("prompt") is None else fields["prompt"]
    return Record(index, line, name, prompt, fields.get("max_new_tokens"), fields.get("seed"))


def _wrong(fields: dict[str, Any]) -> str | None:
    """Why an object is no record, or `None`."""
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        return "needs either `prompt` or `messages`, got " + ("neither" if prompt is None else "both")
    if prompt is not None and not isinstance(prompt, str):
        return f"`prompt` must be a text, got {_kind(prompt)}"
    if prompt is None and not (
        isinstance(messages, list) and messages and all(isinstance(each, dict) and "role" in each for each in messages)
    ):
        return "`messages` must be a list of objects with `role` and `content`"
    most, seed = fields.get("max_new_tokens"), fields.get("seed")
    if most is not None and (type(most) is not int or most < 1):
        return f"`max_new_tokens` must be an integer from 1, got {most!r}"
    if seed is not None and type(seed) is not int:
        return f"`seed` must be an integer, got {seed!r}"
    return None


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects stand in each other more than so many times."""
    if not isinstance(value, (list, dict)):
        return False
    return not levels or any(
        _deeper(each, levels - 1) for each in (value.values() if isinstance(value, dict) else value)
    )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} isn't JSON")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
