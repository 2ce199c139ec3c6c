"""A clock that stands still while something is prepared once: products measured, graphs captured, code compiled.

The length controller learns what a forward costs. A round in which something was prepared would teach it nonsense.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


_spent = threading.local()


def now() -> float:
    """Seconds, those spent on preparations left out."""
    return time.perf_counter() - seconds_spent()


def seconds_spent() -> float:
    """Seconds that this thread has spent on preparations."""
    return getattr(_spent, "seconds", 0.0)


@contextmanager
def standing_still() -> Iterator[None]:
    """Count the time inside as preparation."""
    before, began = seconds_spent(), time.perf_counter()
    try:
        yield
    finally:
        _spent.seconds = before + time.perf_counter() - began
