"""The page as it is served to the tests, and how to wait for what it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_specdec.web.recording import _DEVICE
from hf_specdec.web.settings import Limits

from .parrot import Parrot


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
        return _DEVICE.locked()

    def wait_free(self, seconds: float = 10.0) -> None:
        """Wait until nothing runs."""
        wait_for(lambda: not self.decodes, seconds)


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until something is so; at most so long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it didn't come to be"
        time.sleep(0.02)
