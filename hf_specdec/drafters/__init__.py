"""Where draft tokens come from: one file, one class each.

A new strategy is a file here and a line in `DRAFTERS`; a user's own needs neither and is passed as an instance.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..engine.length import Outlook
from ..errors import IncompatibleDraftError, SpecDecError
from . import draft_model, recycling
from .base import Draft, DraftContext, Drafter
from .draft_model import DraftModel
from .hybrid import Hybrid
from .prompt_lookup import PromptLookup
from .recycling import Recycling


# name -> how to make it from the draft model (`None` where the user gave none)
DRAFTERS: dict[str, Callable[[Any], Drafter | None]] = {
    "prompt_lookup": lambda draft: PromptLookup(),
    "draft_model": lambda draft: DraftModel(draft),
    "hybrid": lambda draft: Hybrid(DraftModel(draft)),
    "recycling": lambda draft: Recycling(),
    "none": lambda draft: None,
}
NEEDS_MODEL = ("draft_model", "hybrid")


def resolve(drafter: Any, draft_model: Any) -> Drafter | None:
    """Turn what the user named into a drafter.

    Args:
        drafter: A name, a `Drafter`, or `None` to choose.
        draft_model: A loaded draft model, or `None`.

    Returns:
        The drafter, or `None` for `"none"`.

    Raises:
        SpecDecError: If there is no such drafter.
        IncompatibleDraftError: If it needs a draft model and has none.
    """
    if drafter is None:
        drafter = "prompt_lookup" if draft_model is None else "hybrid"
    if not isinstance(drafter, str):
        if not hasattr(drafter, "propose"):
            raise SpecDecError(f"`drafter` must be a name or have a `propose` method, got {type(drafter).__name__}.")
        resolved: Drafter = drafter
        return resolved
    if drafter not in DRAFTERS:
        raise SpecDecError(f"There is no drafter {drafter!r}. Choose one of {sorted(DRAFTERS)} or pass an instance.")
    if drafter in NEEDS_MODEL and draft_model is None:
        raise IncompatibleDraftError(
            f"The drafter {drafter!r} needs a draft model. Pass `assistant_model=` or `SpecConfig(draft_model=...)`."
        )
    return DRAFTERS[drafter](draft_model)


def loaded(drafter: Drafter | None, draft_model: Any) -> Drafter | None:
    """The drafter with the loaded model in place of an id or a path that it was made with."""
    if isinstance(drafter, DraftModel) and isinstance(drafter.model, (str, os.PathLike)):
        return DraftModel(draft_model, drafter.confidence_threshold)
    if isinstance(drafter, Hybrid) and isinstance(drafter.model.model, (str, os.PathLike)):
        return Hybrid(DraftModel(draft_model, drafter.model.confidence_threshold))
    return drafter


def reset(model: Any = None) -> None:
    """Forget what drafters have learnt about a target, or about all."""
    for known in (draft_model._CALIBRATIONS, recycling._MEMORIES):
        if model is None:
            known.clear()
        else:
            known.pop(model, None)


__all__ = [
    "DRAFTERS",
    "Draft",
    "DraftContext",
    "DraftModel",
    "Drafter",
    "Hybrid",
    "Outlook",
    "PromptLookup",
    "Recycling",
    "loaded",
    "reset",
    "resolve",
]
