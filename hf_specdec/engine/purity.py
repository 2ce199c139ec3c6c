"""Does a user's logits processor keep state between calls?

A draft is verified by calling the processors at every position of a block, on prefixes that may be rejected. That is
right for a pure function of the prefix and wrong for one that counts or advances an automaton. `fingerprint` sums up
all the state that a Python callable can reach; if it changes over a call, the callable is not pure.
"""

from __future__ import annotations

import functools
import logging
import re
import types
from typing import Any

import torch
from torch import nn


_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    torch.dtype,
    torch.device,
    re.Pattern,
    range,
    logging.Logger,
)
_CODE = (types.BuiltinFunctionType, types.ModuleType, types.MethodWrapperType, types.WrapperDescriptorType)
_LARGE = 1000


class OpaqueState(Exception):
    """An object whose state can't be seen from Python."""


def fingerprint(value: Any) -> Any:
    """Sum up the state that `value` can reach, to be compared with `==`.

    Models and tokenizers count as constants. Containers of more than 1000 items are told apart by identity and length.

    Raises:
        OpaqueState: If some of it can't be seen, as in an extension type.
    """
    return _freeze(value, {})


def _freeze(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, _CODE) or _is_constant_object(value):
        return id(value)
    if id(value) in seen:
        return "seen"
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return _freeze_container(value, seen)
    if isinstance(value, functools.partial):
        return _freeze((value.func, value.args, value.keywords), seen)
    if isinstance(value, types.MethodType):
        return _freeze((value.__self__, value.__func__), seen)
    if isinstance(value, types.FunctionType):
        return _freeze_function(value, seen)
    if type(value).__module__ == "numpy":
        return id(value), value.tobytes() if value.nbytes < _LARGE * 8 else None
    return _freeze_object(value, seen)


def _is_constant_object(value: Any) -> bool:
    # duck-typed, so that tokenizers of any library count
    return isinstance(value, nn.Module) or (hasattr(value, "decode") and hasattr(value, "encode"))


def _freeze_container(value: Any, seen: dict[int, Any]) -> Any:
    if len(value) > _LARGE:
        return id(value), len(value)
    if isinstance(value, dict):
        return "dict", tuple((_freeze(key, seen), _freeze(item, seen)) for key, item in value.items())
    items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    return type(value).__name__, tuple(_freeze(item, seen) for item in items)


def _freeze_function(function: types.FunctionType, seen: dict[int, Any]) -> Any:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(_freeze(cell.cell_contents, seen))
        except ValueError:  # an empty cell: a variable that isn't set yet
            cells.append("empty")
    outside = function.__globals__
    used = [outside[name] for name in function.__code__.co_names if name in outside]
    # other functions and classes of the module are code, not state
    state = [_freeze(item, seen) for item in used if not isinstance(item, (types.FunctionType, type, *_CODE))]
    return id(function), tuple(cells), tuple(state), _freeze(function.__defaults__, seen)


def _freeze_object(value: Any, seen: dict[int, Any]) -> Any:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    if not hasattr(value, "__dict__") and not slots:
        raise OpaqueState(f"{type(value).__module__}.{type(value).__qualname__}")
    if _is_extension(type(value)):
        raise OpaqueState(f"{type(value).__module__}.{type(value).__qualname__}")
    state = dict(getattr(value, "__dict__", {}))
    state |= {name: getattr(value, name) for name in slots if hasattr(value, name) and name != "__weakref__"}
    return id(value), _freeze(state, seen)


def _is_extension(kind: type) -> bool:
    """Whether a class other than `object` in its ancestry is written in C and may hide state."""
    heap_type = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a Python class statement (or by a modern extension)
    return any(base is not object and not base.__flags__ & heap_type for base in kind.__mro__)
