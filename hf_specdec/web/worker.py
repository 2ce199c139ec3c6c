"""One thread that decodes, for as long as the page is there."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache


THREAD = "hf-specdec-demo"


class Worker:
    """The thread that decodes, the same for every run.

    A new thread would begin each run with an empty heap and new helpers for its matrix products. This one ends with the
    process, in the middle of a run too.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]]] = queue.SimpleQueue()
        self.busy = False  # whether a job runs
        threading.Thread(target=self._work, daemon=True, name=THREAD).start()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run a job behind those that wait."""
        done = Future[None]()
        self._jobs.put((done, job))
        return done

    def _work(self) -> None:
        while True:
            done, job = self._jobs.get()
            self.busy, problem = True, None
            try:
                job()
            except BaseException as error:
                problem = error
            self.busy = False
            if problem is None:
                done.set_result(None)
            else:
                done.set_exception(problem)
            del done, job, problem  # what they hold is free while this waits


@cache
def worker() -> Worker:
    """This process's thread."""
    return Worker()


os.register_at_fork(after_in_child=worker.cache_clear)  # threads stay behind
