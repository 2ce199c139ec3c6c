"""One prepared run on one large GPU (an H200): random models of Llama-3-8B and 1B shape, no download, 8 minutes.

    python benchmarks/gpu.py                 # results to $OUT/gpu.json, or --out FILE
    python benchmarks/gpu.py --toy           # the same code on tiny shapes, on any machine, in seconds

The pair is made by `exact_draft_pair`: the draft agrees with the target with a chance of `--acceptance` at every
position. Rows for batches of 1, 8 and 32: plain eager, plain compiled with a static cache, Transformers' assisted
generation (a batch of 1 only), ours eager, ours with CUDA graphs. Each method is timed in turns with plain eager.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from torch import Tensor

import hf_specdec
from benchmarks.common import (
    about,
    exact_draft_pair,
    speedup,
    spread,
    time_limit,
    timed,
)
from benchmarks.methods import environment
from hf_specdec.engine.fast import tally
from hf_specdec.engine.graphs import CAPTURE_AFTER
from hf_specdec.engine.length import reset
from hf_specdec.tools.replay import replay


TARGET = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
DRAFT = TARGET | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
TOY_TARGET = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
TOY_DRAFT = TOY_TARGET | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
ASSISTANT_TOKENS = 5
GRAPHS = {"ours_graphs": "1", "ours_eager": None}  # HF_SPECDEC_GRAPHS
# compiling comes last: it may use up its time and leaves its own state behind
ORDER = ("ours_graphs", "ours_eager", "transformers_assisted", "plain_compiled")


@dataclass(frozen=True, slots=True)
class Run:
    """What all rows share."""

    target: Any
    draft: Any
    prompt: Tensor  # [B, T]
    tokens: int
    trials: int

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        device: torch.device = self.target.device
        return device

    def generate(self, **options: Any) -> Tensor:
        """Transformers' own greedy decoding."""
        return self.target.generate(
            self.prompt, attention_mask=torch.ones_like(self.prompt), max_new_tokens=self.tokens, do_sample=False,
            pad_token_id=0, **options,
        )  # fmt: skip

    def ours(self, on_step: Any = None) -> Tensor:
        """Ours, with the draft model and the draft length that it chooses."""
        config = hf_specdec.SpecConfig(drafter="draft_model", draft_model=self.draft, on_step=on_step)
        return hf_specdec.generate(
            self.target, self.prompt, attention_mask=torch.ones_like(self.prompt), max_new_tokens=self.tokens,
            do_sample=False, pad_token_id=0, speculative=config,
        )  # fmt: skip


def call_of(name: str, run: Run) -> Callable[[], Tensor]:
    """The call that a row times."""
    if name == "plain_compiled":
        return lambda: run.generate(cache_implementation="static")
    if name == "transformers_assisted":
        run.draft.generation_config.update(
            num_assistant_tokens=ASSISTANT_TOKENS,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0,
        )
        return lambda: run.generate(assistant_model=run.draft)

    def ours() -> Tensor:
        with environment(HF_SPECDEC_GRAPHS=GRAPHS[name]):
            return run.ours()

    return ours


def measure(name: str, run: Run, warm_up_limit: float) -> dict[str, Any]:
    """One row: warm-up (compiling and capturing included), then plain and the method in turns."""
    call, size = call_of(name, run), run.prompt.shape[0] * run.tokens
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    reset(run.target)  # costs that a row of ours with graphs has learnt are not those of one without
    with time_limit(warm_up_limit):
        warm_up, text = timed(call, run.device)
        if name.startswith("ours"):  # costs of warm kernels have to be learnt as well
            call()
    row: dict[str, Any] = {"warm_up_seconds": warm_up}
    if name.startswith("ours"):
        row["capture_seconds"] = getattr(hf_specdec.last_stats(run.target), "capture_seconds", None)
    plain = [size / timed(run.generate, run.device)[0]]
    rates, ratios = [], []
    for _ in range(run.trials):
        rates.append(size / timed(call, run.device)[0])
        seconds, plain_text = timed(run.generate, run.device)
        plain.append(size / seconds)
        ratios.append(speedup(rates[-1], *plain[-2:]))
    row |= {
        "tokens_per_second": statistics.median(rates),
        "plain_tokens_per_second": statistics.median(plain),
        "speedup": spread(ratios),
        "same_text": torch.equal(text, plain_text),
    }
    if run.device.type == "cuda":
        row["peak_memory_gib"] = torch.cuda.max_memory_allocated(run.device) / 2**30
    if name.startswith("ours"):
        stats = hf_specdec.last_stats(run.target)
        assert stats is not None
        for figure in ("mean_acceptance_length", "draft_acceptance_rate", "num_target_forwards", "lean_forward"):
            row[figure] = getattr(stats, figure)
        row["graph_replays"] = getattr(stats, "graph_replays", None)
    return row


def efficiency(name: str, run: Run) -> dict[str, Any]:
    """η of a row of ours: seconds of its model calls alone, as graphs where it used graphs, over its own seconds."""
    events: list[Any] = []
    with environment(HF_SPECDEC_GRAPHS=GRAPHS[name]):
        reset(run.target)
        run.ours()
        seconds, _ = timed(lambda: run.ours(events.append), run.device)
        for _ in range(CAPTURE_AFTER + 1):  # graphs of widths that are seldom used
            replay(run.target, run.draft, run.prompt.tolist(), events)
        before = tally()
        alone = replay(run.target, run.draft, run.prompt.tolist(), events)
    return {"eta": alone / seconds, "eta_forwards": "graph" if tally().since(before).replays else "eager"}


def models(toy: bool, acceptance: float, device: torch.device) -> tuple[Any, Any]:
    """The pair, in bfloat16 (float32 for the toy)."""
    common = {"max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False}
    target, draft = (
        transformers.LlamaConfig(**shape, **common) for shape in ((TOY_TARGET, TOY_DRAFT) if toy else (TARGET, DRAFT))
    )
    return exact_draft_pair(target, draft, acceptance, device, torch.float32 if toy else torch.bfloat16)


def say(row: dict[str, Any]) -> None:
    """A row on one line."""
    head = f"B={row['batch']:<3} {row['method']:<22}"
    if "skipped" in row:
        print(f"{head} skipped: {row['skipped']}", flush=True)
    elif "speedup" in row:
        figures = "{tokens_per_second:9.1f} tokens/s, warm-up {warm_up_seconds:.1f} s".format_map(row)
        ratio = "{median:.2f} ({q1:.2f}–{q3:.2f})".format_map(row["speedup"])
        more = [f"{name} {row[name]:.3g}" for name in ("mean_acceptance_length", "peak_memory_gib") if name in row]
        print(f"{head} {figures}, speed-up {ratio},", *more, f"same text: {row['same_text']}", flush=True)
    else:
        print(f"{head} {row['tokens_per_second']:9.1f} tokens/s", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure row by row until the time is up; the results file is complete after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny shapes, on the CPU if there is no GPU")
    parser.add_argument("--out", help="results file; default $OUT/gpu.json, or gpu.json")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--compile-seconds", type=float, default=90.0, help="most seconds of one compilation")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--batch", type=int, action="append", help="batch size, repeatable; default 1, 8, 32")
    parser.add_argument("--methods", default=",".join(ORDER))
    parser.add_argument("--prompt-tokens", type=int, help="default 128, of the toy 16")
    parser.add_argument("--max-new-tokens", type=int, help="default 96, of the toy 24")
    parser.add_argument("--trials", type=int, default=3)
    options = parser.parse_args(arguments)
    options.prompt_tokens = options.prompt_tokens or (16 if options.toy else 128)
    options.max_new_tokens = options.max_new_tokens or (24 if options.toy else 96)
    began = time.perf_counter()
    transformers.logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.toy:
        torch.set_num_threads(1)
    elif device.type == "cpu":
        parser.error("there is no CUDA device; use --toy for a trial on the CPU")
    out = Path(options.out or Path(os.environ.get("OUT", ".")) / "gpu.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {"about": about(sys.argv), "options": vars(options), "rows": rows}

    def left() -> float:
        return 60 * options.minutes - (time.perf_counter() - began)

    def add(row: dict[str, Any]) -> None:
        if row not in rows:
            rows.append(row)
            say(row)
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    report["build_seconds"], (target, draft) = timed(lambda: models(options.toy, options.acceptance, device), device)
    print(f"models made in {report['build_seconds']:.1f} s", flush=True)
    batches = options.batch or ([1, 2] if options.toy else [1, 8, 32])
    generator = torch.Generator().manual_seed(0)
    runs = {}
    for batch in batches:
        shape = (batch, options.prompt_tokens)
        prompt = torch.randint(2, target.config.vocab_size, shape, generator=generator).to(device)
        runs[batch] = Run(target, draft, prompt, options.max_new_tokens, options.trials)
    longest = 0.0
    for batch, run in runs.items():
        run.generate()
        rate = batch * run.tokens / timed(run.generate, device)[0]
        add({"method": "plain", "batch": batch, "tokens_per_second": rate})
    wanted = [name for name in ORDER if name in options.methods.split(",")]
    early, late = wanted, []
    if "plain_compiled" in wanted:
        early, late = wanted[:-1], ["plain_compiled"]
    plan = [(name, batch) for batch in batches for name in early] + [
        (name, batch) for name in late for batch in batches
    ]
    given_up = ""
    for name, batch in plan:
        row: dict[str, Any] = {"method": name, "batch": batch}
        row_began = time.perf_counter()
        if name == "transformers_assisted" and batch > 1:
            row["skipped"] = "it decodes a batch of 1 only"
        elif name == "plain_compiled" and given_up:
            row["skipped"] = given_up
        elif left() < longest:
            row["skipped"] = "the time is up"
        else:
            limit = min(left(), options.compile_seconds) if name == "plain_compiled" else left()
            try:
                row |= measure(name, runs[batch], limit)
            except Exception as error:
                row["skipped"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                given_up = row["skipped"] if name == "plain_compiled" else given_up
            if name in early:
                longest = max(longest, time.perf_counter() - row_began)
        add(row)
    for row in rows:
        if row["method"].startswith("ours") and "speedup" in row:
            if left() < longest:
                break
            try:
                row |= efficiency(row["method"], runs[row["batch"]])
                print(f"B={row['batch']} {row['method']} η {row['eta']:.2f} ({row['eta_forwards']})", flush=True)
            except Exception as error:
                row["eta_error"] = f"{type(error).__name__}: {error}"
            add(row)
    report["seconds"] = time.perf_counter() - began
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
