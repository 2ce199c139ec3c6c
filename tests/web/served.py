"""The page on a free port of this machine, with models whose answer is the prompt (`parrot.py`)."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hf_specdec.web.settings import Limits

from .parrot import Parrot, parrot_family, save_parrot


LIMITS = Limits(prompt_characters=3000, prompt_tokens=600, new_tokens=300, seconds=30.0)
WAITING = 3  # places in the queue


@dataclass(frozen=True)
class Served:
    """A running page."""

    url: str
    page: Any
    parrot: Parrot

    @property
    def decodes(self) -> bool:
        """Whether a run holds the device."""
        return any(thread.name == "hf-specdec-demo" for thread in threading.enumerate())

    def wait_free(self, seconds: float = 10.0) -> None:
        """Wait until nothing runs."""
        wait_for(lambda: not self.decodes, seconds)


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until something is so; at most so long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it didn't come to be"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The page; all tests of a process share it."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'hf-specdec[web]'")
    from hf_specdec.web import app

    patch = pytest.MonkeyPatch()
    patch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("gradio")))
    patch.setattr(app, "WAITING", WAITING)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = save_parrot(tmp_path_factory.mktemp("parrot"))
    plain, parrot = parrot_family(folder)
    with_draft, _ = parrot_family(folder, with_draft=True)
    page = app.build({"plain": plain, "drafted": with_draft}, LIMITS)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _, url, _ = app.launch(page, server_name="127.0.0.1", quiet=True, prevent_thread_lock=True)
    yield Served(url, page, parrot)
    page.close()
    torch.set_num_threads(before)
    patch.undo()


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    """The page with nothing running, and a fast model."""
    server.parrot.delay, server.parrot.error = 0.0, None
    yield server
    server.parrot.delay, server.parrot.error = 0.0, None
    server.wait_free(30.0)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no chromium on this machine")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        started = driver.chromium.launch(executable_path=found, args=options)
        yield started
        started.close()

