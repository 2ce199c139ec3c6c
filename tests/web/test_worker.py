"""The one thread that decodes."""

from __future__ import annotations

import os
import threading

import pytest

from hf_specdec.web.worker import Worker, worker


def test_one_thread_does_everything_in_order() -> None:
    at_work, seen = Worker(), list[tuple[int, int]]()
    jobs = [at_work.submit(lambda place=place: seen.append((place, threading.get_ident()))) for place in range(5)]
    for job in jobs:
        assert job.result(timeout=30) is None
    assert [place for place, _ in seen] == list(range(5))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    assert worker() is worker()


def test_an_error_is_the_jobs_alone() -> None:
    at_work, done = Worker(), list[str]()

    def fail() -> None:
        raise SystemExit("out of luck")  # not even this ends the thread

    with pytest.raises(SystemExit, match="luck"):
        at_work.submit(fail).result(timeout=30)
    at_work.submit(lambda: done.append("next")).result(timeout=30)
    assert done == ["next"]
    assert not at_work.busy


def test_busy() -> None:
    at_work, go = Worker(), threading.Event()
    began = threading.Event()

    def job() -> None:
        began.set()
        go.wait(30)

    running = at_work.submit(job)
    assert began.wait(30)
    assert at_work.busy
    go.set()
    running.result(timeout=30)
    assert not at_work.busy


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_gets_a_thread_of_its_own() -> None:
    """As a worker of ZeroGPU does."""
    worker().submit(lambda: None).result(timeout=30)
    child = os.fork()
    if not child:
        done = worker().submit(lambda: None)
        try:
            done.result(timeout=20)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
