"""How a forward is captured: by CUDA graphs, or by a stand-in of the tests."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
INDEXING = ("index.", "index_put", "_index_put_impl_")  # those with a mask count what it lets through

# streams that no living lease captures on: cuBLAS keeps a workspace for each that was ever used, and torch has 32
_streams: defaultdict[int | None, deque[Any]] = defaultdict(deque)


class Graph(Protocol):
    """Something captured."""

    def replay(self) -> None:
        """Run it again on what its buffers hold now."""


class Backend(Protocol):
    """How one lease captures."""

    def capture(self, body: Callable[[], None]) -> Graph:
        """Run a function of device tensors once to warm up, then capture it."""

    def mark(self) -> None:
        """Remember what the last generation queued on the device, as its lease is taken back."""

    def wait(self) -> None:
        """Let what is queued from now on run behind it."""

    def memory(self) -> float:
        """Bytes that the device has."""


class CudaGraphs:
    """CUDA graphs that share a memory pool and a stream: they die together, and never run at once.

    Destroying one of them would free the workspace that cuBLAS has for their stream, which the others still use.
    """

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda  # untyped in part
        self.device = device
        try:
            self.stream = _streams[device.index].pop()
        except IndexError:
            self.stream = cuda.Stream(device)
        weakref.finalize(self, _streams[device.index].append, self.stream).atexit = False
        self.event, self.pool = cuda.Event(), cuda.graph_pool_handle()
        self.used_on = torch.cuda.current_stream(device)  # `mark` may be called from elsewhere

    def capture(self, body: Callable[[], None]) -> Graph:
        """As in `Backend`."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            try:
                with torch.cuda.stream(self.stream):  # `torch.cuda.graph` doesn't restore it if a capture fails
                    body()
                    return CudaGraph(self._captured(body), self)
            finally:
                current.wait_stream(self.stream)

    def _captured(self, body: Callable[[], object]) -> Any:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                body()
        except Exception:
            # Torch's allocator and generators then believe that they are still being captured: the one until it is told
            # (torch 2.6 to 2.12), the others until a capture succeeds.
            private: Any = torch._C
            with contextlib.suppress(Exception):
                private._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
            with contextlib.suppress(Exception):
                healing = torch.cuda.CUDAGraph()
                with torch.cuda.graph(healing, stream=self.stream, capture_error_mode="thread_local"):
                    torch.zeros(1, device=self.device)
            self.pool = torch.cuda.graph_pool_handle()
            raise
        return graph

    def mark(self) -> None:
        """As in `Backend`."""
        self.event.record(self.used_on)

    def wait(self) -> None:
        """As in `Backend`."""
        self.used_on = torch.cuda.current_stream(self.device)
        self.event.wait(self.used_on)

    def memory(self) -> float:
        """As in `Backend`."""
        return float(torch.cuda.get_device_properties(self.device).total_memory)


class CudaGraph:
    """A graph, with what it needs while it lives."""

    def __init__(self, graph: Any, backend: CudaGraphs) -> None:
        self.graph, self.backend = graph, backend  # they are let go in this order

    def replay(self) -> None:
        """As in `Graph`."""
        self.graph.replay()
        self.backend.used_on = torch.cuda.current_stream(self.backend.device)


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
        name, kwargs = str(function).removeprefix("aten."), kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        moves = name.startswith(("_to_copy", "copy_"))  # elsewhere a number may be a tensor on the host
        places = {each.device.type for each in given if each.ndim or moves}
        if moves and kwargs.get("device") is not None:
            places.add(torch.device(kwargs["device"]).type)
        elsewhere = not places <= {self.device.type}
        waits = name.startswith(WAITING)
        if name.startswith(INDEXING):
            waits = any(each.dtype in (torch.bool, torch.uint8) for each in args[1] if each is not None)
        if name.startswith("repeat_interleave.Tensor"):
            waits = kwargs.get("output_size") is None
        if elsewhere or waits:
            raise RuntimeError(f"{name} makes the host wait, or copies from it")
        return function(*args, **kwargs)
