"""What a call of `generate` asks for: our own argument, and the names that Transformers has for the same thing."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from .config import SpecConfig
from .drafters import DRAFTERS, NEEDS_MODEL, DraftModel, Hybrid, PromptLookup
from .engine import compat, forward


# Transformers' own names; a default that nobody gave must not look like a wish
HOST_NAMES = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
)


@dataclass(frozen=True, slots=True)
class Request:
    """What the user of one `generate` call gave.

    Attributes:
        speculative: The value of `speculative=`, or `None`.
        given: Transformers' own options that were really given.
    """

    speculative: Any = None
    given: dict[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> Request:
        return self  # may hold models; Transformers copies generation configs freely

    @staticmethod
    def is_switched_off() -> bool:
        """Whether `HF_SPECDEC_DISABLE` is set."""
        return os.environ.get("HF_SPECDEC_DISABLE", "").lower() not in ("", "0", "false", "no")

    def config(self, settings: Any, assistant_model: Any = None) -> SpecConfig | None:
        """The configuration of this call, or `None` where it is not for our loop.

        Args:
            settings: The prepared generation config.
            assistant_model: The draft model that was passed in Transformers' way.
        """
        if self.is_switched_off() or self.speculative is False:
            return None
        asked = self.speculative
        if asked is None and (assistant_model is not None or self.given.get("prompt_lookup_num_tokens")):
            asked = True
        if asked is None:
            return None
        config = SpecConfig.from_argument(asked, draft_model=assistant_model)
        return None if config is None else self.refine(config, settings, assistant_model)

    def refine(self, config: SpecConfig, settings: Any = None, assistant_model: Any = None) -> SpecConfig:
        """Add Transformers' own options where the configuration leaves them open."""
        own = getattr(
            assistant_model if assistant_model is not None else config.draft_model, "generation_config", None
        )
        given = {name: value for name in HOST_NAMES if (value := getattr(own, name, None)) is not None} | self.given
        lookup = given.get("prompt_lookup_num_tokens")
        if lookup is not None and config.drafter is None and config.draft_model is None:
            config = replace(config, drafter=PromptLookup(max_ngram=given.get("max_matching_ngram_size") or 4))
        number = lookup if lookup is not None else given.get("num_assistant_tokens")
        if number is not None and config.num_draft_tokens is None:
            config = replace(config, num_draft_tokens=int(number))
            schedule = given.get("num_assistant_tokens_schedule", "constant")
            if lookup is None and schedule == "constant":
                config = replace(config, draft_length="fixed")
        threshold = given.get("assistant_confidence_threshold")
        if threshold and config.draft_model is not None and config.drafter in (None, *NEEDS_MODEL):
            draft = DraftModel(config.draft_model, float(threshold))
            config = replace(config, drafter=draft if config.drafter == "draft_model" else Hybrid(draft))
        return config


def read_request(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> Request:
    """Take `speculative` out of `kwargs` and note which of Transformers' options were given, and not just defaulted.

    Args:
        model: The target, whose saved generation config counts too.
        generation_config: The one passed to `generate`, or `None`.
        kwargs: The other arguments of `generate`.
    """
    saved = getattr(model, "generation_config", None)
    speculative = kwargs.pop("speculative", None)
    for source in (generation_config, saved):
        if speculative is None:
            speculative = getattr(source, "speculative", None)
    given = {}
    for name in HOST_NAMES:
        for value in (kwargs.get(name), getattr(generation_config, name, None), getattr(saved, name, None)):
            if value is not None:
                given[name] = value
                break
    return Request(speculative, given)


def native_reason(settings: Any) -> str | None:
    """Which of Transformers' own draft methods a call asks for that our loop leaves to it, or `None`."""
    for name in ("assistant_early_exit", "use_mtp", "speculation_type", "assistant_ensemble_weight"):
        if getattr(settings, name, None):
            return f"`{name}` is Transformers' own"
    return None


def draft_of(draft: Any) -> str | None:
    """Why a draft model can't be run on rows of different length, or `None`."""
    reason = forward.unsupported_reason(draft)
    return None if reason is None else f"the draft {type(draft).__name__} can't be used: {reason}"


def sharded_reason(draft: Any) -> str | None:
    """Why a draft model can't be run by one process alone, or `None`."""
    if draft is None or not compat.is_sharded(draft):
        return None
    name = type(draft).__name__
    return f"the draft {name} can't be used: its parameters are spread over processes; load it whole on every rank"


def known_drafters() -> list[str]:
    """Names that `speculative=` takes."""
    return sorted(DRAFTERS)
