"""Records the runs that the page shows on opening: real ones, off and on, one file an example.

    python benchmarks/record_traces.py
    python benchmarks/record_traces.py --examples code-edit,chat --runs 9
    python benchmarks/record_traces.py --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --dtype bfloat16

Each example runs several times; the run with the median speed-up is kept. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from hf_specdec.web.examples import Example, examples
from hf_specdec.web.models import Family, families, own_family
from hf_specdec.web.recording import record
from hf_specdec.web.settings import Limits, RunSettings
from hf_specdec.web.timeline import Comparison


TRACES = Path(__file__).parent.parent / "hf_specdec" / "web" / "traces"
DECIMALS = 4  # of seconds and probabilities
MOST_BYTES = 60_000  # of a file; every visitor's page carries the first one
LIMITS = Limits(seconds=600)


def slug(title: str) -> str:
    """An example's title as a file name."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))


def median_run(family: Family, settings: RunSettings, title: str, runs: int) -> tuple[Comparison, list[float]]:
    """Of several runs the one with the median speed-up, and all speed-ups.

    Raises:
        RuntimeError: If a run was cut.
    """
    found = []
    for _ in range(runs):
        *_, (_, run) = record(family, settings, LIMITS, title)
        if run.speedup is None or run.off.cut:
            raise RuntimeError(f"a run of {title!r} was cut: {run.off.cut or run.on.cut}")
        found.append((run.speedup, run))
    found.sort(key=lambda each: each[0])
    return found[len(found) // 2][1], [speedup for speedup, _ in found]


def trace(run: Comparison, speedups: Sequence[float], command: Sequence[str], day: date) -> dict[str, Any]:
    """A run with where, when and how it was recorded."""
    low, high = f"{speedups[0]:.2f}", f"{speedups[-1]:.2f}"
    spread = f"median of {len(speedups)} runs ({low} to {high} ×)" if len(speedups) > 1 else "one run"
    return {
        "recorded": f"{run.conditions}, {day.isoformat()}, {spread}",
        "command": " ".join(command),
        "run": rounded(run.to_dict()),
    }


def rounded(value: Any) -> Any:
    """JSON values with shorter numbers."""
    if isinstance(value, float):
        return round(value, DECIMALS)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def chosen(names: str | None) -> list[tuple[str, Example]]:
    """File names and examples, in the page's order.

    Raises:
        ValueError: If one isn't known.
    """
    known = {slug(each.title): each for each in examples()}
    wanted = names.split(",") if names else list(known)
    if unknown := set(wanted) - set(known):
        raise ValueError(f"no example {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [
        (f"{place:02d}-{name}.json", each) for place, (name, each) in enumerate(known.items(), 1) if name in wanted
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Record and write."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="local folder or Hub id; default: what the page offers first")
    parser.add_argument("--draft", help="its draft model")
    parser.add_argument("--dtype", default="float32", help="of --model")
    parser.add_argument("--examples", help="comma-separated; default: all")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, help="default: the example's")
    parser.add_argument("--out", type=Path, default=TRACES)
    given = parser.parse_args(arguments)
    offered = families(torch.cuda.is_available())
    key = next(iter(offered))
    family = own_family(given.model, given.draft, given.dtype) if given.model else offered[key]
    given.out.mkdir(parents=True, exist_ok=True)
    for name, example in chosen(given.examples):
        settings = RunSettings.checked(
            LIMITS, {key: family}, family=key, prompt=example.text, temperature=example.temperature,
            strategy=example.strategy, num_draft_tokens=example.num_draft_tokens,
            max_new_tokens=given.max_new_tokens or example.max_new_tokens,
        )  # fmt: skip
        run, speedups = median_run(family, settings, example.title, given.runs)
        command = ["python", "benchmarks/record_traces.py", *arguments]
        text = json.dumps(
            trace(run, speedups, command, date.today()), ensure_ascii=False, separators=(",", ":"), allow_nan=False
        )
        size = len(text.encode())
        if size > MOST_BYTES:
            raise SystemExit(f"{name} would have {size:,} bytes, more than {MOST_BYTES:,}; record fewer tokens")
        (given.out / name).write_text(text + "\n", encoding="utf-8")
        every = " ".join(f"{each:.2f}" for each in speedups)
        print(f"{name}: {run.speedup:.2f}× ({every}), same text: {run.same_text}, {size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
