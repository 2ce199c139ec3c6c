"""The model families that the page offers, loaded when they are first asked for."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from ..config import SpecConfig
from ..tools.environment import cpu_name, package_versions
from ..tools.loading import LoadedModel, load_model


@dataclass(slots=True)
class Family:
    """A target and, if there is one, a draft of its family.

    Attributes:
        title: What visitors read.
        target: Hub id or folder; `None` is the chat model that needs no Hub.
        draft: Hub id or folder of the draft model, or `None`.
        dtype: Of the weights.
        public_name: Hub id for the lines to copy, where `target` is `None`.
        warmed: What was learnt in warming up, for each way of running that was warmed up in this process
            (`RunSettings.way`).
    """

    title: str
    target: str | None
    draft: str | None = None
    dtype: str = "float32"
    public_name: str = ""
    warmed: dict[tuple[str, int, bool], Any] = field(default_factory=dict)
    _loaded: tuple[LoadedModel, Any] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """The target's id or folder."""
        return self.target or self.public_name

    def load(self) -> tuple[LoadedModel, Any]:
        """The target with its tokenizer, and the draft model or `None`; the first call loads them.

        Without a draft of its own the target gets what `speculative=True` would pick for it, by the same rules: announced
        where it is a download, and remembered, so that no run, nor its warm-up, has to look for it.

        Raises:
            SpecDecError: If they can't be had.
        """
        with self._lock:
            if self._loaded is None:
                from ..selection import automatic
                from ..tools.chat_model import fetch_chat_model

                target = load_model(self.target or str(fetch_chat_model()), dtype=self.dtype)
                draft = None
                if self.draft is not None:
                    draft = load_model(self.draft, dtype=self.dtype, device=str(target.model.device)).model
                else:
                    automatic.draft_for(target.model, SpecConfig())
                self._loaded = target, draft
            return self._loaded


def families(on_gpu: bool) -> dict[str, Family]:
    """The families of a machine, by key; the first one is the default.

    Args:
        on_gpu: Whether there is an accelerator, or will be during a run.
    """
    small = Family(
        "SmolLM2 135M", None, dtype="bfloat16" if on_gpu else "float32",
        public_name="HuggingFaceTB/SmolLM2-135M-Instruct",
    )  # fmt: skip
    if not on_gpu:
        return {"smollm2": small}
    large = Family("Qwen3 8B, draft Qwen3 0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", dtype="bfloat16")
    return {"qwen3": large, "smollm2": small}


def own_family(target: str, draft: str | None, dtype: str) -> Family:
    """A family of the user's own models."""
    title = target.rstrip("/").rpartition("/")[2]
    if draft is not None:
        title += f", draft {draft.rstrip('/').rpartition('/')[2]}"
    return Family(title, target, draft, dtype)


def conditions(loaded: LoadedModel, dtype: str) -> str:
    """Hardware and versions, as one line."""
    import torch

    device = loaded.model.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    threads = "" if device.type == "cuda" else f", {(number := torch.get_num_threads())} thread{'s' * (number > 1)}"
    versions = package_versions()
    known = [f"{name} {versions[name]}" for name in ("torch", "transformers", "hf-specdec") if versions[name]]
    return ", ".join([f"{hardware}{threads}", dtype, *known])
