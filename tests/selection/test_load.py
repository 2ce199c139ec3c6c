"""Loading drafts: what `from_pretrained` changes for the whole process while it runs meets no other load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.selection import load

from ..tiny import tiny_model


class Counted:
    """A lock that tells how many have asked for it."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.asked = lock, threading.Semaphore(0)

    def __enter__(self) -> None:
        self.asked.release()
        self.lock.acquire()

    def __exit__(self, *error: Any) -> None:
        self.lock.release()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    tiny_model().save_pretrained(tmp_path)
    yield tmp_path
    load.LOADED.forget()


def test_one_load_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads that load for two targets, the second waits until the first is done."""
    lock, loads = Counted(load.LOADING), list[str]()
    from_pretrained = load.AutoModelForCausalLM.from_pretrained

    def slow(*given: Any, **options: Any) -> Any:
        loads.append("begin")
        if len(loads) == 1:  # no sooner than both have asked
            assert all(lock.asked.acquire(timeout=60) for _ in range(2))
        found = from_pretrained(*given, **options)
        loads.append("end")
        return found

    monkeypatch.setattr(load, "LOADING", lock)
    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", slow)
    drafts = list[Any]()
    threads = [
        threading.Thread(
            target=lambda target: drafts.append(load.load_draft(target, str(folder))), args=(tiny_model(),)
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert loads == ["begin", "end"] * 2
    assert len({id(draft) for draft in drafts}) == 2


def test_a_load_inside_a_load(folder: Path) -> None:
    """No thread waits for itself."""
    drafts = list[Any]()

    def nested() -> None:
        with load.LOADING:
            drafts.append(load.load_draft(tiny_model(), str(folder)))

    thread = threading.Thread(target=nested, daemon=True)
    thread.start()
    thread.join(60)
    assert len(drafts) == 1
