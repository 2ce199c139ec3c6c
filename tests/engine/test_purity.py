"""`fingerprint` changes if and only if what a callable remembers changes."""

from __future__ import annotations

import functools
import re
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_specdec.engine.purity import OpaqueState, fingerprint

from .. import tiny


COUNTER = [0]


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def counting_closure() -> Any:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def counting_global() -> int:
    COUNTER[0] += 1
    return COUNTER[0]


def with_default(seen: list[int] = []) -> None:  # noqa: B006
    seen.append(1)


def set_in(holder: Any, value: Any) -> None:
    holder.value = value


CHANGES: dict[str, tuple[Any, Any]] = {
    "attribute": (Holder(1), lambda h: set_in(h, 2)),
    "same type": (Holder("a"), lambda h: set_in(h, "b")),
    "slot": (Slotted(1), lambda h: set_in(h, 2)),
    "new attribute": (Holder(1), lambda h: setattr(h, "other", 3)),
    "list": (Holder([1]), lambda h: h.value.append(2)),
    "list element": (Holder([1, 2]), lambda h: h.value.__setitem__(0, 5)),
    "nested": (Holder({"a": [Holder({1, 2})]}), lambda h: h.value["a"][0].value.add(3)),
    "dict": (Holder({1: 2}), lambda h: h.value.update({1: 3})),
    "set": (Holder({1}), lambda h: h.value.add(2)),
    "large list": (Holder(list(range(5000))), lambda h: h.value.append(2)),
    "tensor in place": (Holder(torch.zeros(3)), lambda h: h.value.add_(1)),
    "tensor slice": (Holder(torch.zeros(3)), lambda h: h.value.__setitem__(0, 1.0)),
    "tensor replaced": (Holder(torch.zeros(3)), lambda h: set_in(h, torch.zeros(3))),
    "tensor in list": (Holder([torch.zeros(3)]), lambda h: h.value[0].mul_(2)),
    "random generator": (Holder(torch.Generator()), lambda h: torch.rand(1, generator=h.value)),
    "numpy": (Holder(np.zeros(3)), lambda h: h.value.__setitem__(0, 1)),
    "closure": (counting_closure(), lambda f: f()),
    "global": (counting_global, lambda f: f()),
    "default": (with_default, lambda f: f()),
    "partial": (functools.partial(print, [1]), lambda p: p.args[0].append(2)),
    "method": (Holder([1]).__call__, lambda m: m.__self__.value.append(2)),
    "function attribute of an object": (Holder(counting_closure()), lambda h: h.value()),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_change_shows(name: str) -> None:
    value, change = CHANGES[name]
    before = fingerprint(value)
    assert fingerprint(value) == before
    change(value)
    assert fingerprint(value) != before


PURE = [
    Holder((1, "a", 2.5, None, b"x", re.compile("a"), torch.float32, torch.device("cpu"), range(3))),
    Holder({"ids": [1, 2], "set": frozenset({3})}),
    Holder(torch.arange(4)),
    Holder(nn.Linear(2, 2)),
    lambda: 1,
    functools.partial(max, 1),
    len,
    "abc".upper,
]


@pytest.mark.parametrize("value", PURE, ids=lambda value: type(value).__name__)
def test_pure_is_stable(value: Any) -> None:
    before = fingerprint(value)
    if isinstance(value, Holder) and isinstance(value.value, torch.Tensor):
        assert value.value.sum() == 6  # reading is no change
    assert fingerprint(value) == before


def test_models_and_tokenizers_are_constants() -> None:
    model = tiny.tiny_model()
    holder = Holder(model)
    before = fingerprint(holder)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))
    assert fingerprint(holder) == before

    class Tokenizer:
        def __init__(self) -> None:
            self.calls = 0

        def encode(self) -> None:
            self.calls += 1

        def decode(self) -> None: ...

    tokenizer = Tokenizer()
    before = fingerprint(Holder(tokenizer))
    tokenizer.encode()
    assert fingerprint(tokenizer) == fingerprint(tokenizer)


def test_cycles_end() -> None:
    first, second = Holder(None), Holder(None)
    first.value, second.value = second, first
    before = fingerprint(first)
    assert fingerprint(first) == before
    loop: list[Any] = [1]
    loop.append(loop)
    before = fingerprint(loop)
    loop[0] = 2
    assert fingerprint(loop) != before


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), iter([1, 2]), (number for number in range(3)), deque([1]), memoryview(b"a"), map(len, [])],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_seen_is_said(value: Any) -> None:
    with pytest.raises(OpaqueState, match=type(value).__name__):
        fingerprint(Holder(value))


def test_subclass_of_an_extension_type_is_opaque() -> None:
    class Own(deque):
        pass

    with pytest.raises(OpaqueState):
        fingerprint(Own([1]))
