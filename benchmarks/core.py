"""Interleaved speed ratios of the core: engine overhead on an exact pair, and prompt lookup on a real chat model.

    python benchmarks/core.py pair                      # 12 layers against 1, k = 4, against Transformers' assisted loop
    python benchmarks/core.py lookup --prompts FILE     # SmolLM2: plain, Transformers' prompt lookup, ours

Every round runs all methods one after the other; figures are medians of per-round ratios with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers

import hf_specdec
from benchmarks.common import read_lines
from hf_specdec.tools.differences import find_difference
from hf_specdec.tools.timing import quartiles


transformers.logging.set_verbosity_error()


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of a call."""
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


def spread(ratios: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = quartiles(ratios)
    return {"median": round(middle, 3), "q1": round(low, 3), "q3": round(high, 3), "n": len(ratios)}


def logit_gap(model: Any, prompt: torch.Tensor, ours: torch.Tensor, plain: torch.Tensor) -> float | None:
    """How far apart the model's logits of the two tokens are where two texts first differ; `None` if they don't.

    In bfloat16 a gap of a few units in the last place (2⁻⁷ of the logit) is a tie that rounding decides; anything
    larger would be a bug.
    """
    off, on = (text[0, prompt.shape[1] :].tolist() for text in (plain, ours))
    difference = find_difference(model, prompt, off, on)
    return None if difference is None else difference.apart


def pair(options: argparse.Namespace) -> dict[str, Any]:
    """A target of 12 layers and an exact draft of one: what the loops cost around the same forwards."""
    from tests.tiny import exact_pair

    target, draft = exact_pair(12, vocab_size=256, max_position_embeddings=4096)
    draft.generation_config.update(
        num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0
    )
    config = hf_specdec.SpecConfig(drafter="draft_model", draft_model=draft, num_draft_tokens=4, draft_length="fixed")
    ids = torch.randint(2, 256, (1, 16), generator=torch.Generator().manual_seed(0))
    common = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    methods: dict[str, Callable[[], Any]] = {
        "plain": lambda: target.generate(ids, **common),
        "transformers": lambda: target.generate(ids, assistant_model=draft, **common),
        "ours": lambda: hf_specdec.generate(target, ids, speculative=config, **common),
    }
    texts = {name: run() for name, run in methods.items()}
    rounds = [{name: timed(run)[0] for name, run in methods.items()} for _ in range(options.trials)]
    return {
        "same_text": all(torch.equal(text, texts["plain"]) for text in texts.values()),
        "ours_vs_transformers": spread([r["transformers"] / r["ours"] for r in rounds]),
        "ours_vs_plain": spread([r["plain"] / r["ours"] for r in rounds]),
        "transformers_vs_plain": spread([r["plain"] / r["transformers"] for r in rounds]),
    }


def turn(number: int) -> tuple[str, ...]:
    """In which order the methods run on a prompt: plain first, the two others by turns."""
    return ("plain", "transformers", "ours") if number % 2 else ("plain", "ours", "transformers")


def lookup(options: argparse.Namespace) -> dict[str, Any]:
    """Prompt lookup on real prompts, by category."""
    from hf_specdec.tools.chat_model import fetch_chat_model

    path = str(fetch_chat_model())
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    records = read_lines(Path(options.prompts))
    wanted = options.categories.split(",")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    common = {"max_new_tokens": options.max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for record in records:
        group = results.get(record["category"])
        if group is None or len(group) >= options.per_category:
            continue
        chat = [{"role": "user", "content": record["turns"][0]}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        if inputs["input_ids"].shape[1] > options.max_prompt_tokens:
            continue
        methods: dict[str, Callable[[], Any]] = {
            "plain": lambda inputs=inputs: model.generate(**inputs, **common),
            "ours": lambda inputs=inputs: hf_specdec.generate(
                model, **inputs, speculative=options.drafter or True, **common
            ),
            "transformers": lambda inputs=inputs: model.generate(**inputs, prompt_lookup_num_tokens=10, **common),
        }
        number = sum(map(len, results.values()))
        if not number:
            for run in methods.values():
                run()
        found = {name: timed(methods[name]) for name in turn(number)}
        again = timed(methods["plain"])[0]
        plain = (found["plain"][0] + again) / 2
        stats = hf_specdec.last_stats(model)
        assert stats is not None
        group.append(
            {
                "id": record["id"],
                "ours_vs_plain": plain / found["ours"][0],
                "transformers_vs_plain": plain / found["transformers"][0],
                "ours_vs_transformers": found["transformers"][0] / found["ours"][0],
                "same_text": torch.equal(found["ours"][1], found["plain"][1]),
                "transformers_same_text": torch.equal(found["transformers"][1], found["plain"][1]),
                "logit_gap": logit_gap(model, inputs["input_ids"], found["ours"][1], found["plain"][1]),
                "acceptance_length": stats.mean_acceptance_length,
                "drafted_rounds": 1 - stats.steps_by_source.get("none", 0) / max(stats.num_spec_steps, 1),
            }
        )
        print(record["category"], group[-1], file=sys.stderr, flush=True)
    keys = ("ours_vs_plain", "transformers_vs_plain", "ours_vs_transformers", "acceptance_length")
    everything = {"all": [each for group in results.values() for each in group], **results}
    return {
        name: {key: spread([each[key] for each in group]) for key in keys}
        | {
            "same_text": f"{sum(each['same_text'] for each in group)}/{len(group)}",
            "transformers_same_text": f"{sum(each['transformers_same_text'] for each in group)}/{len(group)}",
            "logit_gaps": sorted(each["logit_gap"] for each in group if each["logit_gap"] is not None),
            "worst": min(each["ours_vs_plain"] for each in group),
        }
        for name, group in everything.items()
        if group
    }


def main() -> None:
    """Run one benchmark and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pair", "lookup"))
    parser.add_argument("--prompts", help="JSONL with `id`, `category`, `turns`")
    parser.add_argument("--categories", default="code_edit,summarization,rag")
    parser.add_argument("--per-category", type=int, default=12)
    parser.add_argument("--max-prompt-tokens", type=int, default=1024)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafter", help="a drafter's name; without it what `speculative=True` chooses")
    parser.add_argument("--trials", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(2)
    result = {"pair": pair, "lookup": lookup}[options.what](options)
    about = {
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(about | result, indent=2))


if __name__ == "__main__":
    main()
