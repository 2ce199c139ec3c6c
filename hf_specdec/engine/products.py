"""Matrix products of few rows with large weights on a CPU: the fastest of several ways, found by measuring.

A verify forward multiplies 2 to 16 rows with every weight. Libraries are tuned for one row or for many: on an AVX2
machine `F.linear` in float32 takes 2.5 times as long for 4 rows as for 1, the same product with the roles of the
matrices swapped takes less than for 1; and where the CPU has no bfloat16 instructions, widening blocks of a bfloat16
weight to float32 inside the cache is 3 to 6 times faster from 16 rows on. Which way wins depends on the machine, so it
is measured once a process, for each power of two of rows, on the model's own weights.

Every way computes the same sums with float32 (or wider) accumulation and one rounding; only their order differs, as it
does between row counts within `F.linear`. Two processes may choose differently where two ways are equally fast;
`torch.use_deterministic_algorithms(True)` keeps to `F.linear`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .clock import standing_still


Way = Callable[[Tensor, Tensor], Tensor]

BLOCK = 1 << 20  # elements of a weight that are widened at a time: 4 MiB of float32
SAMPLE_BYTES = 96 << 20
MOST_ROWS = 256  # above, all row counts are alike
PASSES = 3
MARGIN = 0.9  # another way must take less than this share of the time of `F.linear`
_chosen: dict[tuple[object, ...], Way] = {}
_lock = threading.Lock()


def swapped(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` computed as `(weight @ x.T).T`."""
    return torch.mm(weight, x.t()).t().contiguous()


def halved(x: Tensor, weight: Tensor) -> Tensor:
    """One row, with the weight in two halves that threads share."""
    rows, features = weight.shape
    return torch.bmm(weight.view(2, rows // 2, features), x.t().expand(2, features, 1)).view(1, rows)


def widened(x: Tensor, weight: Tensor) -> Tensor:
    """A product of 16-bit numbers in float32, one block of the weight after the other."""
    rows, features = weight.shape
    step = max(BLOCK // features, 1)
    block = torch.empty(min(step, rows), features, dtype=torch.float32, device=x.device)
    found = torch.empty(rows, x.shape[0], dtype=torch.float32, device=x.device)
    columns = x.float().t()
    for first in range(0, rows, step):
        piece = weight[first : first + step]
        torch.mm(block[: len(piece)].copy_(piece), columns, out=found[first : first + step])
    return torch.empty(x.shape[0], rows, dtype=x.dtype, device=x.device).copy_(found.t())


def ways(dtype: torch.dtype, rows: int, out_features: int) -> list[Way]:
    """Ways that may beat `F.linear` for that many rows."""
    if dtype == torch.float32:
        if rows == 1:
            return [halved] if out_features % 2 == 0 else []
        return [swapped] if rows <= 32 else []
    return [widened] if dtype in (torch.bfloat16, torch.float16) and rows > 1 else []


class Products:
    """Linear layers of one model.

    Args:
        weights: Some of its weights, all of one shape. The ways are measured on as many of them as don't fit in the
            CPU's caches together, as the model doesn't.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.samples = weights[: max(SAMPLE_BYTES // weights[0].nbytes, 1)]
        self.dtype = weights[0].dtype
        self.on_cpu = weights[0].device.type == "cpu"

    def way(self, rows: int) -> Way:
        """The way for that many rows."""
        if not self.on_cpu or torch.are_deterministic_algorithms_enabled():
            return F.linear
        size = min(1 << (rows - 1).bit_length(), MOST_ROWS)
        key = (self.dtype, size, tuple(self.samples[0].shape), torch.get_num_threads())
        if key not in _chosen:
            with _lock:
                if key not in _chosen:
                    _chosen[key] = self._fastest(size)
        return _chosen[key]

    def _fastest(self, rows: int) -> Way:
        candidates = [F.linear, *ways(self.dtype, rows, self.samples[0].shape[0])]
        if len(candidates) == 1:
            return F.linear
        # many rows keep the arithmetic busy whatever the caches hold: a few samples do
        samples = self.samples[: max(len(self.samples) * 8 // rows, 1)]
        x = torch.ones(rows, samples[0].shape[1], dtype=self.dtype, device=samples[0].device)
        seconds = {way: float("inf") for way in candidates}
        with standing_still():
            for _ in range(PASSES):
                for way in candidates:
                    began = time.perf_counter()
                    for weight in samples:
                        way(x, weight)
                    seconds[way] = min(seconds[way], time.perf_counter() - began)
        best = min(candidates, key=seconds.__getitem__)
        return best if seconds[best] < MARGIN * seconds[F.linear] else F.linear


def apply(way: Way, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear(x, weight, bias)` for `x` `[rows, n, in]`, computed in the given way."""
    if way is F.linear or (way is halved and weight.shape[0] % 2):
        return F.linear(x, weight, bias)
    found = way(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)
    return found if bias is None else found + bias
