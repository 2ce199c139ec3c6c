"""Matrix products on a CPU: every way computes the same product, and the fastest is chosen."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_specdec.engine import clock, products
from hf_specdec.engine.products import Products, apply, halved, swapped, ways, widened


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_chosen", {})


def operands(rows: int, dtype: torch.dtype, out: int = 96, features: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, features, generator=generator).to(dtype)
    return x, torch.randn(out, features, generator=generator).to(dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [1 << 20, 640, 1])
def test_every_way_is_the_same_product(
    rows: int, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "BLOCK", block)  # 640: blocks of ten rows, the last one short
    x, weight = operands(rows, dtype)
    exact = x.double() @ weight.double().t()
    tried = {swapped, widened} | ({halved} if rows == 1 else set())
    for way in tried:
        found = way(x, weight)
        assert found.dtype == dtype
        assert found.is_contiguous()
        # one rounding of the exact sum
        torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("out", [96, 95])
def test_a_block_of_rows_with_and_without_bias(dtype: torch.dtype, with_bias: bool, out: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1, 64), (1, 4, 64), (3, 5, 64)):
        x = torch.randn(shape, generator=generator).to(dtype)
        weight = torch.randn(out, 64, generator=generator).to(dtype)
        bias = torch.randn(out, generator=generator).to(dtype) if with_bias else None
        expected = F.linear(x, weight, bias)
        for way in ways(dtype, shape[0] * shape[1], out):
            torch.testing.assert_close(apply(way, x, weight, bias), expected, rtol=0.02, atol=0.1)


def slow(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t().repeat(1, 400))[:, : len(weight)]


def test_the_fastest_way_is_chosen_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight = operands(1, torch.float32, 256, 256)
    monkeypatch.setattr(products, "ways", lambda *_: [slow])
    assert Products([weight]).way(4) is F.linear
    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setattr(products, "ways", lambda *_: [swapped])
    with monkeypatch.context() as patched:
        patched.setattr(products.F, "linear", slow)
        chooser = Products([weight])
        assert chooser.way(4) is swapped
    monkeypatch.setattr(chooser, "_fastest", None)  # not measured again: for 3 rows or on another model
    assert chooser.way(3) is swapped
    assert Products([weight.clone()]).way(4) is swapped


def test_a_way_must_win_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight = operands(1, torch.float32)
    monkeypatch.setattr(products, "MARGIN", 0.0)
    assert all(Products([weight]).way(rows) is F.linear for rows in (1, 2, 5, 16, 100))


def test_only_as_many_weights_are_measured_as_fill_the_caches() -> None:
    weights = [torch.zeros(1024, 1024) for _ in range(40)]
    assert len(Products(weights).samples) == 24
    assert len(Products([torch.zeros(1, 1).expand(1 << 13, 1 << 13)]).samples) == 1


def test_other_devices_and_types_are_left_alone() -> None:
    chooser = Products([torch.zeros(8, 8, device="meta")])
    assert chooser.way(4) is F.linear
    assert Products([torch.zeros(8, 8, dtype=torch.float64)]).way(4) is F.linear
    assert products._chosen


def test_the_default_type_and_device_do_not_matter() -> None:
    x, weight = operands(5, torch.bfloat16)
    wanted = widened(x, weight)
    for dtype in (torch.bfloat16, torch.float64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                assert torch.equal(widened(x, weight), wanted)
                assert callable(Products([weight]).way(5))
        finally:
            torch.set_default_dtype(before)
        products._chosen.clear()


def test_the_time_of_measuring_is_known() -> None:
    _, weight = operands(1, torch.float32)
    before, began = clock.seconds_spent(), time.perf_counter()
    Products([weight]).way(4)
    assert 0 < clock.seconds_spent() - before <= time.perf_counter() - began
    after = clock.seconds_spent()
    Products([weight]).way(4)
    assert clock.seconds_spent() == after


def test_deterministic_algorithms_keep_to_one_way() -> None:
    _, weight = operands(1, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        assert Products([weight]).way(64) is F.linear
    finally:
        torch.use_deterministic_algorithms(False)
    assert not products._chosen
