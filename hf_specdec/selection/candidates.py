"""What is known of a model without its weights, and what came of looking for a draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Repository:
    """A checkpoint, on the Hub or on this disk, as far as it is known without its weights.

    Attributes:
        id: Hub id, or path of a local folder.
        config: Its `config.json`.
        source: Where this was read: `"path"`, `"cache"` (the local Hub cache), `"hub"` or `"catalog"`.
        revision: Commit that was read, or `None`.
        folder: Local folder with all that was read of it (config and tokenizer files), or `None`.
        files: Names of all its files.
        weights_bytes: Size of its safetensors files, or `None` where it isn't known.
        complete: Whether the weights are on this disk.
        tags: The Hub's tags.
        gated: Whether the Hub asks for consent first.
        sizes: Bytes of its files, by name, where they are known.
        problem: Why it was found but could not be read, or `None`.
    """

    id: str
    config: Mapping[str, Any]
    source: str
    revision: str | None = None
    folder: Path | None = None
    files: tuple[str, ...] = ()
    weights_bytes: int | None = None
    complete: bool = False
    tags: tuple[str, ...] = ()
    gated: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model, from its configuration.

    Attributes:
        id: Hub id or path.
        model_type: As in its configuration.
        parameters: All of the text decoder's.
        active_parameters: Those that one token reads: fewer for mixtures of experts, and without tables of which it
            reads a row.
        layers: Decoder layers.
        vocabulary: Rows of the output layer.
        kv_numbers: Numbers that one token adds to the cache, all layers together.
        dtype: Name of the saved dtype, such as `"bfloat16"`, or `None`.
        output_parameters: Those of the output layer.
        expert_parameters: Those of experts that a router chooses from.
        expert_fraction: How many of the experts one token reads.
        bits: Bits a weight of its layers takes where they are quantised, or `None`.
    """

    id: str
    model_type: str
    parameters: int
    active_parameters: int
    layers: int
    vocabulary: int
    kv_numbers: int
    dtype: str | None = None
    output_parameters: int = 0
    expert_parameters: int = 0
    expert_fraction: float = 1.0
    bits: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible draft and what was found of it.

    Attributes:
        id: Hub id or path.
        kind: `"draft_model"`, `"eagle3"`, `"mtp"`, `"dflash"`, or another kind of head.
        verdict: `"fits"`, `"fits with padding"`, `"other vocabulary"`, `"unverified"` or `"rejected"`.
        reasons: Why, one sentence each.
        source: Where it was found: `"given"` (by the user), `"config"` (named by the target's), `"catalog"`, `"cache"` or
            `"hub"`.
        revision: Commit that was looked at.
        memory_bytes: Its weights and its cache on the device, or `None`.
        download_bytes: What would have to be downloaded first; 0 where nothing.
        predicted_speedup: Over plain decoding, or `None`.
        verified: Whether its configuration and its token ids were compared with the target's.
    """

    id: str
    kind: str
    verdict: str
    reasons: tuple[str, ...] = ()
    source: str = "catalog"
    revision: str | None = None
    memory_bytes: int | None = None
    download_bytes: int | None = None
    predicted_speedup: float | None = None
    verified: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The draft that was picked for a target, the others, and why.

    Attributes:
        target: Id or path.
        chosen: The pick, or `None`: then prompt lookup is better.
        candidates: All that were looked at, best first, the rejected ones last.
        notes: What else the user should know, such as that the Hub could not be reached.
    """

    target: str
    chosen: Candidate | None
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def why_not(self) -> str:
        """Why there is no draft that could be loaded, in one line."""
        best = self.chosen or next(iter(self.candidates), None)
        reasons = [f"{best.id}: {best.reasons[-1]}"] if best is not None and best.reasons else []
        return "; ".join([*self.notes, *reasons]) or "none was found that pays"
