"""The rules of each engine: which flags, from which version on, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from ..errors import SpecDecError


FOLDER = Path(__file__).with_name("rules")
ENGINES = (
    "vllm", "llama-cpp", "tgi", "sglang", "tensorrt-llm", "openvino", "mlx-lm", "transformers", "custom-generate",
)  # fmt: skip
METHODS = ("draft_model", "prompt_lookup")


class ExportRefused(SpecDecError):
    """The engine can't do what was asked for.

    Attributes:
        reason: Why.
        instead: What to do.
    """

    def __init__(self, reason: str, instead: str) -> None:
        first = reason.split(" ", 1)[0]
        # names such as llama.cpp and vLLM stay as they are
        upper = reason[:1].upper() + reason[1:] if first.isalpha() and first.islower() else reason
        super().__init__(f"{upper}. {instead}.")
        self.reason, self.instead = reason, instead


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What an engine takes for one method, from one version on.

    Attributes:
        method: `"draft_model"`, `"prompt_lookup"`, or `"any"`.
        since: The first version it holds for; `None`: all up to `before`.
        before: The first one that it no longer holds for; `None`: all since.
        command: Arguments of a shell command, with `{placeholders}`.
        config: What `{config}` stands for, as JSON; with `file` what that file holds.
        file: Name of a file that the command reads.
        code: Instead of a command: lines of Python.
        folder: Whether a `custom_generate` folder is written.
        family: How drafts are judged above temperature 0 (`acceptance.FAMILIES`); `None` where that isn't known or exact.
        weaker: Whether its own drafts are known to be worse than ours.
        sampled: What to add above temperature 0, and the family then.
        other_sizes: What to change where the two vocabularies have different sizes.
        max_batch: How it is told to speculate up to a batch size only.
        refuse: `reason` and `instead`, where it can't be done.
        notes: What to know.
        sources: Where it is from.
        checked: What was seen in which file of which release.
    """

    method: str
    since: str | None = None
    before: str | None = None
    command: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    file: str | None = None
    code: tuple[str, ...] = ()
    folder: bool = False
    family: str | None = None
    weaker: bool = False
    sampled: dict[str, Any] | None = None
    other_sizes: dict[str, Any] | None = None
    max_batch: str | None = None
    refuse: dict[str, str] | None = None
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    checked: tuple[dict[str, Any], ...] = ()

    @property
    def versions(self) -> str:
        """Such as `"0.15 to before 0.24"`."""
        if self.since is None:
            return "all" if self.before is None else f"before {self.before}"
        return f"{self.since} and newer" if self.before is None else f"{self.since} to before {self.before}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine and its rules.

    Attributes:
        name: As on the command line.
        title: Its own name.
        version_command: What prints its version.
        newest: The newest version the rules were checked against.
        date: When that was released, or committed.
        is_build: Whether versions are build numbers (`b11312`).
        vocabulary: How it compares vocabularies (`vocabularies.check`).
        url: Where its server listens by default.
        watched: Whether `hf-specdec watch` reads its counters.
        after_launch: How to see that drafts are used.
        notes: What to know, whatever the version.
        rules: The rules; of a method's, one fits a version.
    """

    name: str
    title: str
    version_command: str
    newest: str
    date: str
    is_build: bool
    vocabulary: str
    url: str | None
    watched: bool
    after_launch: str
    notes: tuple[str, ...]
    rules: tuple[Rule, ...]

    def version(self, text: str | None) -> Version:
        """Read a version as the engine prints it; `None` is the newest that was checked.

        Raises:
            SpecDecError: If it is none.
        """
        if text is None:
            return Version(self.newest)
        given = text.strip()
        match = re.fullmatch(r"b?(\d+)(-\w+)?", given) if self.is_build else re.fullmatch(r"v?(\S+)", given)
        try:
            if match is None:
                raise InvalidVersion
            # pre-releases and local builds are what they lead to: 0.24.0rc1 has 0.24's flags
            return Version(Version(match[1]).base_version)
        except InvalidVersion:
            kind = "build, such as b11312" if self.is_build else f"version, such as {self.newest}"
            message = f"{text!r} is no {self.title} {kind}. `{self.version_command}` prints it."
            raise SpecDecError(message) from None

    def rule(self, method: str, version: Version) -> Rule:
        """The rule of a method for a version."""
        for rule in self.rules:
            if rule.method in (method, "any") and _holds(rule, version):
                return rule
        raise AssertionError(f"{self.name} has no rule for {method} in {version}")

    def doubt(self, text: str | None) -> str | None:
        """What speaks against trusting the rules for a version, or `None`."""
        newest = f"b{self.newest}" if self.is_build else self.newest
        checked = f"{self.title} {newest} ({self.date})"
        if text is None:
            return f"no version was given: this is for {checked}, the newest checked; `{self.version_command}` prints yours"
        if self.version(text) > Version(self.newest):
            return f"{text} is newer than {checked}, which the rules were last checked against; see its release notes"
        return None


def _holds(rule: Rule, version: Version) -> bool:
    late_enough = rule.since is None or version >= Version(rule.since)
    return late_enough and (rule.before is None or version < Version(rule.before))


def _rule(entry: dict[str, Any]) -> Rule:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
    }
    return Rule(**fields)


@cache
def load_engine(name: str) -> Engine:
    """Read the rules of an engine.

    Args:
        name: One of `ENGINES`.

    Raises:
        SpecDecError: If there is none of this name.
    """
    if name not in ENGINES:
        raise SpecDecError(f"There is no engine {name!r} to export to. Choose one of {', '.join(ENGINES)}.")
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    rules = tuple(map(_rule, data["rules"]))
    return Engine(
        name=data["engine"],
        title=data["title"],
        version_command=data["version_command"],
        newest=data["newest"]["version"],
        date=data["newest"]["date"],
        is_build=data.get("version_kind") == "build",
        vocabulary=data["vocabulary"],
        url=data.get("url"),
        watched=data.get("watched", "url" in data),
        after_launch=data["after_launch"],
        notes=tuple(data.get("notes", ())),
        rules=rules,
    )
