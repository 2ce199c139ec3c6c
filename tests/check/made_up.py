"""Stages of a check with figures that are made up, and the reports that they give."""

from __future__ import annotations

import copy
from typing import Any

from hf_specdec.check.prompts import BadRecord, Reading
from hf_specdec.check.report import assemble
from hf_specdec.check.run import CheckSettings
from hf_specdec.tools.suites import BenchPrompt, Suite


CATEGORIES = ("chat", "code")
NAMES = [f"{category}/{number}" for category in CATEGORIES for number in range(4)]
HEADER: dict[str, Any] = {
    "date": "2026-01-01T00:00:00+00:00",
    "settings": CheckSettings(target="org/Model-1B", batch_sizes=(1, 8)).to_dict(),
    "environment": {"cpu": "A processor", "torch_threads": 2, "versions": {"torch": "2.13.0", "transformers": "5.24.0"}},
    "target": {"name": "org/Model-1B", "parameters": 1_234_000_000, "dtype": "bfloat16", "hardware": None},
    "draft": None,
    "drafter": "auto",
    "static": {
        "target": {
            "id": "org/Model-1B", "model_type": "llama", "architectures": ["LlamaForCausalLM"], "parameters": 1_234_000_000,
            "layers": 16, "vocabulary": 128256, "dtype": "bfloat16", "revision": None,
        },
        "plain_reason": None,
        "cache": {"bytes_per_token": 32768},
        "draft_choice": None,
        "vocabulary": None,
        "memory": {
            "batch": 8, "context": 1088, "offloaded_gib": 0.0,
            "devices": [{"device": "cpu", "target_gib": 2.5, "draft_gib": 0.0, "working_gib": 0.3, "free_gib": 12.0}],
        },
        "problems": [],
    },
}  # fmt: skip
GREEDY = {
    "verdict": "exact", "reasons": [], "texts": 8, "same": 8, "ties": 0, "near_ties": 0, "mismatches": 0, "tokens": 500,
    "worst_gap": 0.0, "band": 0.05, "num_draft_tokens": 300, "first_differences": [],
}  # fmt: skip
SAMPLED = {
    "verdict": "pass", "reasons": [], "temperature": 1.0, "tokens": 2000, "rerun": False,
    "tests": [{"name": "z", "statistic": 0.1, "p_value": 0.9, "n": 2000, "passed": True}],
    "power": {"probability": 0.9, "draft_share": 0.04, "top_share": 0.05},
}  # fmt: skip


def counts(category: str, number: int, accepted: int = 20) -> dict[str, Any]:
    """Counts of one prompt: 30 steps, 25 of them with a draft."""
    return {
        "prompt": f"{category}/{number}", "category": category, "drafter": "prompt_lookup", "tokens": 50 + accepted,
        "steps": 30, "drafted": 60, "accepted": accepted, "drafted_at": [25, accepted // 2, accepted // 4], "accepted_at": [accepted // 2, accepted // 4, accepted // 6],
        "steps_by_source": {"prompt_lookup": 25, "none": 5}, "fallback_reason": None,
        "overlaps": {"tried": 40, "A1": 20.0, "A2": 24.0, "B1": 20.0, "B2": 16.0},
    }  # fmt: skip


def speed(batch: int, mean: float = 1.8, spread: float = 0.02, cases: int = 8, **changes: Any) -> dict[str, Any]:
    """A batch size at which every prompt gains about the same."""

    def summary(category: str, number: int) -> dict[str, Any]:
        ratio = {"geometric_mean": mean, "q1": mean * 0.95, "q3": mean * 1.05, "worst": mean * 0.9, "cases": number}
        return {
            "category": category,
            "tokens_per_second": 20.0 * mean,
            "spread": spread,
            "speedup": ratio,
            "refused": None,
        }

    return {
        "batch": batch, "failures": [], "mismatches": 0,
        "plain": {"tokens_per_second": 20.0}, "on": summary("all", cases),
        "categories": {name: summary(name, cases // 2) for name in CATEGORIES},
        "cases": [
            {"category": CATEGORIES[number % 2], "speedup": mean * (0.95 + 0.1 * (number % 2)), "spread": spread}
            for number in range(cases)
        ],
        "lengths": [{"tokens": n, "cases": 8, "speedup": 0.8 + 0.2 * i} for i, n in enumerate((4, 8, 16, 32))],
    } | changes  # fmt: skip


def refused(batch: int) -> dict[str, Any]:
    """A batch size at which the machine was too restless."""
    found = speed(batch)
    why = "the plain runs themselves differ by 20 %: no speed-up is given."
    for each in (found["on"], *found["categories"].values()):
        each |= {"speedup": None, "refused": why}
    return found


def stages(**changes: Any) -> dict[str, Any]:
    """Everything went well."""
    forward = {str(n): 0.03 * (1 + 0.05 * (n - 1)) for n in (1, 2, 3, 4, 8, 16)}
    found: dict[str, Any] = {
        "plan": {
            "seconds_per_prompt": 0.1,
            "seconds_per_token": 0.05,
            "text_tokens": 64,
            "sampled_tokens": 2000,
            "sampled_prompts": 24,
            "timed": {"1": 8, "8": 2},
            "timed_tokens": {"1": 64, "8": 64},
            "curve_prompts": 3,
        },
        "greedy": GREEDY,
        "acceptance": [counts(name, number, 20 + 4 * number) for name in CATEGORIES for number in range(4)],
        "speed 1": speed(1),
        "speed 8": speed(8, 1.3),
        "costs": {"1": {"context": 100, "plain_step": 0.045, "draft_step": None, "forward": forward}},
        "sampled": SAMPLED,
        "acceptance sampled": [counts(name, number) for name in CATEGORIES for number in range(4)],
        "temperatures": [
            {
                "temperature": t,
                "cases": 3,
                "speedup": s,
                "spread": 0.02,
                "refused": None,
                "mean_acceptance_length": 1.5,
            }
            for t, s in ((0.7, 1.5), (1.0, 1.3), (1.5, 0.9))
        ],
    }
    return copy.deepcopy(found) | changes


def reading(*bad: BadRecord, prompts: tuple[BenchPrompt, ...] = ()) -> Reading:
    own = prompts or tuple(BenchPrompt(name, name.partition("/")[0], "text") for name in NAMES)
    return Reading(Suite("mine.jsonl", "0" * 64, own), "JSON lines", bad)


def report(*, interrupted: bool = False, problems: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """The report of these stages; a stage that is `None` is missing."""
    done = {name: stage for name, stage in stages(**changes).items() if stage is not None}
    return assemble(copy.deepcopy(HEADER), reading(), done, problems or {}, interrupted=interrupted)
