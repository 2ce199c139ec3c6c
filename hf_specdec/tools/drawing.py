"""How the project's pictures look. Colours are those of Okabe and Ito, which colour-blind readers can tell apart."""

from __future__ import annotations

import importlib.util
from typing import Any

from ..errors import SpecDecError


COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
MARKERS = "osD^vPX*"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "svg.hashsalt": "hf_specdec",
    "text.parse_math": False,  # a category or a path may hold dollar signs
    "savefig.dpi": 150,
}


def has_matplotlib() -> bool:
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def need_matplotlib() -> None:
    """Say how to get it.

    Raises:
        SpecDecError: If matplotlib isn't installed.
    """
    if not has_matplotlib():
        raise SpecDecError("Plots need matplotlib. Install it with: pip install 'hf-specdec[bench]'")
