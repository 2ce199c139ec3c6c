"""Where draft tokens come from: one file, one class each.

A new strategy is a file here and a line in `DRAFTERS`; a user's own needs neither and is passed as an instance.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from ..engine.length import Outlook
from ..errors import IncompatibleDraftError, SpecDecError
from . import draft_model, recycling
from .base import Draft, DraftContext, Drafter
from .cross_vocabulary import CrossVocabulary
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

    def in_place(model: DraftModel) -> DraftModel:
        if isinstance(model.model, (str, os.PathLike)):
            model = copy.copy(model)
            model.model = draft_model
        return model

    return _with_model(drafter, in_place)


def crossed(drafter: Drafter | None, tokenizer: Any, draft_tokenizer: Any) -> Drafter | None:
    """The drafter with one that knows both tokenizers in place of a draft model that reads the target's ids.

    Args:
        drafter: Any drafter; a subclass of `DraftModel` stays as it is.
        tokenizer: The target's tokenizer.
        draft_tokenizer: The draft's.
    """

    def across(model: DraftModel) -> DraftModel:
        if type(model) is not DraftModel:
            return model
        threshold = model.confidence_threshold
        return CrossVocabulary(model.model, tokenizer, draft_tokenizer, confidence_threshold=threshold)

    return _with_model(drafter, across)


def model_of(drafter: Any) -> nn.Module | None:
    """The model that a drafter runs, or `None`."""
    model = getattr(drafter, "model", None)
    if not isinstance(model, nn.Module):  # a drafter that has one, such as the hybrid's
        model = getattr(model, "model", None)
    return model if isinstance(model, nn.Module) else None


def _with_model(drafter: Drafter | None, change: Callable[[DraftModel], DraftModel]) -> Drafter | None:
    """The drafter with its draft model changed, if it has one."""
    if isinstance(drafter, DraftModel):
        return change(drafter)
    if isinstance(drafter, Hybrid):
        drafter = copy.copy(drafter)
        drafter.model = change(drafter.model)
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
    "CrossVocabulary",
    "Draft",
    "DraftContext",
    "DraftModel",
    "Drafter",
    "Hybrid",
    "Outlook",
    "PromptLookup",
    "Recycling",
    "crossed",
    "loaded",
    "reset",
    "resolve",
]
