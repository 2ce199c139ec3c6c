"""Prompts to measure with: the built-in suites, or a user's own file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import SpecDecError


BUILT_IN = "built-in"
CATEGORIES = ("chat", "code", "code_edit", "math", "math_zh")
OWN_CATEGORY = "own"
ALL = "all"


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt, its category, and its licence and source where they are known.

    `text` is what the user wrote, or the messages of a chat up to where the model answers.
    """

    id: str
    category: str
    text: str | list[dict[str, Any]]
    license: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """Prompts, where they come from (`"built-in"` or a path) and the SHA-256 of that file."""

    name: str
    sha256: str
    prompts: tuple[BenchPrompt, ...]

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories, in the order of their first prompts."""
        return tuple(dict.fromkeys(prompt.category for prompt in self.prompts))

    def select(self, categories: Sequence[str] | None) -> Suite:
        """The prompts of some categories, category by category.

        Args:
            categories: Their names; `None` is all of them.

        Raises:
            SpecDecError: If a category has no prompts.
        """
        wanted = tuple(dict.fromkeys(categories)) if categories else self.categories
        unknown = [name for name in wanted if name not in self.categories]
        if unknown:
            raise SpecDecError(
                f"There are no prompts of the category {unknown[0]!r} in {self.name}. "
                f"Choose from {', '.join(self.categories)}."
            )
        chosen = [prompt for name in wanted for prompt in self.prompts if prompt.category == name]
        return replace(self, prompts=tuple(chosen))


def built_in_suite() -> Suite:
    """The prompts that ship with the package, 24 for each of `CATEGORIES`, each with its licence."""
    return _suite(BUILT_IN, files(__package__).joinpath("bench_prompts.jsonl").read_bytes(), jsonl=True)


def read_suite(path: str | Path) -> Suite:
    """Read a user's prompts.

    Args:
        path: A `.jsonl` (or `.json`) file with one object a line: `prompt`, `turns` of which the first counts, or the
            `messages` of a chat; optionally `id` and `category`. Any other file is plain text with one prompt a line.

    Raises:
        SpecDecError: If the file can't be read, or a line isn't a prompt; the message names the line.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecDecError(f"The prompts file {path} can't be read: {error.strerror or error}.") from error
    return _suite(str(path), data, jsonl=path.suffix in (".jsonl", ".json"))


def _suite(name: str, data: bytes, *, jsonl: bool) -> Suite:
    lines = list(numbered_lines(decoded(name, data)))
    if not lines:
        raise SpecDecError(f"The prompts file {name} is empty. Give it one prompt a line.")
    read = _from_json if jsonl else _from_text
    prompts = tuple(read(name, number, line) for number, line in lines)
    ids = [prompt.id for prompt in prompts]
    if twice := next((each for each in ids if ids.count(each) > 1), None):
        raise SpecDecError(f"Two prompts in {name} have the id {twice!r}. Give each its own, or none.")
    return Suite(name, hashlib.sha256(data).hexdigest(), prompts)


def decoded(name: str, data: bytes) -> str:
    """The text of a file.

    Raises:
        SpecDecError: If it isn't UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecDecError(
            f"The prompts file {name} isn't UTF-8 text: {error.reason} at byte {error.start}."
        ) from error


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that aren't empty, with their numbers."""
    # not `splitlines`, which would also cut at separators that a JSON string may hold
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def _from_text(name: str, number: int, line: str) -> BenchPrompt:
    return BenchPrompt(f"line {number}", OWN_CATEGORY, line.strip())


def _from_json(name: str, number: int, line: str) -> BenchPrompt:
    place = f"{name}, line {number}"
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise SpecDecError(f"{place} isn't JSON ({reason}). Put one object on each line.") from error
    return prompt_of(record, place, f"line {number}")


def prompt_of(record: Any, place: str, default_id: str) -> BenchPrompt:
    """Read one record.

    Args:
        record: A mapping with a text in `prompt`, `turns` of which the first counts, or the messages of a chat in
            `messages` or `prompt`, whose answer at the end, if there is one, is left out; optionally `id` and `category`.
        place: What errors call it.
        default_id: The id of a record without one.

    Raises:
        SpecDecError: If it has no prompt, or its category is "all".
    """
    if not isinstance(record, dict):
        raise SpecDecError(f"{place} must be a JSON object with `prompt` or `turns`, got {type(record).__name__}.")
    turns = record.get("turns")
    text = record.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if text is None or isinstance(text, list):
        text = _messages(text or record.get("messages"))
    if not isinstance(text, list) and not (isinstance(text, str) and text.strip()):
        raise SpecDecError(
            f"{place} has no prompt: it needs a text in `prompt`, or in `turns` as the first element, or `messages` with "
            "`role` and `content`."
        )
    category = str(record.get("category") or OWN_CATEGORY)
    if category == ALL:
        raise SpecDecError(f"{place}: the category {ALL!r} is the name of the summary. Choose another.")
    return BenchPrompt(
        id=default_id if record.get("id") is None else str(record["id"]),
        category=category,
        text=text,
        license=str(record.get("license", "")),
        source=str(record.get("source", "")),
    )


def _messages(given: Any) -> list[dict[str, Any]] | None:
    """The messages up to where the model is to answer, or `None` if they aren't a chat's."""
    if not isinstance(given, (list, tuple)) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in given
    ):
        return None
    asked = list(given)
    while asked and asked[-1]["role"] == "assistant":
        del asked[-1]
    return asked or None
