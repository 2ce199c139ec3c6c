"""Which calls of `generate` can be sped up. Each function answers with a reason, or `None` for yes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from .engine import cache, compat, forward, logits


# cache_implementation values that ask for nothing that a row-offset cache would not give
CACHES = (None, "dynamic", "static")
MODEL_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "inputs_tensor", compat.CACHE}


def plain_reason(
    model: Any,
    input_ids: Tensor,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    settings: Any,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why this call is decoded plainly.

    Args:
        model: The target.
        input_ids: Prompts, `[batch, length]`.
        processors: Prepared logits processors.
        criteria: Prepared stopping criteria.
        settings: Prepared generation config.
        synced_gpus: Whether ranks run in lock-step.
        model_kwargs: What goes to the model's forward.
    """
    return (
        compat.decoding_loop_reason(model)
        or compat.sharding_reason(model, synced_gpus)
        or forward.unsupported_reason(model)
        or _settings_reason(settings)
        or _inputs_reason(model, input_ids, model_kwargs, settings.max_length)
        or _cache_reason(settings, model_kwargs)
        or logits.unsupported_reason(processors)
        or _criteria_reason(input_ids, criteria)
    )


def _settings_reason(settings: Any) -> str | None:
    if settings.use_cache is False:
        return "`use_cache=False` leaves nothing to roll back"
    if settings.cache_implementation not in CACHES:
        return f"`cache_implementation={settings.cache_implementation!r}` can't be rolled back"
    if getattr(settings, "assistant_ensemble_weight", None) is not None:
        return "`assistant_ensemble_weight` changes the target's distribution"
    if getattr(settings, "prefill_chunk_size", None) and _keeps_states(settings):
        return "chunked prefill together with hidden states or attentions"
    return None


def _inputs_reason(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any], longest: int) -> str | None:
    if model_kwargs.get("inputs_embeds") is not None:
        return "`inputs_embeds` has no token ids to draft from"
    if input_ids.dim() != 2 or not input_ids.shape[1]:
        return f"prompts must be token ids of shape [batch, length], got {tuple(input_ids.shape)}"
    known = MODEL_INPUTS | {"output_hidden_states", "output_attentions", "return_dict"}
    if extra := sorted(name for name, value in model_kwargs.items() if value is not None and name not in known):
        return f"the model gets {', '.join(f'`{name}`' for name in extra)}"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not mask[:, -input_ids.shape[1] :].bool().any(-1).all():
        return "a row of the attention mask is all padding"
    if mask is not None and not mask[:, -1].bool().all():
        return "a prompt is padded on the right, so plain decoding goes on from its padding"
    if mask is not None and any(compat.layer_windows(model)) and (mask.long().diff(dim=-1) < 0).any():
        return "the attention mask has holes, which plain decoding counts into the sliding window"
    if (steady := compat.steady_positions(model)) is not None and longest > steady:
        return f"its rotary frequencies change behind {steady} tokens, and the text may have {longest}"
    positions = model_kwargs.get("position_ids")
    if positions is not None and not _default_positions(positions, mask):
        return "`position_ids` are not the usual ones"
    return None


def _default_positions(positions: Tensor, mask: Tensor | None) -> bool:
    if mask is None:
        return torch.equal(positions[0], torch.arange(positions.shape[1], device=positions.device))
    expected = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return torch.equal(positions.expand_as(expected), expected) if positions.shape[1] == mask.shape[1] else False


def _cache_reason(settings: Any, model_kwargs: dict[str, Any]) -> str | None:
    given = model_kwargs.get(compat.CACHE)
    if settings.cache_implementation == "static" and not compat.is_users_cache(given):
        return None
    if reason := cache.unsupported_reason(given):
        return reason
    if given is not None and compat.seq_length(given) and _keeps_states(settings):
        return "a filled cache together with hidden states or attentions"
    return None


def _criteria_reason(input_ids: Tensor, criteria: Sequence[Any]) -> str | None:
    has_end = any(isinstance(each, EosTokenCriteria) for each in criteria)
    others = [each for each in criteria if not isinstance(each, (EosTokenCriteria, MaxLengthCriteria))]
    if input_ids.shape[0] > 1 and others and not has_end:
        return "without an end token, plain decoding lets stopped rows of a batch run on"
    return None


def _keeps_states(settings: Any) -> bool:
    wanted = settings.output_hidden_states or settings.output_attentions
    return bool(settings.return_dict_in_generate and wanted)


def cache_for_loop(model_kwargs: dict[str, Any]) -> Any:
    """The cache that the loop should continue and fill: Transformers' dynamic one, or `None`."""
    given = compat.pop_cache(model_kwargs)
    return given if isinstance(given, DynamicCache) else None
