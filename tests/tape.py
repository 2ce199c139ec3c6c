"""CUDA graphs on a CPU: what is captured is recorded operator by operator, and replayed on the very same tensors.

Like a CUDA graph, a replay knows nothing of Python: numbers and shapes are those of the capture, inputs are whatever the
same tensors hold now, and results appear in the tensors that the capture returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hf_specdec.engine import graphs


# what a CUDA capture refuses: results that the host has to know, and data that comes from the host
REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal.", "unique", "_unique", "bincount")
REFUSED += ("lift_fresh",)
INDEXING = ("index.", "index_put", "_index_put_impl_")
Operator = tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]


def refused(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that raises in this thread."""
    capturing = threading.get_ident()

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == capturing:
            raise RuntimeError("operation not permitted when stream is capturing: a copy to the host")
        return method(*args, **kwargs)

    return refusing


class Recorder(TorchDispatchMode):
    """Runs and records every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removeprefix("aten.")
        if name.startswith(REFUSED):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if name.startswith("repeat_interleave.Tensor") and not (kwargs or {}).get("output_size"):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if name.startswith(INDEXING) and any(each is not None and each.dtype == torch.bool for each in args[1]):
            raise RuntimeError("operation not permitted when stream is capturing: an index of booleans")
        kwargs = kwargs or {}
        found = function(*args, **kwargs)
        results = [each for each in tree_flatten(found)[0] if isinstance(each, Tensor)]
        self.operators.append((function, args, kwargs, results))
        return found


def storage(tensor: Tensor) -> int:
    """Where a tensor's memory is."""
    return tensor.untyped_storage().data_ptr()


class TapeGraph:
    """A recorded function."""

    def __init__(self, operators: list[Operator]) -> None:
        self.operators = operators
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, results in self.operators:
            aliases = [each.alias_info for each in function._schema.returns]
            given = {storage(each) for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)}
            viewing = results and all(alias is not None and not alias.is_write for alias in aliases)
            if viewing and {storage(each) for each in results} <= given:
                continue  # a view of memory that is still the same; `reshape` may be one or not
            again = [each for each in tree_flatten(function(*args, **kwargs))[0] if isinstance(each, Tensor)]
            for old, new in zip(results, again, strict=True):
                if old is not new and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def foreign(self) -> list[Tensor]:
        """Tensors that were read or written but not made during the capture."""
        made: set[int] = set()
        found: dict[int, Tensor] = {}
        for _, args, kwargs, results in self.operators:
            for each in tree_flatten((args, kwargs))[0]:
                if isinstance(each, Tensor) and storage(each) not in made:
                    found[storage(each)] = each
            for each in results:
                if storage(each) not in found:
                    made.add(storage(each))
        return list(found.values())


class Tape:
    """A capture backend that records."""

    made: list[Tape] = []
    share = 1e12  # bytes of the device

    def __init__(self, device: torch.device) -> None:
        self.graphs: list[TapeGraph] = []
        self.events: list[str] = []
        Tape.made.append(self)

    def capture(self, body: Callable[[], None]) -> TapeGraph:
        body()
        with Recorder() as recorder, pytest.MonkeyPatch.context() as patch:
            for name in ("tolist", "numpy", "__array__"):  # they call no operator
                patch.setattr(torch.Tensor, name, refused(getattr(torch.Tensor, name)))
            body()
        self.graphs.append(TapeGraph(recorder.operators))
        return self.graphs[-1]

    def mark(self) -> None:
        self.events.append("mark")

    def wait(self) -> None:
        self.events.append("wait")

    def memory(self) -> float:
        return Tape.share


@contextmanager
def taped(after: int = 0, backend: Any = Tape) -> Iterator[list[Tape]]:
    """Capture on the CPU, each shape after so many eager uses; gives the backends that were made."""
    graphs.free()
    Tape.made, Tape.share = [], 1e12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "backend_for", lambda device: backend)
        patch.setattr(graphs, "CAPTURE_AFTER", after)
        yield Tape.made
    graphs.free()
