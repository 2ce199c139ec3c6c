"""Progress bars on stderr: one line for each step of a long task."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tqdm import tqdm


SECONDS_BETWEEN_LINES = 15.0  # where stderr isn't a terminal


class Steps:
    """The steps of a task that is under way."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    @contextmanager
    def step(self, title: str, *, folder: Path | None = None, total: int | None = None) -> Iterator[None]:
        """Show a step for as long as the block runs.

        Args:
            title: What is done.
            folder: Where the step writes; its growth moves the bar.
            total: Bytes that the step will write in `folder`; without it the bar only shows activity.
        """
        task = self._bars.add_task(title, total=total)
        over = threading.Event()

        def follow(folder: Path) -> None:
            while not over.wait(0.2):
                with suppress(OSError):  # a temporary file may vanish while it is measured
                    self._bars.update(task, completed=_bytes_in(folder))

        if folder is not None:
            threading.Thread(target=follow, args=(folder,), daemon=True).start()
        try:
            yield
        finally:
            over.set()
            self._bars.update(task, total=1, completed=1)


class SilentBar(tqdm):  # type: ignore[misc]  # tqdm ships no types
    """Stands in for another library's own bar, which would draw over ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"disable": True}))


@contextmanager
def show_steps() -> Iterator[Steps]:
    """Draw progress bars on stderr while the block runs."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeElapsedColumn())
    # The stream is bound now, so that the bars go on where a step silences `sys.stderr`.
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as bars:
        yield Steps(bars)


@contextmanager
def show_count() -> Iterator[Callable[[str, int, int], None]]:
    """Draw one bar on stderr while the block runs; where stderr isn't a terminal, a line now and then.

    Yields:
        A function to call with what is done now, how many parts are done, and how many there are.
    """
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left:"), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield _say_now_and_then(console)
        return
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as bars:
        task = bars.add_task("", total=None)
        yield lambda title, done, total: bars.update(task, description=title, completed=done, total=total)


@contextmanager
def show_job() -> Iterator[tuple[Callable[[int, int, int], None], Callable[[str], None]]]:
    """Draw a bar for a long job on stderr, from the first news on; where stderr isn't a terminal, a line now and then.

    Yields:
        A function to call with the records that are done, all records, and the tokens generated so far; and a function
            that prints a line above the bar.
    """
    console = Console(file=sys.stderr)
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    bars = Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False)
    task = bars.add_task("", total=None)
    say = _say_now_and_then(console)
    began = time.monotonic()
    first: tuple[float, int] | None = None  # when the first news came, and how many records were done then

    def tell(done: int, total: int, tokens: int) -> None:
        nonlocal first
        now = time.monotonic()
        first = first or (now, done)
        news = f"{tokens / (now - began):.1f} tokens/s"
        if done > first[1]:
            left = (total - done) * (now - first[0]) / (done - first[1])
            news += f", {timedelta(seconds=round(left))} left"
        if console.is_terminal:
            bars.start()
            bars.update(task, description=news, completed=done, total=total)
        else:
            say(news, done, total)

    try:
        yield tell, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
    finally:
        if console.is_terminal:
            bars.stop()


def _say_now_and_then(console: Console) -> Callable[[str, int, int], None]:
    said = -SECONDS_BETWEEN_LINES

    def tell(title: str, done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said >= SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            console.print(f"{done}/{total} {title}", markup=False, highlight=False)

    return tell


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
