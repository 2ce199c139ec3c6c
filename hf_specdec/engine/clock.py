"""A clock that stands still while something is prepared once: products measured, graphs captured, code compiled.

The length controller learns what a forward costs. A round in which something was prepared would teach it nonsense.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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


class Clock:
    """Marks points in time on a device's own queue, so that work can be timed without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """This moment: an event where work is queued, else seconds; both know what was spent on preparations."""
        if self.device.type != "cuda":
            return now()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event, seconds_spent()

    def between(self, first: Any, last: Any) -> float:
        """Seconds from one mark to another; on a GPU ask only when the work in front of `last` has been waited for."""
        if isinstance(first, float):
            return float(last - first)
        (began, spent_before), (ended, spent) = first, last
        ended.synchronize()
        return float(max(began.elapsed_time(ended) / 1000.0 - (spent - spent_before), 0.0))
