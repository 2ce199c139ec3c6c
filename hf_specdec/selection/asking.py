"""Questions to the Hub that end in a bounded time, with an answer or with one clear error."""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import SpecDecError


WORKERS = 8
DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}
)

Kind = Literal["offline", "gated", "missing", "network", "server", "disk", "unusable"]


class HubProblem(SpecDecError):
    """Why a checkpoint can't be read or fetched; the message says what to do.

    Attributes:
        kind: `"offline"` (not on this disk, and the Hub may not be asked), `"gated"` (consent or a token is needed),
            `"missing"` (no such repository, revision or file), `"network"` (no answer, or none in time), `"server"`
            (it answered with an error, too many requests included), `"disk"` (the cache can't be written) or
            `"unusable"` (it was read, and is no checkpoint that may be loaded).
    """

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def offline_problem(what: str) -> HubProblem:
    """For what isn't on this disk when the Hub may not be asked."""
    return HubProblem(
        "offline",
        f"{what} is not in the cache {constants.HF_HUB_CACHE}, and the Hub may not be asked. "
        "Allow it (HF_HUB_OFFLINE, local_files_only or --offline forbid it), or pass a local folder.",
    )


def ask(seconds: float, id: str, call: Callable[[], Any]) -> Any:
    """Ask one question (`ask_all`), and raise its problem."""
    answer = ask_all(seconds, id, [call])[0]
    if isinstance(answer, HubProblem):
        raise answer
    return answer


def ask_all(seconds: float, id: str, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run calls of the Hub's library side by side, and wait no longer than this.

    The library retries, waits as long as a server tells it to, and lists without any time limit. What isn't done in
    time goes on in a thread that nobody waits for, the end of the process included.

    Returns:
        For each call what it returned, or the `HubProblem` that came of it.
    """
    answers: list[Any] = [None] * len(calls)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    for index in range(len(calls)):
        waiting.put(index)

    def work() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((index, calls[index]()))
            except Exception as error:
                done.put((index, problem(id, error)))

    for _ in range(min(WORKERS, len(calls))):
        threading.Thread(target=work, daemon=True, name="hf-specdec-hub").start()
    missing, deadline = set(range(len(calls))), time.monotonic() + seconds
    while missing:
        try:
            index, answers[index] = done.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            break
        missing.remove(index)
    while missing and not waiting.empty():  # nobody waits for those that haven't begun
        try:
            waiting.get_nowait()
        except queue.Empty:
            break
    for index in missing:
        message = f"{constants.ENDPOINT} gave no answer about {id} within {seconds:g} s. Try again later."
        answers[index] = HubProblem("network", message)
    return answers


def problem(id: str, error: Exception) -> HubProblem:
    """What went wrong, of all that the library raises: its own errors, those of HTTP, the disk, and of bad answers."""
    if isinstance(error, HubProblem):
        return error
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return problem(id, error.__cause__)
    found = _problem(id, error)
    found.__cause__ = error
    return found


def _problem(id: str, error: Exception) -> HubProblem:
    endpoint = constants.ENDPOINT
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError)):
        return offline_problem(id)
    if isinstance(error, (RemoteEntryNotFoundError, RevisionNotFoundError)):
        return HubProblem("missing", f"{id} has no such revision or file at {endpoint}. Check the revision.")
    if isinstance(error, GatedRepoError):
        return HubProblem(
            "gated",
            f"{id} is gated. Accept its terms at {endpoint}/{id}, then set HF_TOKEN or run `hf auth login` "
            "with an account that has access.",
        )
    if isinstance(error, DisabledRepoError):
        return HubProblem("missing", f"{id} was disabled at {endpoint}. Pass another one.")
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return HubProblem(
            "missing", f"{id} isn't at {endpoint}, or is private. Check the name; a private one needs HF_TOKEN."
        )
    if status in (401, 403):
        return HubProblem(
            "gated", f"{endpoint} refuses access to {id} ({status}). Check that HF_TOKEN is valid and has access."
        )
    if status == 429:
        return HubProblem("server", f"{endpoint} takes no more requests for now (429). Wait, or set HF_TOKEN.")
    if status is not None:
        return HubProblem("server", f"{endpoint} answered {status} about {id}. Try again later.")
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return HubProblem("disk", f"The cache {constants.HF_HUB_CACHE} can't be written: {error}. Set HF_HOME.")
    if isinstance(error, (ValueError, KeyError, TypeError, AttributeError)):
        return HubProblem("server", f"{endpoint} gave an answer about {id} that can't be read: {error!r}.")
    return HubProblem("network", f"{endpoint} can't be reached for {id}: {error or type(error).__name__}. Try again.")
