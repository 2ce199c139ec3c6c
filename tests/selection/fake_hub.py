"""A Hub in memory: configurations, file lists and tokenizers, and a log of what was asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hf_specdec.selection.asking import HubProblem
from hf_specdec.selection.candidates import Repository
from hf_specdec.selection.catalog import load_catalog
from hf_specdec.selection.files import excluded_reason


CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "model_configs.json").read_text(encoding="utf-8")
)
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@cache
def configs_by_id() -> dict[str, dict[str, Any]]:
    """The configuration of every member of the catalog; members of one size share one."""
    found = {}
    for family in load_catalog().families:
        sizes: dict[Any, dict[str, Any]] = {}
        for member in family.members:
            if member.id in CONFIGS:
                sizes[replace(member.facts, id="")] = CONFIGS[member.id]
        for member in family.members:
            found[member.id] = sizes[replace(member.facts, id="")]
    return found


def write_tokenizer(folder: Path, words: Sequence[str], chat: bool) -> Path:
    """A word-level tokenizer with these words, in this order, and a chat template or none."""
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"} if chat else {}))
    return folder


class FakeHub:
    """What `pick` asks of `selection.hub`, answered from memory.

    Attributes:
        repositories: Id → checkpoint.
        words: Id → words of its tokenizer; an id that isn't there has the words of the catalog's tokenizer name.
        problems: Id → kind of problem that asking for it gives.
        offline: Whether only what is complete may be read.
        asked: Ids that were asked for, in order.
    """

    excluded_reason = staticmethod(excluded_reason)

    def __init__(self, folder: Path, complete: Sequence[str] = (), offline: bool = False) -> None:
        self.folder, self.offline = folder, offline
        self.repositories: dict[str, Repository] = {}
        self.words: dict[str, list[str]] = {}
        self.problems: dict[str, str] = {}
        self.asked: list[str] = []
        self.tokenizers: dict[str, str] = {}
        for family in load_catalog().families:
            for member in family.members:
                self.add(member.id, configs_by_id()[member.id], complete=member.id in complete)
                self.tokenizers[member.id] = family.tokenizer

    def add(
        self, id: str, config: dict[str, Any], *, complete: bool = False, words: Any = None, **fields: Any
    ) -> None:
        config = {"architectures": ["SomeForCausalLM"], **config}
        if words is not None:
            self.words[id] = words
        fields = {"files": FILES, "weights_bytes": 10**9, "revision": "1234567", **fields}
        self.repositories[id] = Repository(id, config, "cache" if complete else "hub", complete=complete, **fields)

    def is_offline(self) -> bool:
        return self.offline

    def describe(
        self, id: str, *, revision: Any = None, token: Any = None, local_files_only: bool = False
    ) -> Repository:
        self.asked.append(id)
        if id in self.problems:
            raise HubProblem(self.problems[id], f"{id}: {self.problems[id]}")  # type: ignore[arg-type]
        if id not in self.repositories:
            raise HubProblem("missing", f"{id} is not on the Hub")
        found = self.repositories[id]
        if (self.offline or local_files_only) and not found.complete:
            raise HubProblem("offline", f"{id} is not in the cache")
        return found

    def tokenizer_folder(
        self, repository: Repository, *, token: Any = None, local_files_only: bool = False
    ) -> Path | None:
        if (self.offline or local_files_only) and not repository.complete:
            raise HubProblem("offline", f"the tokenizer of {repository.id} is not in the cache")
        if "tokenizer.json" not in repository.files:
            return None
        name = self.tokenizers.get(repository.id, "plain")
        words = self.words.get(repository.id) or [f"{name}-{index}" for index in range(50)]
        return write_tokenizer(self.folder / repository.id, words, "Instruct" in repository.id)

    def cached(self, authors: Any = None) -> list[Repository]:
        return [each for each in self.repositories.values() if each.complete and excluded_reason(each) is None]

    def search(self, author: str, words: Sequence[str], *, token: Any = None, limit: int = 50) -> list[Repository]:
        self.asked.append(f"search {author} {' '.join(words)}")
        return [
            each
            for id, each in self.repositories.items()
            if id.startswith(f"{author}/") and all(word.lower() in id.lower() for word in words)
        ]
