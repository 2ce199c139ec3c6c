"""`load_pair`: a target and its draft, each loaded where there is room for both."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM

from ..errors import IncompatibleDraftError, SpecDecError
from . import pick
from .automatic import AUTO
from .candidates import Candidate
from .load import LOADING, fetched
from .placement import memory_of, plan
from .plans import GIB, Plan


logger = logging.getLogger(__name__)


def load_pair(
    target: str | os.PathLike[str], draft: Any = "auto", *, device_map: Any = "auto",
    max_memory: Mapping[Any, int | str] | None = None, dtype: Any = "auto", quantization_config: Any = None,
    draft_device: Any = None, batch: int = 1, context: int = 4096, num_draft_tokens: int | None = None,
    offload_folder: str | os.PathLike[str] | None = None, revision: str | None = None, token: Any = None,
    local_files_only: bool = False, trust_remote_code: bool = False, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Load a target and a draft for it, placed so that both fit with their caches.

    Where both go is planned first (`hf_specdec.selection.placement.plan`) and logged at level INFO; of a draft that is
    looked for, nothing but its configuration and tokenizer is fetched before. Only safetensors files are loaded.

    Args:
        target: Hub id or local path of the target.
        draft: Hub id or local path of the draft, or the loaded model; `"auto"` looks for one, `None` and `False` load
            none.
        device_map: As in `from_pretrained`; the map is planned with room for the draft.
        max_memory: Memory by device, in bytes or as in `{0: "24GiB", "cpu": "64GiB"}`; weights are offloaded only to
            what it has. `None` means 90 % of what is free on the accelerators, and the CPU.
        dtype: As in `from_pretrained`. The draft gets the target's.
        quantization_config: As in `from_pretrained`, for the target.
        draft_device: Where the draft goes, if not to the device of the target's output layer.
        batch: Rows that there must be room for.
        context: Tokens of a row, prompt and output together, that there must be room for.
        num_draft_tokens: Most tokens that will be drafted a round; `None` means the default.
        offload_folder: Where weights may be put that have room nowhere else; `None`: the disk isn't used.
        revision: Of the target.
        token: As in `from_pretrained`.
        local_files_only: Whether nothing may be downloaded.
        trust_remote_code: Whether code of the target's repository may run; never the draft's.
        **options: Passed to the target's `from_pretrained`.

    Returns:
        The target and the draft, in eval mode. The draft is `None` where none was asked for, none pays, or the one that
        was found can't be had; the log says which.

    Raises:
        PlacementError: If it doesn't fit, with numbers.
        IncompatibleDraftError: If a draft that was named can't be loaded.
    """
    hub = {"local_files_only": local_files_only} | ({} if token is None else {"token": token})
    about = {"trust_remote_code": trust_remote_code, **hub} | ({} if revision is None else {"revision": revision})
    wanted = {
        "max_memory": _with_disk(max_memory, offload_folder, draft), "batch": batch, "context": context,
        "device_map": device_map, "dtype": dtype, "quantization_config": quantization_config,
        "num_draft_tokens": num_draft_tokens, **about,
    }  # fmt: skip
    draft_revision = None
    searched = draft == AUTO if isinstance(draft, str) else False
    if searched:
        found, draft, draft_revision = _search(os.fspath(target), revision, draft_device, hub, wanted)
    else:
        draft = None if draft is False else draft
        draft_device = str(draft.device) if isinstance(draft, nn.Module) else draft_device
        found = plan(os.fspath(target), draft, draft_device=draft_device, **wanted)
    logger.info("%s", found)
    if found.offloaded:
        logger.warning("%.2f GiB of the target's weights are fetched in every forward.", found.offloaded / GIB)
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    with LOADING:
        loaded = AutoModelForCausalLM.from_pretrained(
            target, device_map=found.device_map, dtype=dtype, use_safetensors=True, offload_folder=offload_folder,
            **about, **options,
        ).eval()  # fmt: skip
    if draft is None or isinstance(draft, nn.Module):
        return loaded, draft
    try:
        return loaded, _load_draft(draft, loaded.dtype, {"": found.draft_device}, revision=draft_revision, **hub)
    except IncompatibleDraftError as error:
        if not searched:
            raise
        logger.warning("%s The target goes without a draft.", error)
        return loaded, None


def _search(
    target: str, revision: str | None, draft_device: Any, hub: dict[str, Any], wanted: dict[str, Any]
) -> tuple[Plan, str | None, str | None]:
    """A draft that pays and leaves the target its room: the plan, and the draft's id (or folder) and revision.

    Where a draft has no room, smaller ones are looked for. Nothing of their weights is fetched here.
    """
    alone = plan(target, **wanted)  # what can't be placed at all is said before anything is looked for
    seen: set[str] = set()
    limit = None
    while (
        chosen := _pick(target, revision, limit, wanted["quantization_config"], hub)
    ) is not None and chosen.id not in seen:
        seen.add(chosen.id)
        reason: object
        try:
            found = plan(target, chosen.id, draft_device=draft_device, draft_revision=chosen.revision, **wanted)
            if alone.offloaded == found.offloaded:
                return found, chosen.id, chosen.revision
            reason = (
                f"{(found.offloaded - alone.offloaded) / GIB:.2f} GiB more of the target would be offloaded for it"
            )
        except Exception as error:  # a draft that nobody named must not cost the target
            reason = error
        logger.warning("%s goes without the draft %s: %s", target, chosen.id, reason)
        limit = (chosen.memory_bytes or 1) - 1
    return alone, None, None


def _pick(
    target: str, revision: str | None, limit: int | None, quantization: Any, hub: dict[str, Any]
) -> Candidate | None:
    """A draft model that pays and takes at most `limit` bytes; or `None`, with the reason logged."""
    try:
        choice = pick.pick(target, revision=revision, free_bytes=limit, quantization_config=quantization, **hub)
        chosen = choice.chosen
        if chosen is None or not chosen.verified:
            reason = choice.why_not
        elif chosen.kind != "draft_model":
            reason = f"{chosen.id} is a draft of kind {chosen.kind!r}, which isn't loaded here"
        else:
            return chosen
    except Exception as error:  # looking for a draft may cost the draft, never the target
        reason = f"{type(error).__name__}: {error}"
    logger.warning("no draft for %s: %s", target, reason)
    return None


def _load_draft(name: Any, dtype: Any, place: dict[str, Any], **hub: Any) -> Any:
    try:
        folder = name if os.path.isdir(name) else fetched(os.fspath(name), **hub)
        with LOADING:
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, device_map=place, use_safetensors=True, trust_remote_code=False
            ).eval()  # fmt: skip
    except (SpecDecError, OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise IncompatibleDraftError(
            f"The draft model {os.fspath(name)!r} can't be loaded: {error} "
            "Pass the id or path of a causal language model with safetensors files, or the loaded model itself."
        ) from error


def _with_disk(given: Mapping[Any, int | str] | None, folder: Any, draft: Any) -> dict[Any, int | str] | None:
    """Memory with the disk, where weights may go there."""
    if folder is None or (given is not None and "disk" in given):
        return None if given is None else dict(given)
    around = next(each for each in (Path(folder).absolute(), *Path(folder).absolute().parents) if each.exists())
    return {**(memory_of(None, draft) if given is None else given), "disk": shutil.disk_usage(around).free}
