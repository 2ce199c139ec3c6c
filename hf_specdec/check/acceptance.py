"""How much of the drafts a target accepts on these prompts: by category, by position, and what that means elsewhere.

Drafts of a fixed length, so that a position's figure doesn't depend on when an adaptive length got that far. The counts of
each prompt are kept, as the tokens of one prompt depend on each other: intervals come from drawing prompts anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..config import SpecConfig
from ..tools.bench import Tell
from ..tools.intervals import wilson
from ..tools.loading import LoadedModel, encode_batch
from ..tools.measured import MODEL_SOURCES
from ..tools.suites import ALL, BenchPrompt
from ..tools.trials import Learnt, Method, Run, decode


FEWEST_PROMPTS = 5  # with fewer there is nothing to draw from
DRAWS = 2000
FAMILIES = {"A1": "sum_p_argmax_q", "A2": "sum_min_pq", "B1": "sum_p_argmax_q", "B2": "sum_pq"}


def measure_acceptance(
    loaded: LoadedModel,
    prompts: Sequence[BenchPrompt],
    config: SpecConfig,
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    tell: Tell | None = None,
) -> list[dict[str, Any]]:
    """Decode every prompt with drafts of a fixed length.

    Args:
        loaded: The target.
        prompts: The prompts.
        config: Drafter and draft model.
        num_draft_tokens: Tokens drafted a round.
        max_new_tokens: Most tokens a prompt.
        temperature: 0 is greedy.
        seed: Of the sampling noise.
        tell: Called with what is done now, parts done, parts in all.

    Returns:
        The counts of each prompt, as plain JSON types.
    """
    # token by token, which is what the sums of the overlaps are about
    fixed = replace(
        config, draft_length="fixed", num_draft_tokens=num_draft_tokens, verification="rejection", seed=seed
    )
    options = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
    method, learnt = Method("fixed", fixed, options), Learnt(loaded.model)
    found = []
    try:
        for number, prompt in enumerate(prompts):
            if tell is not None:
                tell(f"acceptance at temperature {temperature:g}: {prompt.category}", number, len(prompts))
            run = decode(loaded, encode_batch(loaded, [prompt.text]), method, max_new_tokens)
            found.append(_counts(prompt, run))
    finally:
        learnt.restore()
    return found


def _counts(prompt: BenchPrompt, run: Run) -> dict[str, Any]:
    stats = run.stats or {}
    found = {
        "prompt": prompt.id,
        "category": prompt.category,
        "drafter": stats.get("drafter", "none"),
        "tokens": run.num_tokens,
        "steps": stats.get("num_spec_steps", 0),
        "drafted": stats.get("num_draft_tokens", 0),
        "accepted": stats.get("num_accepted_draft_tokens", 0),
        "drafted_at": list(stats.get("drafted_at", ())),
        "accepted_at": list(stats.get("accepted_at", ())),
        "steps_by_source": dict(stats.get("steps_by_source", {})),
        "fallback_reason": stats.get("fallback_reason"),
    }
    return found | {"overlaps": _overlaps(run, stats, sum(found["drafted_at"]))}


def _overlaps(run: Run, stats: Mapping[str, Any], tried: int) -> dict[str, float]:
    """Chances of acceptance, summed over the positions that were tried, in each family.

    A draft that wasn't sampled (copied text, say) is a distribution with all its weight on one token: there the sums of
    all families are the target's chance of that token, and what was accepted stands for it.
    """
    sampled = any(stats.get(name) for name in FAMILIES.values())
    copied = 0
    for event in run.events:
        for source, accepted in zip(event.source, event.accepted, strict=True):
            copied += accepted if not (sampled and source in MODEL_SOURCES) else 0
    return {"tried": tried} | {name: stats.get(sums, 0.0) + copied for name, sums in FAMILIES.items()}


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of some prompts.

    Args:
        rows: Counts of prompts, from `measure_acceptance`.

    Returns:
        `draft_acceptance_rate` (accepted ÷ drafted, excluding the bonus token) and `mean_acceptance_length` (tokens a step,
            including it), each with a 95 % interval or `None`; `positions` with counts, chance (given that all before were
            accepted) and interval; `drafting_share`, the share of the steps that had a draft.
    """
    steps, drafted, accepted = (_column(rows, name) for name in ("steps", "drafted", "accepted"))
    longest = max((len(row["drafted_at"]) for row in rows), default=0)
    tried, kept = (_table(rows, name, longest) for name in ("drafted_at", "accepted_at"))
    sources: Counter[str] = Counter()
    for row in rows:
        sources.update(row["steps_by_source"])
    length = 1 + accepted.sum() / steps.sum() if steps.sum() else 1.0
    return {
        "prompts": len(rows),
        "tokens": int(_column(rows, "tokens").sum()),
        "steps": int(steps.sum()),
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "draft_acceptance_rate_interval": interval(accepted, drafted),
        "mean_acceptance_length": float(length),
        "mean_acceptance_length_interval": None if (drawn := _drawn(accepted, steps)) is None else [1 + each for each in drawn],
        "drafting_share": 1 - sources["none"] / int(steps.sum()) if steps.sum() else 0.0,
        "steps_by_source": dict(sources.most_common()),
        "positions": [
            {
                "position": place + 1,
                "drafted": int(tried[:, place].sum()),
                "accepted": int(kept[:, place].sum()),
                "rate": _ratio(kept[:, place], tried[:, place]),
                "interval": interval(kept[:, place], tried[:, place]),
            }
            for place in range(longest)
        ],
    }  # fmt: skip


def by_category(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures of each category, then of all prompts, `"all"`."""
    categories = dict.fromkeys(row["category"] for row in rows)
    return {name: summarise([row for row in rows if row["category"] == name]) for name in categories} | {
        ALL: summarise(rows)
    }


def families(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """What engines with other rules would accept with the same models, at the temperature of these rows.

    A1: the draft's most likely token, kept by the ratio test (vLLM, SGLang). A2: a sampled draft token, the same test
    (Transformers). B1: the draft's most likely token, kept where the target samples the same (llama.cpp, TGI); as often as
    A1. B2: both sampled (MLX-LM). `None` where nothing was drafted.
    """
    tried = sum(row["overlaps"]["tried"] for row in rows)
    return {name: sum(row["overlaps"][name] for row in rows) / tried if tried else None for name in FAMILIES}


def interval(hits: np.ndarray[Any, Any], tries: np.ndarray[Any, Any]) -> list[float] | None:
    """A 95 % interval of a rate: the wider of Wilson's and that of drawing the prompts anew; `None` without a try."""
    if not tries.sum():
        return None
    low, high = wilson(int(hits.sum()), int(tries.sum()))
    drawn = _drawn(hits, tries)
    return [low, high] if drawn is None else [min(low, drawn[0]), max(high, drawn[1])]


def _drawn(upper: np.ndarray[Any, Any], lower: np.ndarray[Any, Any]) -> list[float] | None:
    """A 95 % interval of Σ upper ÷ Σ lower over prompts that are drawn anew; `None` with too few prompts."""
    if np.count_nonzero(lower) < FEWEST_PROMPTS:
        return None
    chosen = np.random.default_rng(0).integers(len(lower), size=(DRAWS, len(lower)))
    below = lower[chosen].sum(1)
    ratios = upper[chosen].sum(1)[below > 0] / below[below > 0]
    return [float(each) for each in np.percentile(ratios, [2.5, 97.5])]


def _ratio(hits: np.ndarray[Any, Any], tries: np.ndarray[Any, Any]) -> float | None:
    return float(hits.sum() / tries.sum()) if tries.sum() else None


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray[Any, Any]:
    return np.array([row[name] for row in rows], dtype=np.int64)


def _table(rows: Sequence[Mapping[str, Any]], name: str, width: int) -> np.ndarray[Any, Any]:
    return np.array([row[name] + [0] * (width - len(row[name])) for row in rows], dtype=np.int64).reshape(
        len(rows), width
    )
