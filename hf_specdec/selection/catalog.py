"""Which models belong together: a data file of families, and the rules for names that it doesn't hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from .candidates import ModelFacts


FILE = Path(__file__).with_name("catalog.json")

# kinds of heads that the loop can run; the others are listed with the reason that it can't
RUNNABLE_HEADS: frozenset[str] = frozenset()

# which kinds of draft model a kind of target takes, the best first: the others have learnt to say other things
DRAFT_KINDS = {
    "base": ("base",),
    "instruct": ("instruct",),
    "thinking": ("thinking", "instruct"),
    "coder-base": ("coder-base", "base"),
    "coder": ("coder", "instruct"),
    "math-base": ("math-base", "base"),
    "math": ("math", "instruct"),
}
_WORDS = {
    "thinking": r"think(ing)?|reason(ing|er)?|r1|qwq",
    "code": r"\w*cod(e|er|ellama|egen)|starcoder\w*",
    "math": r"math\w*",
    "chat": r"instruct|chat|it|sft|dpo|rlhf|assistant|hermes|tulu|vicuna|zephyr|orca|dolphin",
    "base": r"base|pt|pretrain(ed)?|hf",
}
_SIZE = re.compile(r"(?i)^(\d+x)?(a|e)?\d+(\.\d+)?[bmk](illion)?$")


OLDEST = ("openai-community", "distilbert")  # owners whose models have a name without them too


@dataclass(frozen=True, slots=True)
class Member:
    """A model of a family, and what is known of its size."""

    id: str
    kind: str
    family: str
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Head:
    """A trained head that drafts for the targets named."""

    id: str
    kind: str
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one author with one tokenizer.

    Attributes:
        name: What people call it.
        authors: Who publishes it on the Hub.
        tokenizer: Families with the same name here have the same ids.
        members: The smallest first.
        heads: Trained heads for its members.
    """

    name: str
    authors: tuple[str, ...]
    tokenizer: str
    members: tuple[Member, ...]
    heads: tuple[Head, ...]


@dataclass(frozen=True, slots=True)
class Catalog:
    """The families, and acceptance that others have measured."""

    version: int
    families: tuple[Family, ...]
    acceptance: dict[tuple[str, str], float] = field(default_factory=dict)

    def members(self) -> Iterator[Member]:
        """Every member of every family."""
        for family in self.families:
            yield from family.members

    def member(self, id: str) -> Member | None:
        """The entry of a Hub id, in any case; the oldest models have a name without an owner too (`"gpt2"`)."""
        names = [id.lower()] if "/" in id else [f"{owner}/{id}".lower() for owner in OLDEST]
        return next((each for each in self.members() if each.id.lower() in names), None)

    def family_of(self, id: str, facts: ModelFacts | None) -> Family | None:
        """The family of a model: by its id, else by its sizes, as fine-tuned models and local copies keep them.

        Args:
            id: Hub id or path.
            facts: Its sizes, where they are known.
        """
        known = self.member(id)
        for family in self.families:
            if known is not None and known.family == family.name:
                return family
        alike = [] if facts is None else [each for each in self.families if any(map(_like(facts), each.members))]
        name = _plain(id)
        # two families may have the same sizes: the one whose name is in the id
        return max(alike, key=lambda family: (_plain(family.name) in name, *_shared(family, name)), default=None)

    def drafts(self, family: Family) -> list[Member]:
        """Members of all families with a family's token ids; its own first."""
        others = [each for each in self.families if each.tokenizer == family.tokenizer and each is not family]
        return [member for each in (family, *others) for member in each.members]

    def heads(self, id: str) -> list[Head]:
        """Trained heads for a target."""
        return [
            head for family in self.families for head in family.heads if id.lower() in map(str.lower, head.targets)
        ]


@lru_cache(maxsize=1)
def load_catalog() -> Catalog:
    """Read the catalog that comes with the package."""
    return read_catalog(json.loads(FILE.read_text(encoding="utf-8")))


def read_catalog(data: dict[str, Any]) -> Catalog:
    """Turn the data of a catalog file into a `Catalog`."""
    families = []
    for entry in data["families"]:
        members = []
        for sizes in entry["members"]:
            numbers = {name: value for name, value in sizes.items() if name != "ids"}
            for kind, ids in sizes["ids"].items():
                for id in ids:
                    members.append(Member(id, kind, entry["name"], ModelFacts(id=id, **numbers)))
        heads = tuple(Head(each["id"], each["kind"], tuple(each["targets"])) for each in entry["heads"])
        members.sort(key=lambda member: member.facts.active_parameters)
        authors = tuple(entry["authors"])
        families.append(Family(entry["name"], authors, entry["tokenizer"], tuple(members), heads))
    known = {(each["target"], each["draft"]): float(each["acceptance"]) for each in data["pairs"]}
    return Catalog(int(data["version"]), tuple(families), known)


def kind_of(id: str, chat: bool | None = None) -> str | None:
    """The kind of a model, one of `DRAFT_KINDS`, by its name; `None` where that says nothing.

    Args:
        id: Hub id or path.
        chat: Whether it has a chat template, where that is known.
    """
    words = _words(id)

    def named(group: str) -> bool:
        return any(re.fullmatch(_WORDS[group], word) for word in words)

    if named("thinking"):
        return "thinking"
    talks = named("chat") if named("chat") or named("base") else chat
    for group, kind in (("code", "coder"), ("math", "math")):
        if named(group):
            return kind if talks else f"{kind}-base"
    return None if talks is None else "instruct" if talks else "base"


def stem(id: str) -> str:
    """A model's name up to its size, by which its siblings are searched: `"Qwen3"` of `"Qwen/Qwen3-8B"`."""
    parts = re.split(r"([-_])", id.rpartition("/")[2])
    kept: list[str] = []
    for part in parts:
        if _SIZE.match(part):
            break
        kept.append(part)
    return "".join(kept).strip("-_")


def _words(id: str) -> list[str]:
    return [word for word in re.split(r"[-_./\s]", id.rstrip("/").rpartition("/")[2].lower()) if word]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _shared(family: Family, name: str) -> tuple[int, int]:
    """How many of a family's words a name has, and how few it lacks."""
    words = [word for word in re.split(r"[^a-z0-9.]+", family.name.lower()) if len(word) > 1]
    found = sum(_plain(word) in name for word in words)
    return found, found - len(words)


def _like(facts: ModelFacts) -> Any:
    """Whether a member has these sizes; a few added tokens don't count."""

    def like(member: Member) -> bool:
        known = member.facts
        return (
            known.model_type == facts.model_type
            and known.layers == facts.layers
            and known.kv_numbers == facts.kv_numbers
            and abs(known.vocabulary - facts.vocabulary) <= 1024
            and abs(known.parameters - facts.parameters) <= 0.02 * known.parameters
        )

    return like
