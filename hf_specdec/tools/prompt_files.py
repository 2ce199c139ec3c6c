"""A user's own prompts, in whatever form they are kept; what is no prompt is reported and left out."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import SpecDecError
from .suites import BenchPrompt, Suite, decoded, numbered_lines, prompt_of


STDIN = "-"
JSON_LINES, JSON_ARRAY, TEXT, TABLE, PARQUET = "JSON lines", "JSON", "text", "CSV", "Parquet"
SUFFIXES = {
    ".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".json": JSON_LINES, ".csv": TABLE, ".tsv": TABLE, ".parquet": PARQUET,
}  # fmt: skip
COLUMNS = ("prompt", "messages", "turns")  # what is looked for where no column is named
BATCH_ROWS = 1024  # rows of a Parquet file that are in memory at once
LONGEST_FIELD = 2**31 - 1  # of a CSV file; the module's own limit is 128 KiB


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that is no prompt: its line (or row; 0 where it isn't known) and why."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}" if self.line else self.reason


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read.

    Attributes:
        suite: The prompts.
        form: What they were read as.
        bad: The records that are no prompts.
        too_long: Prompts left out because of their length.
    """

    suite: Suite
    form: str
    bad: tuple[BadRecord, ...] = field(default=())
    too_long: int = 0


def read_prompts(source: str, column: str | None = None) -> Reading:
    """Read a user's prompts; what is no prompt is left out and reported.

    Args:
        source: A file or `"-"` (stdin). By the suffix: JSON lines (`.jsonl`, `.ndjson`, `.json`, which may also be one
            array), CSV (`.csv`, `.tsv`), Parquet (`.parquet`); anything else is text with one prompt a line. Stdin is JSON
            where it begins like it, CSV where a column is named, else text.
        column: The field or column with the prompt: a text or a chat's messages. `None` takes `prompt`, `messages` or
            `turns`; of a table with one column that one.

    Raises:
        SpecDecError: If it can't be read, there is no such column, or no record is a prompt.
    """
    name = "standard input" if source == STDIN else source
    data = _bytes(source)
    form = _form(source, data, column)
    if form == PARQUET:
        rows = _parquet(name, data, column)
    elif form == TABLE:
        rows = _table(name, decoded(name, data), column, "\t" if source.endswith(".tsv") else ",")
    else:
        rows = _lines(form, decoded(name, data))
    found: dict[str, BenchPrompt] = {}
    bad: list[BadRecord] = []
    for number, record in rows:
        prompt = _prompt(number, record, column)
        if isinstance(prompt, BadRecord):
            bad.append(prompt)
            continue
        if prompt.id in found:
            prompt = replace(prompt, id=f"{prompt.id} (line {number})")
        found[prompt.id] = prompt
    if not found:
        first = f" The first, {bad[0]}" if bad else ""
        raise SpecDecError(
            f"There is no prompt in {name}, read as {form}: {len(bad)} records, none of them usable.{first}"
        )
    digest = hashlib.sha256(data).hexdigest()
    return Reading(Suite(name, digest, tuple(found.values())), form, tuple(bad))


def _bytes(source: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if source == STDIN else Path(source).read_bytes()
    except OSError as error:
        raise SpecDecError(f"The prompts file {source} can't be read: {error.strerror or error}.") from error


def _form(source: str, data: bytes, column: str | None) -> str:
    begin = data[:64].removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if source == STDIN:
        form = JSON_LINES if begin in (b"{", b"[") else PARQUET if data[:4] == b"PAR1" else TABLE if column else TEXT
    else:
        form = SUFFIXES.get(Path(source).suffix.lower(), TEXT)
    return JSON_ARRAY if form == JSON_LINES and begin == b"[" else form


def _lines(form: str, text: str) -> Iterator[tuple[int, Any]]:
    """Records with their lines; an exception in the place of one that can't be read."""
    if form == JSON_ARRAY:
        try:
            records = json.loads(text)
        except (ValueError, RecursionError):
            form = JSON_LINES  # lines of arrays, or a broken array: each line is reported
        else:
            yield from enumerate(records, start=1)
            return
    for number, line in numbered_lines(text):
        if form == TEXT:
            yield number, {"prompt": line.strip()}
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, error


def _table(name: str, text: str, column: str | None, separator: str) -> Iterator[tuple[int, Any]]:
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
        used = _column(name, reader.fieldnames or (), column)
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise SpecDecError(f"The prompts file {name} isn't a table of comma-separated values: {error}.") from error
    finally:
        csv.field_size_limit(before)
    for number, row in rows:
        yield number, _filled(row) | {"prompt": row.get(used)}


def _parquet(name: str, data: bytes, column: str | None) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import ArrowException, BufferReader, parquet
    except ImportError as error:
        raise SpecDecError(
            f"Reading {name} needs pyarrow. Install it (pip install pyarrow) or give JSON lines."
        ) from error
    try:
        file = parquet.ParquetFile(BufferReader(data))
        names = file.schema_arrow.names
        used = _column(name, names, column)
        wanted = [each for each in (used, "id", "category") if each in names]
        number = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=wanted):
            for row in batch.to_pylist():
                number += 1
                yield number, _filled(row) | {("prompt" if isinstance(row[used], str) else "messages"): row[used]}
    except ArrowException as error:
        raise SpecDecError(f"The prompts file {name} isn't a Parquet file: {error}.") from error


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("id", "category") if row.get(key) not in (None, "")}


def _column(name: str, columns: Sequence[str], wanted: str | None) -> str:
    """The column with the prompts."""
    listed = ", ".join(columns) or "none"
    if wanted is not None:
        if wanted not in columns:
            raise SpecDecError(f"{name} has no column {wanted!r}. It has: {listed}.")
        return wanted
    known = [each for each in COLUMNS if each in columns] or (list(columns) if len(columns) == 1 else [])
    if not known:
        raise SpecDecError(f"Say which column of {name} has the prompts with --column. It has: {listed}.")
    return known[0]


def _prompt(number: int, record: Any, column: str | None) -> BenchPrompt | BadRecord:
    if isinstance(record, Exception):
        reason = record.msg if isinstance(record, json.JSONDecodeError) else record
        return BadRecord(number, f"isn't JSON ({reason})")
    if isinstance(record, str):
        record = {"prompt": record}
    if column is not None and isinstance(record, dict) and column in record:
        given = record[column]
        record = _filled(record) | {"prompt" if isinstance(given, str) else "messages": given}
    elif column is not None and isinstance(record, dict) and "prompt" not in record and "messages" not in record:
        return BadRecord(number, f"has no {column!r}; it has {', '.join(map(str, list(record)[:8])) or 'nothing'}")
    try:
        prompt = prompt_of(record, "it", f"line {number}")
    except SpecDecError as error:
        return BadRecord(number, str(error))
    return replace(prompt, source=f"line {number}")
