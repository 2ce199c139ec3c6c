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


def public(settings: RunSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__slots__}


@pytest.fixture
def page() -> Any:
    def record(key: str, settings: RunSettings, limits: Limits, title: str) -> Iterator[tuple[str, Comparison]]:
        sides = (Side([Token(1, "a", 0.1)], seconds=0.1, done=True) for _ in range(2))
        found = Comparison(*sides, public(settings), "model", "", title=title)
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


def test_what_does_not_change_is_drawn_once() -> None:
    def record(key: str, settings: RunSettings, limits: Limits, title: str) -> Iterator[tuple[str, Comparison]]:
        found = Comparison(Side(), Side(), public(settings), "model", "", title=title, checked=False)
        for stage, one in (("off", found.off), ("on", found.on)):
            for number in range(3):
                one.tokens.append(Token(number, f"{stage}{number}", 0.1))
                yield stage, found
            one.done, one.cut = True, "time limit" if stage == "off" else ""
        yield "checking", found
        yield "checking", found
        found.checked = True
        yield "done", found

    page = app._Page({"own": own_family("model", None, "float32")}, Limits(), record)
    updates = [[each != gr.skip() for each in update] for update in run(page, "x")]
    headline, off, on, legend = zip(*updates, strict=True)
    assert headline == (True, False, False, True, False, False, True, False, True)
    assert off == (
        True,
        True,
        True,
        True,
        False,
        False,
        False,
        False,
        True,
    )  # its end is seen with the next one's begin
    assert on == (True, False, False, True, True, True, False, False, True)
    assert legend == (True, *[False] * 7, True)


@pytest.mark.parametrize("drawn", [False, True], ids=["before", "during"])
def test_a_run_is_stopped_at_its_check(drawn: bool) -> None:
    """What was measured stays, and what wasn't looked at isn't claimed."""
    closed = []

    def record(key: str, settings: RunSettings, limits: Limits, title: str) -> Iterator[tuple[str, Comparison]]:
        sides = (Side([Token(id, "a", 0.1)], seconds=0.1, done=True) for id in range(2))
        found = Comparison(*sides, public(settings), "model", "", title=title, checked=False)
        try:
            yield "on", found
            while True:
                yield "checking", found
        finally:
            closed.append(found)

    page = app._Page({"own": own_family("model", None, "float32")}, Limits(), record)
    running = run(page, "x")
    for _ in range(1 + drawn):
        next(running)
    page.stop(visitor("x"))
    *_, (headline, *_) = running
    assert len(closed) == 1
    assert "1.00×" in headline
    assert "same text: no" in headline
    assert "The check was stopped" in headline
    assert "Ended early" not in headline
    assert page.results


def test_a_recorded_run_is_not_shown_over_ones_own(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Comparison(Side(), Side(), {"family": "own", "prompt": "-"}, "model", "", title="an example")
    monkeypatch.setattr(app, "traces", lambda: (("there", old),))
    assert "recorded" in page.show_recorded("an example", visitor("x"))[0]
    page.begin(visitor("x"))
    assert page.show_recorded("an example", visitor("x")) == [gr.skip()] * 11
    assert "recorded" in page.show_recorded("an example", visitor("another"))[0]


def test_a_link_is_read_and_what_is_wrong_in_it_said(page: Any) -> None:
    *values, title, said = page.from_link("prompt=a+b&seed=7")
    assert (values[0], values[-1], title, said) == ("a b", 7, app.OWN, gr.skip())
    *values, title, said = page.from_link(f"prompt={'<b>' * 5000}&seed=7")
    assert (values[0], values[-1], title) == (app.examples()[0].text, 7, app.examples()[0].title)
    assert "15,000 characters; at most 8,000" in said
    *_, said = page.from_link("strategy=<b>")
    assert "&lt;b&gt;" in said
    assert "<b>" not in said
    assert page.from_link("__theme=dark") == [gr.skip()] * 10


def test_stopping_what_has_ended_changes_nothing(page: Any) -> None:
    list(run(page, "x"))
    headline, *buttons = page.stop(visitor("x"))
    assert headline == gr.skip()
    assert len(buttons) == 2
