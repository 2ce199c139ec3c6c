"""How much to measure in the time there is: where a model is slow, fewer prompts are timed and texts are shorter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tools.loading import LoadedModel, encode_batch
from ..tools.suites import BenchPrompt
from ..tools.trials import PLAIN, decode


PACE_TOKENS = 16
# of the time; the rest is for loading, the cost of passes, and what comes in between
TEXTS, ONE, BATCHES, TEMPERATURES = 0.36, 0.22, 0.12, 0.08
ON_COST = 0.7  # a run with speculation, roughly, in plain runs
# of every prompt: both sides' greedy texts, in batches, and acceptance, of half of them twice
STEPS_OVER_TEXTS = 1.0 + 1.5 * ON_COST
READINGS = 4.5  # of every prompt: these, and the pass that every token is held against
SAMPLED_COST = 0.5  # of a plain token: they are sampled in batches, and looked at again
LEAST_TEXT, LEAST_SAMPLED = 24, 800  # tokens
FEWEST_TIMED, MOST_BATCHES = 3, 2  # prompts one at a time; batches of each larger size


def measure_pace(loaded: LoadedModel, prompts: Sequence[BenchPrompt]) -> tuple[float, float]:
    """Seconds that plain decoding takes to read a prompt, one of middle length, and for each token behind it."""
    encoded = sorted(
        (encode_batch(loaded, [prompt.text]) for prompt in prompts),
        key=lambda inputs: int(inputs["input_ids"].shape[1]),
    )
    inputs = encoded[len(encoded) // 2]
    decode(loaded, inputs, PLAIN, PACE_TOKENS // 4)
    run = decode(loaded, inputs, PLAIN, PACE_TOKENS)
    first = run.first_token if run.first_token is not None else run.seconds_per_token
    return first, max(run.seconds - first, 0.0) / max(run.num_tokens - 1, 1)


def plan_work(
    reading: float, pace: float, minutes: float, *, prompts: int, max_new_tokens: int, sampled_tokens: int, batch_sizes: Sequence[int],
    temperatures: int, trials: int, timed_prompts: int, curve_prompts: int,
) -> dict[str, Any]:  # fmt: skip
    """Decide how much to measure.

    Args:
        reading: Seconds that it takes to read a prompt.
        pace: Seconds for each plain token behind it.
        minutes: How long all of it should take, roughly.
        prompts: How many there are.
        max_new_tokens: Most new tokens a prompt.
        sampled_tokens: Most tokens for the test of the distribution.
        batch_sizes: Rows.
        temperatures: How many there are.
        trials: Runs of each side.
        timed_prompts: Most prompts to time, one at a time.
        curve_prompts: Most prompts at each temperature.

    Returns:
        `seconds_per_prompt`, `seconds_per_token`, `text_tokens` (new tokens of the texts that aren't timed), `sampled_tokens`, `timed` (prompts
            at batch 1, batches at other sizes, by size), `curve_prompts`.
    """
    seconds = minutes * 60
    texts = pace * (prompts * max_new_tokens * STEPS_OVER_TEXTS + sampled_tokens * SAMPLED_COST)
    scale = min(max(TEXTS * seconds - READINGS * prompts * reading, 0.0) / max(texts, 1e-9), 1.0)
    larger = [size for size in batch_sizes if size > 1]

    def affordable(share: float, tokens: int, batch: int = 1) -> int:
        # a step of n rows is taken for √n steps of one, between those of a wide GPU and a small CPU
        steps = pace * tokens * batch**0.5 * (1 + trials + ON_COST * trials)
        case = steps + reading * batch * (1 + 2 * trials)
        return int(min(share * seconds / max(case, 1e-9), 1e6))

    timed = {
        str(size): min(max(affordable(ONE, max_new_tokens), FEWEST_TIMED), timed_prompts)
        if size == 1
        else min(max(affordable(BATCHES / len(larger), max_new_tokens, size), 1), MOST_BATCHES)
        for size in batch_sizes
    }
    return {
        "seconds_per_prompt": reading,
        "seconds_per_token": pace,
        "text_tokens": max(int(scale * max_new_tokens), min(LEAST_TEXT, max_new_tokens)),
        "sampled_tokens": max(int(scale * sampled_tokens), min(LEAST_SAMPLED, sampled_tokens)),
        "timed": timed,
        "curve_prompts": min(max(affordable(TEMPERATURES / temperatures, max_new_tokens // 2), 1), curve_prompts),
    }
