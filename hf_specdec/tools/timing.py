"""Clocks, and the few statistics that are said of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch


def now(device: torch.device) -> float:
    """Read the clock, in seconds, when the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean of ratios: twice as fast and half as fast cancel out."""
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, by linear interpolation between the values.

    Raises:
        ValueError: Without any value.
    """
    return percentile(values, 0.25), percentile(values, 0.5), percentile(values, 0.75)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies, by linear interpolation between them.

    Raises:
        ValueError: Without any value.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def relative_spread(seconds: Sequence[float]) -> float:
    """How much repeated runs of the same work differ: their interquartile range ÷ their median."""
    low, middle, high = quartiles(seconds)
    return (high - low) / middle
