"""Where a prepared call goes: to our loop, or to the native one with a reason."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from . import drafters
from .config import SpecConfig
from .decoding import Call, decode
from .drafters import CrossVocabulary, DraftModel, crossed, loaded, model_of, resolve
from .engine import graphs, length
from .engine.ranks import Ranks
from .engine.tokens import saved_tokenizer
from .errors import IncompatibleDraftError, UnsupportedModelError
from .outputs import SpecOutput
from .request import draft_of, sharded_reason
from .selection import automatic
from .selection.load import load_draft
from .selection.vocabulary import different_ids_reason
from .stats import SpecStats
from .support import cache_for_loop, plain_reason


logger = logging.getLogger(__name__)

_WARNED: set[str] = set()
_LATEST: weakref.WeakKeyDictionary[Any, SpecStats] = weakref.WeakKeyDictionary()
_BY_THREAD = threading.local()


def last_stats(model: Any) -> SpecStats | None:
    """Statistics of the model's last generation that speculation was asked for.

    Args:
        model: The target model.

    Returns:
        Those of the calling thread's last call if it made one, else of any thread's; `None` without any.
    """
    mine = getattr(_BY_THREAD, "stats", {}).get(model)
    return mine if mine is not None else _LATEST.get(model)


def reset(model: Any = None) -> None:
    """Forget what generations have learnt: what pays, how often drafts are accepted, what the target likes to say, and
    which draft model `speculative=True` picked.

    It is kept in memory only, goes with the model, and changes speed, never the text. CUDA graphs that were kept for
    the next call are freed.

    Args:
        model: The target model; `None` for all.
    """
    length.reset(model)
    drafters.reset(model)
    automatic.reset(model)
    graphs.free(model)


def remember(model: Any, stats: SpecStats) -> None:
    if not hasattr(_BY_THREAD, "stats"):
        _BY_THREAD.stats = weakref.WeakKeyDictionary()
    _BY_THREAD.stats[model] = _LATEST[model] = stats


def run(model: Any, plain: Callable[..., Any], config: SpecConfig, call: dict[str, Any]) -> Any:
    """Decode speculatively, or plainly with a reason.

    Args:
        model: The target.
        plain: The native decoding method, to be called with `call`.
        config: The user's settings.
        call: Keyword arguments that `generate` prepared.

    Returns:
        What `generate` returns.
    """
    passed = {
        name: call.pop(name, None) for name in ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor")
    }
    settings = call["generation_config"]
    named = {"input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"}
    model_kwargs = {name: value for name, value in call.items() if name not in named}
    reason = plain_reason(
        model, call["input_ids"], call["logits_processor"], call["stopping_criteria"], settings,
        bool(call.get("synced_gpus")), model_kwargs,
    )  # fmt: skip
    ranks = Ranks.of(model, bool(call.get("synced_gpus")), call["input_ids"].device)
    drafter, failure = None, None
    if reason is None:
        try:
            drafter, reason = _drafter(model, config, passed)
            reason = reason or sharded_reason(model_of(drafter))
        except IncompatibleDraftError as error:
            if config.strict or isinstance(config.draft_model, str) or config.drafter is not None:
                failure = error
            reason = str(error)
    reason = ranks.agreed(reason, failure)
    if reason is not None:
        return run_plainly(model, plain, config, call, reason)
    streamer = call.get("streamer")
    prepared = Call(
        call["input_ids"], call["logits_processor"], call["stopping_criteria"], settings, streamer,
        model_kwargs.get("attention_mask"), cache_for_loop(model_kwargs), ranks,
    )  # fmt: skip
    output, stats = decode(model, prepared, config, drafter)
    graphs.settle()
    remember(model, stats)
    logger.info("%s", stats)
    return output


def _drafter(model: Any, config: SpecConfig, passed: dict[str, Any]) -> tuple[Any, str | None]:
    """The drafter of a call, or why there is none."""
    draft = config.draft_model
    if automatic.is_wanted(config):
        draft = automatic.draft_for(model, config)
        # one that was made for the draft that wasn't found can't be used
        named = config.drafter if draft is not None or isinstance(config.drafter, str) else None
        return loaded(resolve(named, draft), draft), None
    if isinstance(draft, str) and draft == automatic.AUTO:  # with a drafter that needs none
        draft = None
    if isinstance(draft, (str, os.PathLike)):
        draft = load_draft(model, os.fspath(draft), config.draft_device)
    if draft is None:
        return resolve(config.drafter, None), None
    if reason := draft_of(draft):
        return None, reason
    drafter = loaded(resolve(config.drafter, draft), draft)
    tokenizers = _tokenizers(model, draft, passed, isinstance(config.draft_model, (str, os.PathLike)))
    if reason := different_ids_reason(model, draft, *tokenizers):
        if None in tokenizers:
            tokenizers = _tokenizers(model, draft, passed, True)
            reason = different_ids_reason(model, draft, *tokenizers)
        if None in tokenizers:
            hint = "pass `tokenizer=` and `assistant_tokenizer=`, and it drafts across vocabularies"
            return None, f"{reason} ({hint})"
        if reason:
            logger.info("drafting across vocabularies: %s", reason)
            drafter = crossed(drafter, *tokenizers)
            if isinstance(drafter, DraftModel) and not isinstance(drafter, CrossVocabulary):
                return None, f"{reason} ({type(drafter).__name__} reads the target's ids)"
    return drafter, None


def _tokenizers(model: Any, draft: Any, passed: dict[str, Any], load: bool) -> tuple[Any, Any]:
    """Those of target and draft: what was passed, else what is saved with the model (if `load`), else `None`."""
    found = []
    for name, each in (("tokenizer", model), ("assistant_tokenizer", draft)):
        given = passed[name]
        found.append(given if given is not None or not load else saved_tokenizer(each))
    return found[0], found[1]


def note_plain(config: SpecConfig, reason: str) -> None:
    """Log why a call is decoded plainly, once a reason.

    Raises:
        UnsupportedModelError: With `strict=True`.
    """
    if config.strict:
        raise UnsupportedModelError(
            f"This call can't be sped up: {reason}. Drop `strict=True` to decode it plainly, or change the call."
        )
    if reason not in _WARNED:
        _WARNED.add(reason)
        logger.warning("decoding without speculation: %s.", reason)


def run_plainly(model: Any, plain: Callable[..., Any], config: SpecConfig, call: dict[str, Any], reason: str) -> Any:
    """The native loop, with the reason logged once and kept in the statistics."""
    note_plain(config, reason)
    began = time.perf_counter()
    output = plain(model, **call)
    sequences = output if isinstance(output, Tensor) else output.sequences
    new = sequences[:, call["input_ids"].shape[1] :]
    stats = SpecStats(
        total_seconds=time.perf_counter() - began,
        fallback_reason=reason,
        num_emitted_tokens=_count_emitted(new, call["generation_config"].eos_token_id),
    )
    remember(model, stats)
    if type(output) is GenerateDecoderOnlyOutput:
        return SpecOutput(**output, spec_stats=stats)
    return output


def _count_emitted(new: Tensor, ends: int | list[int] | None) -> int:
    """Tokens of `[rows, length]` up to and with each row's first end token; what follows is padding."""
    if ends is None:
        return new.numel()
    is_end = torch.isin(new, torch.as_tensor(ends, device=new.device)).long()
    return int((is_end.cumsum(-1) - is_end == 0).sum())
