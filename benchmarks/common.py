"""What the benchmark scripts share: clocks, spreads, results files, and exact pairs of any shape.

Figures are ratios of runs that were made one after the other on the same machine. A method's speed-up is its tokens per
second over the mean of the two plain runs next to it, so that a change in the machine's load meets both sides.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_specdec.tools.timing import geometric_mean, now, quartiles


def timed(run: Callable[[], Any], device: torch.device | str = "cpu") -> tuple[float, Any]:
    """Seconds and result of a call; a GPU has done its work on both sides of the clock."""
    device = torch.device(device)
    began = now(device)
    result = run()
    return now(device) - began, result


class _TimeIsUp(BaseException):
    """Not an `Exception`, so that what handles errors in the block doesn't handle this."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the block when the time is up; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    except _TimeIsUp:
        raise TimeoutError(f"not finished after {seconds:.0f} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """How many, their geometric mean, median, quartiles and worst (least)."""
    ordered = sorted(values)
    low, middle, high = quartiles(ordered)
    figures = {"gmean": geometric_mean(ordered), "median": middle, "q1": low, "q3": high}
    return {"n": len(ordered)} | {name: round(value, 4) for name, value in (figures | {"worst": ordered[0]}).items()}


def speedup(rate: float, before: float, after: float) -> float:
    """A method's tokens per second over the mean of the plain runs next to it."""
    return rate / ((before + after) / 2)


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line to a results file; it is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + json.dumps(record, allow_nan=False) + "\n")


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All records of results files; a line that a killed run left unfinished is passed over."""
    found = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a prompts file."""
    # not `splitlines`, which would also cut at separators that a JSON string may hold
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def exact_draft_pair(
    target: Any, draft: Any, acceptance: float, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Random models of two shapes that agree on the next token with a known chance, whatever their sizes.

    Both continue a text by walking one cycle through all ids: the head's row of a token's successor is that token's
    embedding, and layers add too little to hide it. The draft's successors are exchanged among a random share of
    1 − `acceptance` of the ids. So every weight is read and every layer computes, no weights are loaded, and drafts are
    accepted independently with that chance at every position.

    Args:
        target: Configuration of the target, embeddings not tied.
        draft: Configuration of the draft, with the same vocabulary.
        acceptance: Chance that a draft token is what the target would say.
        device: Where to make them.
        dtype: Of the weights.
    """
    generator = torch.Generator().manual_seed(0)
    size = target.vocab_size
    cycle = torch.randperm(size, generator=generator)
    successor = torch.empty(size, dtype=torch.long)
    successor[cycle] = cycle.roll(-1)
    wrong = torch.randperm(size, generator=generator)[: round((1 - acceptance) * size)]
    guess = successor.clone()
    guess[wrong] = successor[wrong].roll(1)
    return _walker(target, successor, device, dtype), _walker(draft, guess, device, dtype)


def _walker(config: Any, successor: torch.Tensor, device: torch.device | str, dtype: torch.dtype) -> Any:
    """A random model whose next token is `successor[token]`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for layer in model.model.layers:  # so that embeddings of unit scale outweigh what all layers add
                for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    part.weight.mul_(0.1)
            embedding = torch.nn.functional.normalize(torch.randn(successor.shape[0], config.hidden_size, dtype=dtype))
            embedding *= config.hidden_size**0.5
            model.get_input_embeddings().weight.copy_(embedding)
            model.get_output_embeddings().weight[successor.to(device)] = embedding
    return model


def about(command: Sequence[str]) -> dict[str, Any]:
    """The conditions of a run."""
    from hf_specdec.tools.environment import describe_environment, git_revision

    return {
        "command": " ".join(command),
        "git_revision": git_revision(),
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
    } | describe_environment()
