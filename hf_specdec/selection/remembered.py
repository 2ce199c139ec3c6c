"""Picks of earlier processes, in one small file under `HF_HOME`.

A file that can't be read, or that another version of the package or of the catalog wrote, counts as empty; one that can't
be written is done without.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from .candidates import Candidate, Choice, Repository
from .catalog import load_catalog


MOST = 256  # picks; the oldest goes first


def file() -> Path:
    """Where picks are kept."""
    return Path(constants.HF_HOME) / "hf_specdec" / "picks.json"


def key(target: Repository, where: str) -> str:
    """A target at a revision, or with a configuration where it has none.

    Args:
        target: The target.
        where: What else the pick depends on, such as whether the Hub was asked.
    """
    text = json.dumps(target.config, sort_keys=True, default=str)
    revision = target.revision or hashlib.sha256(text.encode()).hexdigest()[:16]
    name = os.path.abspath(target.id) if target.source == "path" else target.id
    return f"{name}@{revision} {where}"


def cache_state() -> str:
    """Changes when a checkpoint comes to the local cache or goes: what was the best pick may not be it any more."""
    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*"))
    return hashlib.sha256("\n".join(str(folder) for folder in folders).encode()).hexdigest()[:16]


def recall(entry: str) -> Choice | None:
    """An earlier pick, or `None`."""
    try:
        found = _read()[entry]
        candidates = tuple(_candidate(each) for each in found["candidates"])
        chosen = _candidate(found["chosen"])
        return Choice(str(found["target"]), chosen, candidates, tuple(map(str, found["notes"])))
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def remember(entry: str, choice: Choice) -> None:
    """Keep a pick."""
    picks = _read()
    picks.pop(entry, None)
    picks[entry] = asdict(choice)
    picks = dict(list(picks.items())[-MOST:])
    place = file()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place.parent, prefix="picks.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump({"version": _version(), "picks": picks}, stream)
            os.replace(name, place)
        except BaseException:
            os.unlink(name)
            raise
    except OSError:
        pass


def _read() -> dict[str, Any]:
    try:
        data = json.loads(file().read_text(encoding="utf-8"))
        picks = data["picks"] if data["version"] == _version() else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return picks if isinstance(picks, dict) else {}


def _version() -> str:
    try:
        package = version("hf-specdec")
    except PackageNotFoundError:  # a source tree that isn't installed
        package = "unknown"
    return f"{package}, catalog {load_catalog().version}"


def _candidate(fields: dict[str, Any]) -> Candidate:
    return Candidate(**{**fields, "reasons": tuple(fields["reasons"])})
