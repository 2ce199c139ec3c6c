"""What a check has measured so far, on disk: a stage is the unit, and the same command goes on behind the last one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SpecDecError
from ..tools.chat_model import cache_root


FORMAT = 2


def default_folder() -> Path:
    """Where states are kept if the user names no other place."""
    return cache_root() / "check"


def fingerprint(conditions: Mapping[str, Any]) -> str:
    """A name for settings, prompts, models and versions: other conditions, another state."""
    text = json.dumps(conditions, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe_files(name: str) -> list[Any] | str:
    """Names, sizes and times of a folder's files, by which a changed model is noticed; for a Hub id the id."""
    folder = Path(name)
    if not folder.is_dir():
        return name
    files = sorted(each for each in folder.iterdir() if each.is_file())
    return [[each.name, (found := each.stat()).st_size, found.st_mtime_ns] for each in files]


class State:
    """The finished stages of one check.

    Attributes:
        stages: Their results, by name.
        seconds: How long they took.
    """

    def __init__(self, folder: Path, key: str) -> None:
        """Read what is there.

        Args:
            folder: Where it is kept.
            key: From `fingerprint`.

        Raises:
            SpecDecError: If nothing can be kept there.
        """
        self.path = folder / f"{key}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        self.stages: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
            if known.get("format") == FORMAT:
                self.stages, self.seconds = dict(known["stages"]), dict(known["seconds"])
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            pass  # nothing there, or nothing that can be read: measure it anew

    def keep(self, stage: str, result: Any, seconds: float) -> None:
        """Write a finished stage; a kill meanwhile leaves the file as it was.

        Args:
            stage: Its name.
            result: What it returned.
            seconds: How long it took.

        Raises:
            SpecDecError: If it can't be written.
        """
        # as it will be read, so that a check that goes on gives the same report as one that was never stopped
        self.stages[stage] = json.loads(json.dumps(result), parse_constant=lambda name: None)
        self.seconds[stage] = round(seconds, 1)
        new = self.path.with_suffix(f".{os.getpid()}.tmp")
        whole = {"format": FORMAT, "stages": self.stages, "seconds": self.seconds}
        try:
            new.write_text(json.dumps(whole), encoding="utf-8")
            new.replace(self.path)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> SpecDecError:
        return SpecDecError(
            f"The state of the check can't be written to {self.path} ({error.strerror}). Name a folder with --save."
        )

    def forget(self) -> None:
        """Remove it: the next check measures everything anew."""
        self.stages, self.seconds = {}, {}
        self.path.unlink(missing_ok=True)
