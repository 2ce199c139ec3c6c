"""How sure a counted share is."""

from __future__ import annotations

import math


Z95 = 1.959964  # of a two-sided 95 % interval


def wilson(hits: float, tries: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion (JASA 22, 1927); from 0 to 1 without a try."""
    if tries <= 0:
        return 0.0, 1.0
    rate = hits / tries
    middle = rate + Z95**2 / (2 * tries)
    half = Z95 * math.sqrt(rate * (1 - rate) / tries + Z95**2 / (4 * tries**2))
    scale = 1 + Z95**2 / tries
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)
