"""Captured forwards: their static buffers, who may use them, and how long they are kept.

A CUDA graph replays kernels on the addresses that they were captured with. So whatever a captured forward reads or
writes lies in the model or in a `Lease`: keys and values, the block's tokens, the rows' lengths, a tree's shape, the
results. A generation has its lease alone; the next one takes it over, graphs included.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import compat
from .cache import RowCache, upload
from .masks import Branches


logger = logging.getLogger(__name__)

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 25, 33)  # tokens a row of a captured forward
SMALL = 17  # widths up to here share one buffer of logits
# operators whose result, or the shape of it, has to be known on the host
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal.",
    "unique",
    "_unique",
    "bincount",
)
CAPTURE_AFTER = 2  # uses of a shape that run eagerly: a capture costs as much as some forwards
MOST_GRAPHS = 48  # for one lease
MOST_KEPT = 4  # leases of a model that wait for the next generation
KEPT_SHARE = 0.1  # of the device's memory that their keys and values may take

_capturing = threading.Lock()  # CUDA captures one graph at a time
_pools: WeakKeyDictionary[nn.Module, Pool] = WeakKeyDictionary()


class Graph(Protocol):
    """Something captured."""

    def replay(self) -> None:
        """Run it again on what its buffers hold now."""


class Backend(Protocol):
    """How one lease captures."""

    def capture(self, body: Callable[[], None]) -> Graph:
        """Run a function of device tensors once to warm up, then capture it."""

    def mark(self) -> None:
        """Remember what is queued on the device, as the lease is given back."""

    def wait(self) -> None:
        """Let what is queued from now on run behind it."""

    def memory(self) -> float:
        """Bytes that the device has."""


class CudaGraphs:
    """CUDA graphs that share a memory pool: none of them outlives its lease, and they never run at once."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda  # untyped in part
        self.device = device
        self.stream, self.event, self.pool = cuda.Stream(device), cuda.Event(), cuda.graph_pool_handle()

    def capture(self, body: Callable[[], None]) -> Graph:
        """As in `Backend`."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            try:
                with torch.cuda.stream(self.stream):  # `torch.cuda.graph` doesn't restore it if a capture fails
                    body()
                    return self._captured(body)
            finally:
                current.wait_stream(self.stream)

    def _captured(self, body: Callable[[], object]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                body()
        except Exception:
            # torch's generators then believe that they are still being captured, until a capture succeeds
            with contextlib.suppress(Exception):
                healing = torch.cuda.CUDAGraph()
                with torch.cuda.graph(healing, stream=self.stream, capture_error_mode="thread_local"):
                    torch.zeros(1, device=self.device)
            raise
        return graph

    def mark(self) -> None:
        """As in `Backend`."""
        self.event.record(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """As in `Backend`."""
        self.event.wait(torch.cuda.current_stream(self.device))

    def memory(self) -> float:
        """As in `Backend`."""
        return float(torch.cuda.get_device_properties(self.device).total_memory)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where a capture would break, while there is none yet: a failed one leaves traces in torch.

    Args:
        device: The device that is to be captured.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator that doesn't make the host wait."""
        name = str(function).removeprefix("aten.")
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        moves = name.startswith(("_to_copy", "copy_"))  # elsewhere a number may be a tensor on the host
        places = {each.device.type for each in given if each.ndim or moves}
        if moves and (kwargs or {}).get("device") is not None:
            places.add(torch.device(kwargs["device"]).type)
        elsewhere = not places <= {self.device.type}
        booleans = name.startswith("index.") and any(each.dtype in (torch.bool, torch.uint8) for each in given[1:])
        if elsewhere or booleans or name.startswith(WAITING):
            raise RuntimeError(f"{name} makes the host wait, or copies from it")
        return function(*args, **(kwargs or {}))


def backend_for(device: torch.device) -> Callable[[torch.device], Backend] | None:
    """How to capture on a device, or `None` where that isn't possible (always with `HF_SPECDEC_GRAPHS=0`)."""
    if os.environ.get("HF_SPECDEC_GRAPHS") == "0":
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
        self.graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self.uses: Counter[Hashable] = Counter()

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in self.cache.layers)

    def pays(self, shape: Hashable) -> bool:
        """Count a use of a shape; whether it has a graph, or has been used often enough to get one."""
        self.uses[shape] += 1
        return shape in self.graphs or self.uses[shape] > CAPTURE_AFTER

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
            with torch.inference_mode(False):
                self.outputs[name] = values.new_empty(self.rows, width, *values.shape[2:])
        self.outputs[name][:, : values.shape[1]] = values

    def capture(self, shape: Hashable, body: Callable[[], None], watched: bool) -> None:
        """Capture a function of the buffers; forget the graph that wasn't used for longest if there are too many.

        Args:
            shape: What to call it.
            body: The function.
            watched: Whether to look first at what it does; compiled code can't be looked at.
        """
        if watched:
            with Watch(self.lengths.device):
                body()
        with _capturing:
            self.graphs[shape] = self.backend.capture(body)
        while len(self.graphs) > MOST_GRAPHS:
            self.graphs.popitem(last=False)

    def replay(self, shape: Hashable) -> None:
        """Run a captured function on what the buffers hold."""
        self.graphs.move_to_end(shape)
        self.graphs[shape].replay()


class Pool:
    """The leases of one model.

    Attributes:
        signature: What the graphs depend on besides their buffers.
        free: Leases that wait for a generation, the last used one at the end.
        reason: Why this model's forwards aren't captured, or `None`.
    """

    def __init__(self, signature: object, reason: str | None) -> None:
        self.signature, self.reason = signature, reason
        self.free: list[Lease] = []
        self.closed = False
        self._lock = threading.Lock()

    def lend(self, like: RowCache, rows: int, slots: int, device: torch.device, backend: Any) -> Lease:
        """A lease for that many rows with room for `slots` slots, taken over or new; its keys and values are zero."""
        with self._lock:
            most = 4 * bucket(slots)
            fitting = [each for each in self.free if each.rows == rows and slots <= each.capacity <= most]
            if fitting:
                lease = min(fitting, key=lambda each: each.capacity)
                self.free.remove(lease)
        if not fitting:
            with torch.inference_mode(False):  # or no later call could write to them outside of it
                return Lease(like, rows, bucket(slots), device, backend(device))
        lease.backend.wait()
        for layer in lease.cache.layers:  # nothing of another text, not even NaN behind a mask
            layer.keys.zero_()
            layer.values.zero_()
        return lease

    def give_back(self, lease: Lease) -> None:
        """Keep a lease for the next generation, as long as there are not too many and they are not too large."""
        lease.backend.mark()
        with self._lock:
            if self.closed or self.reason is not None:
                return
            self.free.append(lease)
            most = KEPT_SHARE * lease.backend.memory()
            while len(self.free) > MOST_KEPT or sum(each.nbytes for each in self.free) > most:
                self.free.pop(0)

    def close(self) -> None:
        """Free what is kept, and keep nothing more."""
        with self._lock:
            self.closed = True
            self.free.clear()


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
        torch.get_float32_matmul_precision(),
        (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled()),
        backends.matmul.allow_bf16_reduced_precision_reduction,
        backends.matmul.allow_fp16_reduced_precision_reduction,
    )
