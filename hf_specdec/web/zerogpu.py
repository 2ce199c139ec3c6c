"""Runs on a ZeroGPU Space, where a GPU is there only in a forked worker, for a time that is asked for in advance.

What goes to the worker and comes back is pickled. An error that leaves the worker ends it and loses its type, so ours
come as values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import gradio as gr

from ..errors import SpecDecError
from .settings import Limits, RunSettings
from .timeline import Comparison


Record = Callable[[str, RunSettings, Limits, str], Iterator[tuple[str, Comparison]]]

SLOWEST = 10  # tokens a second that a side may fall to before it is cut
PREFILL_SECONDS = 5.0
OTHER_SECONDS = 15.0  # warm-up and the comparison
TAG = re.compile(r"<[^>]*>")


def side_seconds(settings: RunSettings, limits: Limits) -> float:
    """How long one side may take: what its tokens need, so that short runs ask for little and wait less."""
    return min(limits.seconds, PREFILL_SECONDS + settings.max_new_tokens / SLOWEST)


def duration(key: str, settings: RunSettings, limits: Limits, title: str) -> int:
    """GPU seconds to ask for; both sides end inside them."""
    return math.ceil(2 * side_seconds(settings, limits) + OTHER_SECONDS)


def on_zerogpu(gpu: Callable[..., Any]) -> Callable[[Record], Record]:
    """What to pass to `build` as `wrap`.

    Args:
        gpu: `spaces.GPU`.
    """

    def wrap(record: Record) -> Record:
        def task(
            key: str, settings: RunSettings, limits: Limits, title: str
        ) -> Iterator[tuple[str, Comparison | None]]:
            try:
                yield from record(key, settings, replace(limits, seconds=side_seconds(settings, limits)), title)
            except SpecDecError as error:
                yield str(error), None

        worker = gpu(duration=duration)(task)

        def run(key: str, settings: RunSettings, limits: Limits, title: str) -> Iterator[tuple[str, Comparison]]:
            problem = ""
            try:
                with closing(worker(key, settings, limits, title)) as steps:
                    for stage, found in steps:
                        if found is None:
                            problem = stage
                        else:
                            yield stage, found
            except gr.Error as error:  # ZeroGPU's own: no quota left, no GPU free
                raise SpecDecError(TAG.sub("", str(error.message))) from error
            if problem:
                raise SpecDecError(problem)

        return run

    return wrap
