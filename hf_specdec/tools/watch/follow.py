"""Reads a server again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ...errors import SpecDecError
from .engines import Reading
from .observe import Observed, between
from .servers import Server


def follow(
    server: Server, first: Reading, *, interval: float, seconds: float | None = None
) -> Iterator[Observed | SpecDecError]:
    """Watch a server.

    Args:
        server: Which one.
        first: A reading of it, taken just now.
        interval: Seconds between readings.
        seconds: How long; `None` is without end.

    Yields:
        What it did since the last reading that succeeded, or why this one didn't.
    """
    began = last = time.monotonic()
    due, before = began + interval, first
    while seconds is None or due <= began + seconds + interval / 2:
        time.sleep(max(due - time.monotonic(), 0.0))
        due = max(due + interval, time.monotonic())
        try:
            after = server.read()
        except SpecDecError as error:
            yield error
            continue
        if after.engine != before.engine:
            yield SpecDecError(f"The server changed from {before.engine} to {after.engine}.")
            before, last = after, time.monotonic()
            continue
        read_at = time.monotonic()
        observed = between(before, after, read_at - last)
        if not observed.counts.steps:
            observed = between(before, after, read_at - last, server.says(after))
        yield observed
        before, last = after, read_at
