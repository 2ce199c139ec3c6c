"""Captured forwards: their static buffers, who may use them, and how long they are kept.

A CUDA graph replays kernels on the addresses that they were captured with. So whatever a captured forward reads or
writes lies in the model or in a `Lease`: keys and values, the block's tokens, the rows' lengths, a tree's shape, the
results. A generation has its lease alone; the next one takes it over, graphs included.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from . import compat
from .cache import RowCache, upload
from .capture import Backend, CudaGraphs, Graph, Watch
from .masks import Branches


logger = logging.getLogger(__name__)

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 25, 33)  # tokens a row of a captured forward
SMALL = 17  # widths up to here share one buffer of logits
CAPTURE_AFTER = 2  # uses of a shape that run eagerly: a capture costs as much as some forwards
MOST_GRAPHS = 48  # for one lease
MOST_KEPT = 4  # leases of a model that wait for the next generation
KEPT_SHARE = 0.1  # of the device's memory that their keys and values may take

_capturing = threading.Lock()  # CUDA captures one graph at a time
_pools: WeakKeyDictionary[nn.Module, Pool] = WeakKeyDictionary()


def backend_for(device: torch.device) -> Callable[[torch.device], Backend] | None:
    """How to capture on a device, or `None` where that isn't possible or wanted (`HF_SPECDEC_GRAPHS=1` asks for it)."""
    if os.environ.get("HF_SPECDEC_GRAPHS") != "1":
        return None
    return CudaGraphs if device.type == "cuda" and torch.version.hip is None else None


class Lease:
    """Buffers of fixed shape, and the graphs that were captured over them.

    Attributes:
        rows: Rows of every buffer (`tall`); those that the generation hasn't are dummies of length 0.
        capacity: Slots of the keys and values.
        cache: The keys and values.
        tokens: The block, int64 `[rows, WIDTHS[-1]]`.
        lengths: Committed slots, int64 `[rows]`.
        fed: Real tokens of the block, int64 `[rows]`.
        branches: A tree's shape.
        outputs: Results of the last replay, overwritten by the next.
    """

    def __init__(self, like: RowCache, rows: int, capacity: int, device: torch.device, backend: Backend) -> None:
        widest = WIDTHS[-1]
        self.rows, self.capacity, self.backend = rows, capacity, backend
        self.cache = like.alike(rows, capacity)
        self.ladder = torch.arange(max(capacity, rows, widest), device=device)
        self.tokens = torch.zeros(rows, widest, dtype=torch.long, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.fed = torch.ones(rows, dtype=torch.long, device=device)
        self.itself = torch.eye(widest, dtype=torch.bool, device=device).expand(rows, -1, -1)
        self.branches = Branches(torch.zeros_like(self.tokens), self.itself.clone())
        self.outputs: dict[str, Tensor] = {}
        self.graphs: dict[Hashable, Graph] = {}  # none is ever thrown away, see `CudaGraphs`
        self.uses: Counter[Hashable] = Counter()

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in self.cache.layers)

    def pays(self, shape: Hashable) -> bool:
        """Count a use of a shape; whether it has a graph, or has been used often enough to get one of those left."""
        self.uses[shape] += 1
        return shape in self.graphs or (self.uses[shape] > CAPTURE_AFTER and len(self.graphs) < MOST_GRAPHS)

    def fill(self, lengths: Sequence[int], tokens: Tensor, branches: Branches | None = None) -> None:
        """Put the inputs of a replay into the buffers.

        Args:
            lengths: Committed slots of each real row.
            tokens: Their blocks, int64 `[rows, n]`.
            branches: The blocks' shape, if they are trees.
        """
        rows, width = tokens.shape
        idle = [0] * (self.rows - rows)
        self.lengths.copy_(upload([*lengths, *idle], self.lengths.device), non_blocking=True)
        self.tokens[:rows, :width] = tokens
        if branches is not None:
            depth, ancestors = self.branches
            depth.zero_()
            ancestors.copy_(self.itself)  # a dummy that saw nothing at all would be NaN, and so would what it writes
            depth[:rows, :width] = branches.depth
            ancestors[:rows, :width, :width] = branches.ancestors

    def hold(self, name: str, values: Tensor, width: int) -> None:
        """Keep a result `[rows, n, …]` of a captured function where the next capture doesn't touch it.

        Args:
            name: Its name in `outputs`.
            values: The result.
            width: The widest that this result may be.
        """
        if name not in self.outputs:  # while warming up, outside of the graphs' own memory
            self.outputs[name] = values.new_empty(self.rows, width, *values.shape[2:])
        self.outputs[name][:, : values.shape[1]] = values

    def capture(self, shape: Hashable, body: Callable[[], None], watched: bool) -> None:
        """Capture a function of the buffers.

        Args:
            shape: What to call it.
            body: The function.
            watched: Whether to look first at what it does; compiled code can't be looked at.
        """
        with in_one_mode():
            if watched:
                with Watch(self.lengths.device):
                    body()
            with _capturing, _nothing_collected():
                self.graphs[shape] = self.backend.capture(body)

    def replay(self, shape: Hashable) -> None:
        """Run a captured function on what the buffers hold."""
        with in_one_mode():
            self.graphs[shape].replay()


@contextmanager
def in_one_mode() -> Iterator[None]:
    """Without gradients, and outside of inference mode: what is made in that can't be written to in a later call."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Let no finalizer of another object come in between: it may do what a capture forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Pool:
    """The leases of one model.

    Attributes:
        signature: What the graphs depend on besides their buffers.
        free: Leases that wait for a generation, the last used one at the end.
        returned: Leases of generations that ended. Finalizers put them here, which may run at any moment, even while
            this thread has the lock.
        reason: Why this model's forwards aren't captured, or `None`.
    """

    def __init__(self, signature: object, reason: str | None) -> None:
        self.signature, self.reason = signature, reason
        self.free: list[Lease] = []
        self.returned: deque[Lease] = deque()
        self.closed = False
        self._lock = threading.Lock()

    def lend(self, like: RowCache, rows: int, slots: int, device: torch.device, backend: Any) -> Lease:
        """A lease for that many rows with room for `slots` slots, taken over or new; its keys and values are zero."""
        self.take_back()
        with self._lock:
            most = 4 * bucket(slots)
            fitting = [each for each in self.free if each.rows == rows and slots <= each.capacity <= most]
            if fitting:
                lease = min(fitting, key=lambda each: each.capacity)
                self.free.remove(lease)
        if not fitting:
            with in_one_mode():
                return Lease(like, rows, bucket(slots), device, backend(device))
        lease.backend.wait()
        for layer in lease.cache.layers:  # nothing of another text, not even NaN behind a mask
            layer.keys.zero_()
            layer.values.zero_()
        return lease

    def take_back(self) -> None:
        """Keep what was returned for the next generation, as long as that is not too many leases or too large ones."""
        with self._lock:
            while self.returned:
                lease = self.returned.popleft()
                lease.backend.mark()
                if self.closed or self.reason is not None:
                    continue
                self.free.append(lease)
                most = KEPT_SHARE * lease.backend.memory()
                while len(self.free) > MOST_KEPT or sum(each.nbytes for each in self.free) > most:
                    self.free.pop(0)

    def clear(self) -> None:
        """Free what is kept."""
        self.take_back()
        with self._lock:
            self.free.clear()

    def close(self) -> None:
        """Free what is kept, and keep nothing more."""
        self.closed = True
        self.clear()


def pool_of(model: Any) -> Pool:
    """The pool of a model: a new one where anything that its graphs depend on has changed."""
    reason, pool = _unsupported_reason(model), _pools.get(model)
    signature = (reason, _signature(model))
    if pool is None or pool.signature != signature:
        free(model)
        pool = _pools[model] = Pool(signature, reason)
        if reason is not None:
            logger.info("no graphs for %s: %s", type(model).__name__, reason)
    return pool


def free(model: Any = None) -> None:
    """Free the graphs of one model, or of all."""
    for each in [model] if model is not None else list(_pools):
        if (pool := _pools.pop(each, None)) is not None:
            pool.close()


def settle() -> None:
    """Take back what generations have returned, so that no more is kept between them than may be."""
    for pool in list(_pools.values()):
        pool.take_back()


def relieve() -> None:
    """Free the memory of every lease that is not in use."""
    for pool in list(_pools.values()):
        pool.clear()
    with _capturing:
        torch.cuda.empty_cache()


def wide(width: int) -> int:
    """The captured width for that many tokens a row."""
    return next(each for each in WIDTHS if each >= width)


def tall(rows: int) -> int:
    """Rows of the buffers for that many: a power of two, from 8 on a multiple of 8."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


def bucket(slots: int) -> int:
    """Slots that a captured forward looks at: 256, 384, 512, 768, 1024 and so on."""
    power = 1 << max(slots - 1, 255).bit_length()
    return power * 3 // 4 if 256 < slots <= power * 3 // 4 else power


def _unsupported_reason(model: Any) -> str | None:
    """Why a model's forward can't be captured, or `None` if that can be tried."""
    if model.training:
        return "it is in training mode"
    return compat.altered_reason(model, compat.model_class(model).__module__)


def _signature(model: Any) -> object:
    """Equal signatures, equal kernels on equal addresses."""
    tensors = [*model.parameters(), *model.buffers()]
    backends: Any = torch.backends.cuda
    return (
        [(each.data_ptr(), tuple(each.shape), each.stride(), each.dtype) for each in tensors],
        compat.fingerprint(compat.model_class(model).__module__),
        compat.attention_implementation(model),
        os.environ.get("HF_SPECDEC_LEAN"),
        torch.are_deterministic_algorithms_enabled(),
        _float32_precision(),
        (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled()),
        backends.matmul.allow_bf16_reduced_precision_reduction,
        backends.matmul.allow_fp16_reduced_precision_reduction,
    )


def _float32_precision() -> str:
    """How exactly float32 matrices are multiplied; torch's older getter raises where the newer setter was used."""
    precision: str | None = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.get_float32_matmul_precision() if precision is None else precision
