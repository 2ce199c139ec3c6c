"""What can be said without weights: architecture, cache, vocabulary, memory, expected gain."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..engine import compat, forward
from ..errors import SpecDecError
from ..selection import hub
from ..selection.candidates import Candidate, Choice, ModelFacts, Repository
from ..selection.facts import bytes_of, facts_of
from ..selection.pick import pick
from ..selection.placement import plan
from ..selection.plans import GIB
from ..selection.shapes import Load, shape_of
from ..selection.vocabulary import Vocabulary, compare, engine_warnings


def static_facts(
    target: str, draft: str | None = None, *, dtype: str = "auto", batch: int = 1, context: int = 2048
) -> dict[str, Any]:
    """Look at configurations and tokenizers, never at weights.

    Args:
        target: Local folder or Hub id.
        draft: The same for the draft model; `None` asks what this machine has.
        dtype: As in `load_model`.
        batch: Rows that there must be room for.
        context: Tokens of a row that there must be room for.

    Returns:
        As plain JSON types: `target` and `draft` (sizes), `plain_reason` (why it is decoded plainly, or `None`), `cache`,
            `draft_choice` (verdict, reasons, predicted speed-up), `vocabulary` (comparison, and what other engines make of
            it), `memory`, and `problems`, for parts that nothing could be said about.
    """
    problems: list[str] = []

    def tried(part: str, look: Callable[[], Any]) -> Any:
        try:
            return look()
        except (SpecDecError, OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError) as error:
            problems.append(f"{part}: {' '.join(str(error).split()) or type(error).__name__}")
            return None

    own = tried("target", lambda: _described(target))
    facts: ModelFacts | None = own and tried("sizes", lambda: facts_of(own))
    local = draft is None or (os.path.isdir(target) and os.path.isdir(draft))
    choice: Choice | None = own and tried("draft", lambda: pick(target, given=draft, local_files_only=local))
    chosen = _candidate(choice, draft)
    return {
        "target": facts and _sizes(own, facts),
        "plain_reason": tried("architecture", lambda: _plain_reason(target, dtype)),
        "cache": facts and {"bytes_per_token": facts.kv_numbers * bytes_of(facts.dtype if dtype == "auto" else dtype)},
        "draft_choice": chosen
        and {
            "id": chosen.id,
            "verdict": chosen.verdict,
            "reasons": list(chosen.reasons),
            "predicted_speedup": chosen.predicted_speedup,
        },
        "vocabulary": tried("vocabulary", lambda: _vocabularies(own, draft)) if own and draft else None,
        "memory": tried("memory", lambda: _memory(target, draft, dtype, batch, context)),
        "problems": problems,
    }


def _described(name: str) -> Repository:
    return hub.describe(name)


def _sizes(repository: Repository, facts: ModelFacts) -> dict[str, Any]:
    return {
        "id": repository.id,
        "model_type": facts.model_type,
        "architectures": list(repository.config.get("architectures") or ()),
        "parameters": facts.parameters,
        "layers": facts.layers,
        "vocabulary": facts.vocabulary,
        "dtype": facts.dtype,
        "revision": repository.revision,
    }


def _candidate(choice: Choice | None, draft: str | None) -> Candidate | None:
    """The draft that was named, else the one that would be picked."""
    if choice is None:
        return None
    return next((each for each in choice.candidates if each.id == draft), None) if draft else choice.chosen


def _plain_reason(target: str, dtype: str) -> str | None:
    """Why the model can't be sped up, from its class and configuration alone."""
    empty = shape_of(target, Load(1, 16, 1), None if dtype == "auto" else dtype).model
    return compat.decoding_loop_reason(empty) or forward.unsupported_reason(empty)


def _vocabularies(target: Repository, draft: str) -> dict[str, Any]:
    ours, theirs = (_vocabulary(each) for each in (target, hub.describe(draft)))
    found = compare(ours, theirs)
    return {
        "verdict": found.verdict,
        "fits": found.fits,
        "overlap": found.overlap,
        "reasons": list(found.reasons),
        "engines": engine_warnings(ours, theirs),
    }


def _vocabulary(repository: Repository) -> Vocabulary:
    folder = hub.tokenizer_folder(repository)
    if folder is None:
        raise SpecDecError(f"{repository.id} has no tokenizer, so ids can't be compared.")
    return Vocabulary.load(folder, facts_of(repository).vocabulary)


def _memory(target: str, draft: str | None, dtype: str, batch: int, context: int) -> dict[str, Any]:
    found = plan(target, draft, dtype=dtype, batch=batch, context=context)
    return {
        "batch": batch,
        "context": context,
        "offloaded_gib": found.offloaded / GIB,
        "devices": [
            {
                "device": str(each.device),
                "target_gib": (each.target_weights + each.target_cache) / GIB,
                "draft_gib": (each.draft_weights + each.draft_cache) / GIB,
                "working_gib": each.working / GIB,
                "free_gib": each.free / GIB,
            }
            for each in found.devices
            if each.used
        ],
    }
