"""What the page keeps of a session, whatever its visitor calls it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_specdec.web.models import own_family
from hf_specdec.web.settings import Limits, RunSettings
from hf_specdec.web.timeline import Comparison, Side, Token


gr = pytest.importorskip("gradio")
app = pytest.importorskip("hf_specdec.web.app")


def visitor(name: Any) -> Any:
    return SimpleNamespace(session_hash=name)


@pytest.fixture
def page() -> Any:
    def record(key: str, settings: RunSettings, limits: Limits, title: str) -> Iterator[tuple[str, Comparison]]:
        given = {name: getattr(settings, name) for name in settings.__slots__}
        sides = (Side([Token(1, "a", 0.1)], seconds=0.1, done=True) for _ in range(2))
        found = Comparison(*sides, given, "model", "", title=title)
        yield "on", found
        yield "done", found

    return app._Page({"own": own_family("model", None, "float32")}, Limits(), record)


def run(page: Any, name: Any) -> Iterator[Any]:
    page.begin(visitor(name))
    return page.run("a prompt", "own", "auto", 0, 0.0, 4, True, 0, visitor(name))


@pytest.mark.parametrize("name", ["..", "../victim", "/absolute", "a/b", "~", "plain"])
def test_a_name_is_no_path(page: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Visitors choose the name of their session; files are written and removed for it."""
    page.folder = tempfile.TemporaryDirectory(dir=tmp_path)
    root = Path(page.folder.name)
    monkeypatch.chdir(tmp_path)
    list(run(page, name))
    page.show([], visitor(name))
    (folder,) = root.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == ["runs.csv", "runs.json"]
    page.leave(visitor(name))
    assert list(root.iterdir()) == []
    assert list(tmp_path.iterdir()) == [root]


@pytest.mark.parametrize("name", ["", None])
def test_no_name_is_refused(page: Any, name: Any) -> None:
    for call in (page.begin, page.stop, page.leave, page.refused):
        with pytest.raises(gr.Error, match="no session"):
            call(visitor(name))


def test_nothing_stays_of_a_page_that_was_closed(page: Any) -> None:
    running = run(page, "x")
    next(running)
    page.leave(visitor("x"))
    list(running)
    assert (page.results, page.stops, page.running) == ({}, {}, None)


def test_nothing_stays_of_a_run_that_was_shown(page: Any) -> None:
    list(run(page, "x"))
    assert len(page.results) == 1
    page.show([], visitor("x"))
    assert (page.results, page.stops, page.running) == ({}, {}, None)


def test_sessions_and_their_runs_are_counted(page: Any) -> None:
    for number in range(app.MOST_SESSIONS):
        for _ in range(app.MOST_RUNS + 2):
            page.begin(visitor(f"s{number}"))
    with pytest.raises(gr.Error, match="Too many"):
        page.begin(visitor("one more"))
    assert {len(events) for events in page.stops.values()} == {app.MOST_RUNS}


def test_stopping_what_has_ended_changes_nothing(page: Any) -> None:
    list(run(page, "x"))
    headline, *buttons = page.stop(visitor("x"))
    assert headline == gr.skip()
    assert len(buttons) == 2
