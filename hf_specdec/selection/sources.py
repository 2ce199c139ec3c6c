"""Where drafts for a target may come from, before anything is said of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecDecError
from .candidates import ModelFacts, Repository
from .catalog import DRAFT_KINDS, Catalog, Family, kind_of, stem
from .facts import decoder_config, facts_of


SAVED_NAME = "assistant_model"  # the field of a target's configuration that names its draft model
PADDING = 1024  # rows that the output layers of one family may differ by

RECURRENT = (
    "qwen3_5",
    "qwen3_next",
    "falcon_h1",
    "granitemoehybrid",
    "bamba",
    "mamba",
    "jamba",
    "lfm2",
)  # model types


@dataclass(frozen=True, slots=True)
class Target:
    """A target, as far as it could be read.

    Attributes:
        id: Hub id or path.
        facts: Its sizes.
        kind: One of `catalog.DRAFT_KINDS`, or `None`.
        family: Its family in the catalog, or `None`.
        repository: Its files, or `None` where they couldn't be read.
    """

    id: str
    facts: ModelFacts
    kind: str | None
    family: Family | None
    repository: Repository | None

    @classmethod
    def of(cls, id: str, repository: Repository | None, folder: Path | None, catalog: Catalog) -> Target | None:
        """A target by its configuration, else by the catalog; `None` where both say nothing.

        Args:
            id: Hub id or path.
            repository: Its files, or `None`.
            folder: Where its tokenizer is, or `None`.
            catalog: The catalog.

        Raises:
            SpecDecError: If the configuration isn't a causal language model's.
        """
        member = catalog.member(id)
        if repository is not None:
            facts = facts_of(repository)
        elif member is not None:
            facts = member.facts
        else:
            return None
        kind = member.kind if member else kind_of(id, talks(folder))
        return cls(id, facts, kind, catalog.family_of(id, facts), repository)

    @property
    def is_recurrent(self) -> bool:
        """Whether it has layers with a state in the place of a cache."""
        if self.facts.model_type.startswith(RECURRENT):
            return True
        if self.repository is None:
            return False
        kinds = getattr(decoder_config(self.repository.config), "layer_types", None) or ()
        return any(word in str(kind) for kind in kinds for word in ("linear", "mamba", "recurrent"))


@dataclass(frozen=True, slots=True)
class Option:
    """A possible draft.

    Attributes:
        id: Hub id or path.
        source: As in `Candidate`.
        kind: One of `catalog.DRAFT_KINDS`, a kind of head, or `None`.
        facts: Its sizes, where they are known.
        repository: Its files, where they were read.
    """

    id: str
    source: str
    kind: str | None = None
    facts: ModelFacts | None = None
    repository: Repository | None = None


def saved(target: Target) -> Iterator[Option]:
    """What the target's own `config.json` or `generation_config.json` names."""
    if target.repository is None:
        return
    folder = target.repository.folder
    beside = {} if folder is None else _read(folder / "generation_config.json")
    for config in (target.repository.config, beside):
        name = config.get(SAVED_NAME)
        if isinstance(name, str) and name and name != target.id:
            yield Option(name, "config")


def heads(target: Target, catalog: Catalog) -> Iterator[Option]:
    """Trained heads that the catalog knows for the target."""
    for head in catalog.heads(target.id):
        yield Option(head.id, "catalog", head.kind)


def cached(target: Target, catalog: Catalog, hub: Any) -> Iterator[Option]:
    """Whole checkpoints in the local cache that could have the target's ids."""
    for repository in hub.cached():
        yield from _smaller(target, repository, "cache", catalog)


def members(target: Target, catalog: Catalog, own: bool) -> Iterator[Option]:
    """Smaller members of the target's family, or of other families with the same ids."""
    kinds = DRAFT_KINDS.get(target.kind or "", tuple(DRAFT_KINDS))
    for member in catalog.drafts(target.family) if target.family else ():
        is_own = target.family is not None and member.family == target.family.name
        smaller = _is_smaller(member.facts, target.facts)
        if is_own == own and smaller and member.kind in kinds and member.id.lower() != target.id.lower():
            yield Option(member.id, "catalog", member.kind, member.facts)


def searched(target: Target, catalog: Catalog, hub: Any, token: Any) -> Iterator[Option]:
    """What the target's author has on the Hub under the same name.

    Raises:
        HubProblem: If the Hub can't be asked.
    """
    name = target.id
    if target.repository is not None and target.repository.source == "path":
        name = str(target.repository.config.get("_name_or_path", ""))
    author, words = name.rpartition("/")[0], stem(name)
    if author and "/" not in author and words:
        for repository in hub.search(author, [words], token=token):
            yield from _smaller(target, repository, "hub", catalog)


def _smaller(target: Target, repository: Repository, source: str, catalog: Catalog) -> Iterator[Option]:
    """A checkpoint that was found by looking around, if it is smaller and could have the target's ids."""
    if repository.id.lower() == target.id.lower():
        return
    if repository.problem:
        yield Option(repository.id, source, None, None, repository)
        return
    try:
        vocabulary = int(getattr(decoder_config(repository.config), "vocab_size", 0))
        apart = abs(vocabulary - target.facts.vocabulary)
        facts = facts_of(repository) if apart <= max(PADDING, target.facts.vocabulary // 50) else None
    except (SpecDecError, TypeError, ValueError):
        return
    if facts is not None and _is_smaller(facts, target.facts):
        member = catalog.member(repository.id)
        kind = member.kind if member else kind_of(repository.id, talks(repository.folder))
        yield Option(repository.id, source, kind, facts, repository)


def _is_smaller(draft: ModelFacts, target: ModelFacts) -> bool:
    return draft.active_parameters < target.active_parameters and draft.parameters < target.parameters


def talks(folder: Path | None) -> bool | None:
    """Whether the tokenizer in a folder has a chat template; `None` where there is none."""
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return None
    templates = any((folder / f"chat_template.{kind}").is_file() for kind in ("jinja", "json"))
    return templates or bool(_read(folder / "tokenizer_config.json").get("chat_template"))


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
