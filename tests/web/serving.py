"""Fixtures: the page on a free port of this machine, with models whose answer is the prompt (`parrot.py`), and a browser."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .parrot import parrot_family, save_parrot
from .served import LIMITS, WAITING, Served, absent, needed


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The page; all tests of a process share it."""
    needed("gradio")
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
    server.parrot.error = None
    server.parrot.release()
    yield server
    server.parrot.error = None
    server.parrot.release()
    server.wait_free()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium."""
    playwright = needed("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        absent("chromium")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        started = driver.chromium.launch(executable_path=found, args=options)
        yield started
        started.close()
