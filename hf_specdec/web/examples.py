"""Prompts to begin with, where speculation wins and where it doesn't, and runs that were recorded for the first look."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ..tools.demo import demo_prompts
from .timeline import Comparison


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt to try.

    Attributes:
        title: What visitors choose by.
        text: The prompt.
        temperature: What to sample with.
        max_new_tokens: Most tokens of the answer.
        strategy: Where drafts come from; one of `settings.STRATEGIES`.
        num_draft_tokens: Draft tokens a round; 0 leaves it to the controller.
    """

    title: str
    text: str
    temperature: float = 0.0
    max_new_tokens: int = 96
    strategy: str = "auto"
    num_draft_tokens: int = 0


@cache
def examples() -> tuple[Example, ...]:
    """The examples, the first one is what the page opens with: prompts of the terminal's demo, and texts of our own."""
    shipped = {each.id: each.text for each in demo_prompts()}
    lines = files(__package__).joinpath("examples.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        if id := record.pop("prompt", None):
            record["text"] = shipped[id]
    return tuple(Example(**record) for record in records)


def title_of(prompt: str, other: str = "own prompt") -> str:
    """What a run of a prompt is called in tables: the example's title, or `other`, so that nobody's own text is in them."""
    return next((each.title for each in examples() if each.text == prompt), other)


@cache
def traces() -> tuple[tuple[str, Comparison], ...]:
    """Recorded runs: where and how each was recorded, and the run."""
    folder = files(__package__).joinpath("traces")
    found = []
    for file in sorted(folder.iterdir() if folder.is_dir() else (), key=lambda each: each.name):
        if file.name.endswith(".json"):
            given = json.loads(file.read_text(encoding="utf-8"))
            found.append((given["recorded"], Comparison.from_dict(given["run"])))
    return tuple(found)
