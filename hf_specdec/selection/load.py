"""Loading a draft model that was named by id or path."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from ..engine import compat
from ..errors import IncompatibleDraftError, SpecDecError
from . import hub


logger = logging.getLogger(__name__)


class PerTarget:
    """What was found for each target, and one lock a target: looking for one keeps no other waiting."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._entries: weakref.WeakKeyDictionary[Any, tuple[threading.Lock, dict[Any, Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, target: Any) -> Iterator[dict[Any, Any]]:
        """What is known for a target, to be read and changed by one thread at a time."""
        with self._lock:
            lock, known = self._entries.setdefault(target, (threading.Lock(), {}))
        with lock:
            yield known

    def forget(self, target: Any = None) -> None:
        """Forget one target, or all."""
        with self._lock:
            if target is None:
                self._entries.clear()
            else:
                self._entries.pop(target, None)


LOADED = PerTarget()
LOADING = threading.RLock()  # `from_pretrained` changes defaults of the whole process while it runs


def load_draft(target: Any, name: str, device: Any = None) -> Any:
    """Load a draft model next to its target, once.

    Args:
        target: The target model; the draft gets its dtype.
        name: Hub id or local path. Only safetensors files are read, and remote code is never run.
        device: Where to load it; `None` means the device of the target's output layer.

    Raises:
        IncompatibleDraftError: If it can't be loaded.
    """
    place = str(device if device is not None else compat.head_device(target))
    with LOADED.of(target) as loaded:
        if (name, place) not in loaded:
            try:
                folder = name if os.path.isdir(name) else fetched(name)
                with LOADING:
                    draft = AutoModelForCausalLM.from_pretrained(
                        folder, dtype=target.dtype, use_safetensors=True, trust_remote_code=False
                    )
                    draft = draft.to(place).eval()
            except (SpecDecError, OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
                raise IncompatibleDraftError(
                    f"The draft model {name!r} can't be loaded: {error} "
                    "Pass the id or path of a causal language model, or the loaded model itself."
                ) from error
            loaded[name, place] = draft
        return loaded[name, place]


def fetched(name: str, revision: str | None = None, *, token: Any = None, local_files_only: bool = False) -> str:
    """The folder of a draft that was named by its Hub id; a download is announced with its size.

    Raises:
        SpecDecError: If it can't be had.
    """
    try:
        repository = hub.describe(name, revision=revision, local_files_only=True)
    except hub.HubProblem:
        repository = None
    if repository is None or not repository.complete:
        repository = hub.describe(name, revision=revision, token=token, local_files_only=local_files_only)
    return str(hub.download(repository, announce=announce, token=token, local_files_only=local_files_only))


def announce(line: str) -> None:
    """Say what is about to happen, to the log and to whoever looks at the terminal."""
    logger.info("%s", line)
    sys.stderr.write(f"hf_specdec: {line}\n")
