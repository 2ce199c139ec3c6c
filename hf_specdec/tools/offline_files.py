"""The files of an offline job, so that a kill at any moment loses at most the batches that were under way.

While the job runs, every process appends its finished batches to a part file of its own, one line a batch, and syncs.
Nobody writes to a part file of an earlier run: a torn last line is never followed by another one, and is not read.
At the end the parts are put in order and take the place of the output in one step.

    out.jsonl               the records, when all are there
    out.jsonl.stats.jsonl   their statistics, likewise
    out.jsonl.job.json      the settings, and in the end the summary
    out.jsonl.parts/        finished batches, until then
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock, Timeout

from ..errors import SpecDecError
from .offline_records import WINDOW


class Place(NamedTuple):
    """Where the line of a finished batch begins."""

    path: Path
    offset: int


class JobFiles:
    """The files of one job.

    Attributes:
        out: Where the records go.
        stats: Where their statistics go.
        manifest: The settings, and the summary of a finished job.
        parts: Folder of what is finished so far.
        finished: Place of every finished batch that was seen by `scan`, by number.
        num_records: Records in them.
        num_tokens: Tokens in them.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.stats, self.manifest, self.parts = (
            out.with_name(out.name + end) for end in (".stats.jsonl", ".job.json", ".parts")
        )
        self.finished: dict[int, Place] = {}
        self.num_records = self.num_tokens = 0
        self._read: dict[Path, int] = {}
        self._lock = FileLock(self.parts / "lock")

    def open(self, settings: Mapping[str, Any], restart: bool) -> None:
        """Begin the job, or go on with it; one process at a time.

        Args:
            settings: All that the texts depend on.
            restart: Forget what there is.

        Raises:
            SpecDecError: If the output belongs to something else, or another process is at work on it.
        """
        self.parts.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise SpecDecError(f"Another process is writing {self.out}. Wait for it, or stop it first.") from None
        try:
            self._open(dict(settings), restart)
        except SpecDecError:
            self.close()
            raise

    def close(self) -> None:
        """Let others open the job; without parts, their folder goes, unless something else is in it."""
        if self._lock.is_locked:
            if not self._part_files():
                with contextlib.suppress(OSError):
                    for name in ("out", "stats", "job", "lock"):
                        (self.parts / name).unlink(missing_ok=True)
                    self.parts.rmdir()
            self._lock.release()

    def summary(self) -> dict[str, Any] | None:
        """The summary of the opened job, if it is complete."""
        known = self._read_manifest()
        return None if known is None else known["summary"]

    def _open(self, settings: dict[str, Any], restart: bool) -> None:
        known = None if restart else self._read_manifest()
        if known is None and not restart:
            for path in (self.out, self.stats):
                if path.exists():
                    raise SpecDecError(
                        f"{path} exists and is no job's. Name another output, or overwrite it with --restart."
                    )
        if known is not None:
            complete = known["summary"] is not None
            changes = _changes(known["settings"], settings)
            if changes and (self.out.exists() if complete else JobFiles(self.out).scan()):
                raise SpecDecError(
                    f"{self.out} was begun with other settings: {changes}. Go on with the same ones, name another file, "
                    "or start over with --restart."
                )
            if not changes and not complete:
                return
            if not changes and self.out.exists():
                self._remove_parts()
                return
        self._remove_parts()
        self._write_manifest(settings, None)

    def scan(self) -> dict[int, Place]:
        """Look for batches that any process has finished since the last look.

        Returns:
            `finished`.
        """
        for path in sorted(self._part_files()):
            with path.open("rb") as file:
                offset = file.seek(self._read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):  # torn, or not all there yet
                        break
                    with contextlib.suppress(ValueError, KeyError, TypeError):  # left behind by a full disk or a crash
                        self._note(json.loads(line), Place(path, offset))
                    offset += len(line)
                self._read[path] = offset
        return self.finished

    def _note(self, batch: dict[str, Any], place: Place) -> None:
        tokens = [record["num_tokens"] for record, _ in batch["records"]]
        if batch["batch"] not in self.finished:
            self.finished[batch["batch"]] = place
            self.num_records += len(tokens)
            self.num_tokens += sum(tokens)

    def writer(self, rank: int) -> PartWriter:
        """A new part file; there is none before the first batch.

        Args:
            rank: Of the process that writes it; part of the name, for those who look.
        """
        return PartWriter(self.parts / f"part-{rank:05}-{secrets.token_hex(4)}.jsonl")

    def merge(self, total: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Put the finished batches in order and move them to their place. Memory: `WINDOW` batches.

        Args:
            total: Batches of the job; all of them must be finished.

        Yields:
            Every record and its statistics, in order, as they are written; behind the last one the files are in place.
        """
        out, stats = self.parts / "out", self.parts / "stats"
        with out.open("wb") as out_file, stats.open("wb") as stats_file:
            for first in range(0, total, WINDOW):
                window = []
                places = sorted(self.finished[number] for number in range(first, min(first + WINDOW, total)))
                for path, of_path in itertools.groupby(places, key=lambda place: place.path):
                    with path.open("rb") as file:
                        for place in of_path:
                            file.seek(place.offset)
                            window += json.loads(file.readline())["records"]
                for record, row in sorted(window, key=lambda pair: int(pair[0]["index"])):
                    out_file.write(to_line(record))
                    stats_file.write(to_line(row))
                    yield record, row
            for written in (out_file, stats_file):
                written.flush()
                os.fsync(written.fileno())
        os.replace(stats, self.stats)
        os.replace(out, self.out)

    def complete(self, settings: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
        """Note that the job is complete, and remove the parts.

        Args:
            settings: As in `open`.
            summary: What `open` shall return from now on.
        """
        self._write_manifest(settings, summary)
        self._remove_parts()

    def _remove_parts(self) -> None:
        """Unlink the part files; whoever is left over from an earlier run then writes to nowhere."""
        for path in self._part_files():
            path.unlink()

    def _part_files(self) -> list[Path]:
        return list(self.parts.glob("part-?????-????????.jsonl"))

    def _read_manifest(self) -> dict[str, Any] | None:
        try:
            known = json.loads(self.manifest.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            known = None
        if not isinstance(known, dict) or not isinstance(known.get("settings"), dict) or "summary" not in known:
            raise SpecDecError(f"{self.manifest} can't be read. Remove it, or start over with --restart.")
        return known

    def _write_manifest(self, settings: Mapping[str, Any], summary: Mapping[str, Any] | None) -> None:
        text = json.dumps({"settings": dict(settings), "summary": summary}, indent=2)
        new = self.parts / "job"
        with new.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.manifest)


class PartWriter:
    """Appends finished batches to a part file, each on disk before `append` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, batch: Mapping[str, Any]) -> None:
        """Write one batch.

        Args:
            batch: `batch`, its number, and `records`, a pair of record and statistics for each.
        """
        if self._file is None:
            self._file = self._path.open("xb")
        self._file.write(to_line(batch))
        self._file.flush()
        os.fsync(self._file.fileno())


def _changes(known: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two settings, in words; empty if nothing does."""
    names = [name for name in {**known, **now} if known.get(name) != now.get(name)]
    return ", ".join(f"{name} was {known.get(name)!r} and is {now.get(name)!r}" for name in names)


def to_line(value: Mapping[str, Any]) -> bytes:
    """An object as a line of JSON in UTF-8; a lone surrogate, which UTF-8 has no bytes for, is escaped as JSON does it."""
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
