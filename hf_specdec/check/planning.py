"""How much to measure in the time there is: where a model is slow, fewer prompts are timed and texts are shorter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..tools.loading import LoadedModel, encode_batch
from ..tools.suites import BenchPrompt
from ..tools.trials import PLAIN, decode


PACE_TOKENS = 16
# of the time; the rest is for loading, the cost of passes, and what comes in between
TEXTS, ONE, BATCHES, TEMPERATURES = 0.34, 0.16, 0.08, 0.06
ON_COST = 0.7  # a run with speculation, roughly, in plain runs
# of every prompt: both sides' greedy texts, in batches, and acceptance, of half of them twice
STEPS_OVER_TEXTS = 1.0 + 1.5 * ON_COST
READINGS = 4.5  # of every prompt: these, and the pass that every token is held against
SAMPLED_COST = 0.5  # of a plain token: they are sampled in batches, and looked at again
LEAST_TEXT, LEAST_SAMPLED = 24, 800  # tokens
FEWEST_TIMED, MOST_BATCHES = 3, 2  # prompts one at a time; batches of each larger size
FEWEST_SAMPLED = 6  # prompts


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
        `seconds_per_prompt`, `seconds_per_token`, `text_tokens` (new tokens of the texts that aren't timed), `sampled_tokens`,
            `sampled_prompts` (whose texts are sampled, short ones first), `timed` (prompts at batch 1, batches at other sizes, by
            size), `timed_tokens` (most new tokens of each of them), `curve_prompts`.
    """
    seconds = minutes * 60
    texts = pace * (prompts * max_new_tokens * STEPS_OVER_TEXTS + sampled_tokens * SAMPLED_COST)
    scale = min(max(TEXTS * seconds - READINGS * prompts * reading, 0.0) / max(texts, 1e-9), 1.0)
    a_size = BATCHES / max(sum(size > 1 for size in batch_sizes), 1)  # share of each larger size

    def step(batch: int) -> float:
        # of n rows it is taken for √n steps of one, between those of a wide GPU and a small CPU
        return pace * math.sqrt(batch) * (1 + trials + ON_COST * trials)

    def read(batch: int) -> float:
        return reading * batch * (1 + 2 * trials)

    def affordable(share: float, tokens: int, batch: int = 1) -> int:
        return int(min(share * seconds / max(step(batch) * tokens + read(batch), 1e-9), 1e6))

    def shortened(batch: int) -> int:
        """Tokens of a case that there is no time for otherwise."""
        if batch == 1 or affordable(a_size, max_new_tokens, batch):
            return max_new_tokens
        return max(int((a_size * seconds - read(batch)) / max(step(batch), 1e-9)), min(LEAST_TEXT, max_new_tokens))

    timed = {
        str(size): min(max(affordable(ONE, max_new_tokens), FEWEST_TIMED), timed_prompts)
        if size == 1
        else min(max(affordable(a_size, max_new_tokens, size), 1), MOST_BATCHES)
        for size in batch_sizes
    }
    return {
        "seconds_per_prompt": reading,
        "seconds_per_token": pace,
        "text_tokens": max(int(scale * max_new_tokens), min(LEAST_TEXT, max_new_tokens)),
        "sampled_tokens": max(int(scale * sampled_tokens), min(LEAST_SAMPLED, sampled_tokens)),
        "sampled_prompts": max(int(scale * prompts), min(FEWEST_SAMPLED, prompts)),
        "timed": timed,
        "timed_tokens": {str(size): shortened(size) for size in batch_sizes},
        "curve_prompts": min(max(affordable(TEMPERATURES / temperatures, max_new_tokens // 2), 1), curve_prompts),
    }
