"""The page as it is served to the tests, and how to wait for what it does."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest

from hf_specdec.web.recording import _DEVICE
from hf_specdec.web.settings import Limits

from .parrot import Parrot


LIMITS = Limits(prompt_characters=3000, prompt_tokens=600, new_tokens=300, seconds=120.0)
WAITING = 3  # places in the queue
SECONDS = 30.0  # to wait for what takes far less, on machines that do much else
CRAWL = 0.2  # seconds a forward: a run of some hundred tokens ends in that time only where something ends it


@dataclass(frozen=True)
class Served:
    """A running page."""

    url: str
    page: Any
    parrot: Parrot

    @property
    def decodes(self) -> bool:
        """Whether a run holds the device."""
        return _DEVICE.locked()

    @property
    def waiting(self) -> int:
        """Runs in the queue."""
        return len(self.page._queue)

    def wait_free(self) -> None:
        """Wait until nothing runs and nothing is about to."""
        wait_for(lambda: not self.decodes and not self.waiting)


def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it didn't come to be"
        time.sleep(0.02)


def absent(what: str) -> NoReturn:
    """Skip tests that need it; on CI, which has it, fail."""
    if os.environ.get("CI"):
        pytest.fail(f"CI needs {what}")
    pytest.skip(f"needs {what}")


def needed(module: str) -> Any:
    """A module that only tests of the page need."""
    try:
        return importlib.import_module(module)
    except ImportError:
        absent(module)
