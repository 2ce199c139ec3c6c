"""The draft model of `speculative=True`: picked once for each target, fetched if need be, and loaded next to its head.

A target that came from the Hub may have its draft from there, announced with its size before the download starts. Any other
target is kept from the network: it gets what is on this disk, unless the user asked for more with
`SpecConfig(draft_model="auto")`. Nothing here makes a call fail: without a draft, prompt lookup drafts.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..config import SpecConfig
from ..drafters import NEEDS_MODEL
from ..engine import compat, forward
from ..errors import SpecDecError
from . import hub, load
from .candidates import Candidate, Choice


logger = logging.getLogger(__name__)

AUTO = "auto"
FREE_SHARE = 0.9  # of a device's free memory; the target's own cache grows too
_PICKED = load.PerTarget()


def is_wanted(config: SpecConfig) -> bool:
    """Whether a call leaves the choice of a draft model to us, and would use one."""
    asked = isinstance(config.draft_model, str) and config.draft_model == AUTO
    if not asked and config.draft_model is not None:
        return False
    if isinstance(config.drafter, str):
        return config.drafter in NEEDS_MODEL
    return asked or config.drafter is None


def draft_for(target: Any, config: SpecConfig) -> Any:
    """The loaded draft model that was picked for a target, or `None`; decided at the first call and remembered.

    Args:
        target: The target model.
        config: The call's settings: with `draft_model="auto"` a target from a folder may have a draft from the Hub too,
            `draft_device` is where the draft goes.
    """
    name = str(getattr(target, "name_or_path", "") or "")
    if not name or not config.max_draft_tokens:
        return None
    may_fetch = config.draft_model is not None or _is_from_the_hub(name)
    place = (may_fetch, str(config.draft_device))
    with _PICKED.of(target) as known:
        if place not in known:
            try:
                with torch.random.fork_rng(devices=[]):  # a seed gives the same text in the first call as in the next
                    known[place] = _find(target, name, config, may_fetch)
            except Exception as error:  # a draft costs speed, never the answer
                logger.warning("no draft model for %s, so prompt lookup drafts: %s", name, error)
                known[place] = None
        return known[place]


def reset(model: Any = None) -> None:
    """Forget which draft was picked and loaded for a target, or for all."""
    for known in (_PICKED, load.LOADED):
        known.forget(model)


def _find(target: Any, name: str, config: SpecConfig, may_fetch: bool) -> Any:
    """Pick, fetch if that is allowed, and load."""
    from . import pick, ranking

    device = torch.device(config.draft_device) if config.draft_device is not None else compat.head_device(target)
    slow = target.device.type == "cpu" and target.dtype == torch.float32
    for local in (True, False) if may_fetch else (True,):  # what is here is found without a question to the Hub
        choice = pick.pick(
            name,
            revision=compat.commit(target),
            local_files_only=local,
            free_bytes=_free_bytes(device),
            quantization_config=getattr(target.config, "quantization_config", None),
            overhead=ranking.FLOAT32_ON_CPU if slow else ranking.ROUND,
        )
        chosen = choice.chosen
        if chosen is not None and chosen.verdict in pick.FITS.values() and (chosen.download_bytes == 0 or not local):
            break
    else:
        _say_why_not(choice, name, may_fetch)
        return None
    folder = load.fetched(chosen.id, chosen.revision, local_files_only=not may_fetch)
    draft = load.load_draft(target, folder, config.draft_device)
    if reason := forward.unsupported_reason(draft):
        raise SpecDecError(f"{chosen.id} can't be used: {reason}.")
    logger.info("%s drafts for %s%s", chosen.id, name, _promise(chosen))
    return draft


def _is_from_the_hub(name: str) -> bool:
    """Whether a model of that name was loaded by its Hub id: then the local cache has it."""
    try:
        return hub.describe(name, local_files_only=True).source == "cache"
    except hub.HubProblem:
        return False


def _say_why_not(choice: Choice, name: str, tried: bool) -> None:
    """Log what was found, and how to get it where it isn't here."""
    chosen = choice.chosen
    if chosen is not None and chosen.download_bytes == 0:  # the target's configuration names it
        logger.warning("%s doesn't draft for %s: %s", chosen.id, name, "; ".join(chosen.reasons))
    elif chosen is None:
        logger.info(
            "no draft model for %s, so prompt lookup drafts: %s. `hf-specdec drafts %s` shows all",
            name,
            choice.why_not,
            name,
        )
    elif tried:
        logger.warning("no draft model could be had for %s, so prompt lookup drafts: %s", name, choice.why_not)
    else:
        logger.warning(
            "%s could draft for %s%s but isn't on this disk (%.2f GB), so prompt lookup drafts. "
            'To fetch it: speculative=hf_specdec.SpecConfig(draft_model="auto"). To see more: hf-specdec drafts %s',
            chosen.id,
            name,
            _promise(chosen),
            (chosen.download_bytes or 0) / 1e9,
            name,
        )


def _promise(chosen: Candidate) -> str:
    return "" if chosen.predicted_speedup is None else f" (predicted {chosen.predicted_speedup:.2f}×)"


def _free_bytes(device: Any) -> int | None:
    """Memory for the draft, or `None` where there is no telling."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(FREE_SHARE * free)
