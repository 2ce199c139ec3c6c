"""Lossless speculative decoding for Hugging Face Transformers: `model.generate(..., speculative=True)`.

Importing this package changes nothing; `hf_specdec.enable()` does. The names below are loaded when they are first
used, so that the command line starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import SpecConfig
from .errors import IncompatibleDraftError, PlacementError, SpecDecError, UnsupportedCacheError, UnsupportedModelError
from .stats import SpecStats, StepEvent


if TYPE_CHECKING:
    from .drafters import CrossVocabulary, Draft, Drafter, DraftModel, Hybrid, PromptLookup, Recycling
    from .hook import decoder, disable, enable, generate
    from .outputs import SpecOutput
    from .routing import last_stats, reset
    from .selection.pair import load_pair

    __version__: str

_LAZY = {
    "CrossVocabulary": "drafters",
    "Draft": "drafters",
    "DraftModel": "drafters",
    "Drafter": "drafters",
    "Hybrid": "drafters",
    "PromptLookup": "drafters",
    "Recycling": "drafters",
    "SpecOutput": "outputs",
    "decoder": "hook",
    "disable": "hook",
    "enable": "hook",
    "generate": "hook",
    "last_stats": "routing",
    "load_pair": "selection.pair",
    "reset": "routing",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # reads e-mail headers, which takes a while to import

    try:
        return version("hf_specdec")
    except PackageNotFoundError:  # a source tree that isn't installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "CrossVocabulary",
    "Draft",
    "DraftModel",
    "Drafter",
    "Hybrid",
    "IncompatibleDraftError",
    "PlacementError",
    "PromptLookup",
    "Recycling",
    "SpecConfig",
    "SpecDecError",
    "SpecOutput",
    "SpecStats",
    "StepEvent",
    "UnsupportedCacheError",
    "UnsupportedModelError",
    "__version__",
    "decoder",
    "disable",
    "enable",
    "generate",
    "last_stats",
    "load_pair",
    "reset",
]
