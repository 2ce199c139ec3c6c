"""What the benchmark scripts share: clocks, spreads, results files, exact pairs of any shape, and η.

Figures are ratios of runs that were made one after the other on the same machine. A method's speed-up is its tokens per
second over the mean of the two plain runs next to it, so that a change in the machine's load meets both sides.
"""

from __future__ import annotations

import json
import signal
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_specdec.engine.forward import RowModel
from hf_specdec.stats import StepEvent
from hf_specdec.tools.timing import geometric_mean, now, quartiles


Measure = Callable[[Callable[[], Any], torch.device], float]


def timed(run: Callable[[], Any], device: torch.device | str = "cpu") -> tuple[float, Any]:
    """Seconds and result of a call; a GPU has done its work on both sides of the clock."""
    device = torch.device(device)
    began = now(device)
    result = run()
    return now(device) - began, result


def median_seconds(run: Callable[[], Any], device: torch.device | str = "cpu", repeats: int = 3) -> float:
    """Median seconds of a call that has been warmed up by one untimed call."""
    run()
    return statistics.median(timed(run, device)[0] for _ in range(repeats))


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


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of our loop ran: rows, tokens a row in the target's forward, draft forwards of one token, whether
    the draft had two tokens to catch up on."""

    rows: int
    width: int
    draft_steps: int
    catches_up: bool


def rounds_of(events: Sequence[StepEvent], drafter: str = "draft_model") -> list[Round]:
    """The rounds behind the prefill; draft steps are those of a draft model."""
    found, full = [], False
    for event in events:
        if event.step == 0:
            continue
        drafted = max(map(len, event.drafted), default=0)
        by_model = max(
            (len(row) for row, by in zip(event.drafted, event.source, strict=True) if by == drafter), default=0
        )
        found.append(Round(len(event.rows), 1 + drafted, by_model, bool(by_model) and full))
        full = any(kept == len(row) > 0 for kept, row in zip(event.accepted, event.drafted, strict=True))
    return found


def ideal_seconds(
    model: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    rounds: Sequence[Round],
    measure: Measure = median_seconds,
) -> float:
    """What the model calls of a generation take on their own: prefill, each round's target forward, each draft step.

    Forwards are measured alone, at the rows and widths that were used, behind the prompt and half of the output. Plain
    decoding's seconds over these are the speed-up of a loop that costs nothing; η is the measured speed-up over that.

    Args:
        model: The target.
        draft: The draft model, or `None`.
        prompts: Tokens of each row.
        outputs: What each row emitted.
        rounds: From `rounds_of`.
        measure: Gives the seconds of a forward, from the call and its device.
    """
    texts = [[*prompt, *output[: len(output) // 2]] for prompt, output in zip(prompts, outputs, strict=True)]
    forwards = Counter((each.rows, each.width) for each in rounds)
    seconds = _calls(model, prompts, texts, forwards, measure)
    if draft is not None:
        steps: Counter[tuple[int, int]] = Counter()
        for each in rounds:
            if each.draft_steps:
                steps[each.rows, 1 + each.catches_up] += 1
                steps[each.rows, 1] += each.draft_steps - 1
        seconds += _calls(draft, prompts, texts, +steps, measure)
    return seconds


def _calls(
    model: Any,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    forwards: Mapping[tuple[int, int], int],
    measure: Measure,
) -> float:
    """Seconds of one prefill and of so many forwards of (rows, width)."""
    widest = max((width for _, width in forwards), default=1)
    reserve = max(map(len, texts)) + widest
    with torch.no_grad():
        seconds = median_seconds(lambda: RowModel(model, len(prompts), reserve).prefill(prompts), model.device, 1)
        row_model = RowModel(model, len(texts), reserve)
        row_model.prefill(texts)
        for rows in sorted({rows for rows, _ in forwards}, reverse=True):
            if rows < len(row_model.cache.lengths):
                row_model.cache.select(range(rows))
            for width in sorted(width for count, width in forwards if count == rows):
                tokens = torch.ones(rows, width, dtype=torch.long, device=model.device)
                counts = [width] * rows
                one = measure(lambda tokens=tokens, counts=counts: row_model.forward(tokens, counts), model.device)
                seconds += forwards[rows, width] * one
    return seconds


def about(command: Sequence[str]) -> dict[str, Any]:
    """The conditions of a run."""
    from hf_specdec.tools.environment import describe_environment, git_revision

    return {
        "command": " ".join(command),
        "git_revision": git_revision(),
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
    } | describe_environment()
