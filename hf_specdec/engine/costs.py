"""What forwards cost, by how many tokens they read: measured, never assumed to be a slope."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import torch

from . import graphs
from .clock import now


COMMON_GAIN = 0.1  # how fast all costs follow one that was measured: the machine's speed, the context's length
LEAST_GAIN = 0.05  # how fast a cost follows its own measurements, once it has many
OUTLIER = 3.0  # a forward slower than this many times its estimate was interrupted
OPTIMISTIC_SLOPE = 0.03  # cost of one more token, in units of a one-token forward, until it is measured
WIDTHS = (1, 2, 4, 8, 16)  # tokens a row in the micro-benchmark
SHARE = 0.05  # of a generation's longest time that the micro-benchmark may take
SHORT, REPEATS = 0.02, 3  # a forward of less than so many seconds is measured so many times


class CostTable:
    """Seconds of a forward by how many tokens it reads in all rows together.

    A shared machine slows down and speeds up, and contexts grow: that moves all costs alike. So each is held as a factor of
    one common level, and the level follows every measurement; what is seldom measured stays comparable.
    Between measured sizes the table is linear; beyond them it is optimistic, so that a width is tried and then known: cost
    curves have cliffs (a float32 CPU forward of 2 tokens may take as long as one of 8). Safe under threads.
    """

    def __init__(self) -> None:
        self.level = 0.0  # log seconds
        self.factors: dict[int, float] = {}  # log of seconds ÷ level
        self.seen: dict[int, int] = {}
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: object) -> CostTable:
        with self._lock:
            copied = CostTable()
            copied.level, copied.factors, copied.seen = self.level, dict(self.factors), dict(self.seen)
        return copied

    def __contains__(self, tokens: int) -> bool:
        return tokens in self.factors

    def __bool__(self) -> bool:
        return bool(self.factors)

    def update(self, tokens: int, seconds: float) -> None:
        """Count a measured forward of `tokens` tokens in all rows together."""
        with self._lock:
            self._update(tokens, math.log(max(seconds, 1e-9)))

    def estimate(self, tokens: int) -> float:
        """Seconds of a forward of `tokens` tokens; in units of a plain forward as long as nothing is known."""
        with self._lock:
            return self._estimate(tokens)

    def _update(self, tokens: int, measured: float) -> None:
        if not self.factors:
            self.level = measured
        error = measured - self.level - self.factors.get(tokens, measured - self.level)
        seen = self.seen.get(tokens, 0)
        if seen <= 1 and error < -math.log(2):
            seen = 0  # the first forward of a shape paid for its warm-up
        if seen == 0:
            self.factors[tokens] = measured - self.level
        else:
            error = max(min(error, math.log(OUTLIER)), -math.log(OUTLIER))
            self.level += COMMON_GAIN * error
            self.factors[tokens] += max(1 / (seen + 1), LEAST_GAIN) * error
        self.seen[tokens] = seen + 1

    def _estimate(self, tokens: int) -> float:
        if tokens in self.factors:
            return math.exp(self.level + self.factors[tokens])
        if not self.factors:
            return _optimistic(tokens)
        below = max((size for size in self.factors if size < tokens), default=None)
        above = min((size for size in self.factors if size > tokens), default=None)
        if below is not None and above is not None:
            share = (tokens - below) / (above - below)
            return (1 - share) * self._estimate(below) + share * self._estimate(above)
        near = below if below is not None else above
        assert near is not None
        return self._estimate(near) * _optimistic(tokens) / _optimistic(near)


def _optimistic(tokens: int) -> float:
    return 1.0 + OPTIMISTIC_SLOPE * (tokens - 1)


def measure(target: Any, table: CostTable, most: int, steps: int) -> float:
    """Measure forwards of several widths behind what the target has read; nothing of it is kept.

    A width that the table has already is left out, and so is what would take too long beside the generation itself: then
    the widths are learnt from the rounds, or in a later generation.

    Args:
        target: The `RowModel` of a generation behind its prefill.
        table: Where the seconds go.
        most: The largest width that may be drafted.
        steps: Most tokens that the generation may emit; sets what the measuring may take.

    Returns:
        Seconds spent.
    """
    began = time.perf_counter()
    rows, device = len(target.cache.lengths), target.device
    if target.max_positions is not None:
        most = min(most, target.max_positions - max(target.cache.lengths))
    # a captured forward is timed as a replay, so it has to be captured first
    untimed = graphs.CAPTURE_AFTER + 1 if target.fast is not None and target.fast.captures else 0
    if rows not in table and steps * SHARE < 1 + untimed:
        return 0.0  # not even a plain forward
    for width in [width for width in WIDTHS if width <= most and rows * width not in table]:
        spent = time.perf_counter() - began
        if width > 1 and spent + (1 + untimed) * table.estimate(rows * width) > SHARE * steps * table.estimate(rows):
            break
        block = torch.zeros(rows, width, dtype=torch.long, device=device)
        for _ in range(untimed):
            target.forward(block, [width] * rows)
        _wait_for(device)
        for _ in range(REPEATS):
            start = now()
            target.forward(block, [width] * rows)
            _wait_for(device)
            seconds = now() - start
            table.update(rows * width, seconds)
            if seconds > SHORT or 2 * seconds + time.perf_counter() - began > SHARE * steps * table.estimate(rows):
                break
    return time.perf_counter() - began


def _wait_for(device: torch.device) -> None:
    """Wait for what this thread has queued; waiting for the whole of a GPU would break another thread's capture."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize()
