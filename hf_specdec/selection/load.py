"""Loading a draft model that was named by id or path."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from transformers import AutoModelForCausalLM

from ..engine import compat
from ..errors import IncompatibleDraftError


_LOADED: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Any]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


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
    with _LOCK:
        loaded = _LOADED.setdefault(target, {})
        if (name, place) not in loaded:
            try:
                draft = AutoModelForCausalLM.from_pretrained(name, dtype=target.dtype, use_safetensors=True)
                draft = draft.to(place).eval()
            except (OSError, ValueError, ImportError, RuntimeError) as error:
                raise IncompatibleDraftError(
                    f"The draft model {name!r} can't be loaded: {error} "
                    "Pass the id or path of a causal language model, or the loaded model itself."
                ) from error
            loaded[name, place] = draft
        return loaded[name, place]
