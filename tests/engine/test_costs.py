"""What forwards cost is measured, comparable while the machine's speed changes, and measured within a budget."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.engine import costs
from hf_specdec.engine.clock import Clock
from hf_specdec.engine.costs import CostTable, measure
from hf_specdec.engine.forward import RowModel

from ..tiny import tiny_model


def test_table_measures_and_interpolates() -> None:
    table = CostTable()
    assert not table
    table.update(1, 1.0)
    table.update(9, 3.0)
    assert table
    assert 9 in table
    assert 5 not in table
    assert table.estimate(1) == pytest.approx(1.0)
    assert table.estimate(5) == pytest.approx(2.0)
    assert 3.0 < table.estimate(12) < 4.0  # optimistic beyond what was measured
    assert table.estimate(100) > table.estimate(12)


def test_table_forgets_a_warm_up() -> None:
    """The first forward of a shape compiles, allocates: a much faster one replaces it at once."""
    table = CostTable()
    table.update(4, 10.0)
    table.update(4, 1.0)
    assert table.estimate(4) == pytest.approx(1.0)


def test_one_hiccup_moves_little() -> None:
    table = CostTable()
    for _ in range(50):
        table.update(4, 1.0)
    table.update(4, 1000.0)
    assert table.estimate(4) < 1.2


def test_a_slower_machine_keeps_costs_comparable() -> None:
    """The machine becomes three times slower; only 8 tokens are measured afterwards."""
    table = CostTable()
    for _ in range(40):
        table.update(1, 1.0)
        table.update(8, 2.0)
    for _ in range(60):
        table.update(8, 6.0)
    assert table.estimate(8) == pytest.approx(6.0, rel=0.02)
    assert table.estimate(1) == pytest.approx(3.0, rel=0.35)  # without the common level it would still be 1


def test_noise_is_averaged() -> None:
    table, noise = CostTable(), random.Random(0)
    for _ in range(400):
        for tokens, seconds in ((1, 1.0), (2, 1.3), (8, 3.0)):
            table.update(tokens, seconds * noise.lognormvariate(0, 0.3))
    base = table.estimate(1)
    assert table.estimate(2) / base == pytest.approx(1.3, rel=0.25)
    assert table.estimate(8) / base == pytest.approx(3.0, rel=0.25)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.integers(1, 64), st.floats(1e-4, 1.0), max_size=8), st.integers(1, 80))
def test_cost_is_always_positive_and_finite(known: dict[int, float], tokens: int) -> None:
    table = CostTable()
    for size, seconds in known.items():
        table.update(size, seconds)
    assert 0 < table.estimate(tokens) < 1e6
    if known and min(known) <= tokens <= max(known):
        assert min(known.values()) * 0.999 <= table.estimate(tokens) <= max(known.values()) * 1.001


def prefilled(rows: int = 1, **options: int) -> RowModel:
    target = RowModel(tiny_model(**options), rows, 64)
    with torch.no_grad():
        target.prefill([[5, 6, 7, 8]] * rows)
    return target


@pytest.mark.parametrize("rows", [1, 3])
def test_measuring_keeps_nothing(rows: int) -> None:
    target, table = prefilled(rows), CostTable()
    keys = [layer.keys[:, :, :4].clone() for layer in target.cache.layers]
    with torch.no_grad():
        seconds = measure(target, table, most=17, steps=10_000)
    assert seconds > 0
    assert set(table.factors) == {rows * width for width in costs.WIDTHS}
    assert target.cache.lengths == [4] * rows
    for layer, before in zip(target.cache.layers, keys, strict=True):
        assert torch.equal(layer.keys[:, :, :4], before)


def test_what_is_known_is_not_measured_again() -> None:
    target, table = prefilled(), CostTable()
    with torch.no_grad():
        measure(target, table, most=17, steps=10_000)
        before = dict(table.seen)
        measure(target, table, most=17, steps=10_000)
    assert table.seen == before


def test_short_generation_measures_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth of 40 steps of a second each is two seconds: a forward of two tokens fits, one of four does not."""
    now = [0.0]
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now[0])
    target, table = prefilled(), CostTable()

    def forward(block: torch.Tensor, counts: list[int]) -> None:
        now[0] += 0.8 + 0.2 * block.shape[1]

    monkeypatch.setattr(target, "forward", forward)
    measure(target, table, most=17, steps=40)
    assert set(table.factors) == {1}  # the plain forward is always measured: 1 s, and another would pass the 2 s
    measure(target, table, most=17, steps=60)
    assert set(table.factors) == {1, 2, 4}  # 1.2 s and 1.6 s of 3


def test_measuring_stays_within_the_positions() -> None:
    target, table = prefilled(max_position_embeddings=7), CostTable()
    with torch.no_grad():
        measure(target, table, most=17, steps=10_000)
    assert set(table.factors) == {1, 2}


def test_measuring_waits_for_its_own_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To wait for all streams is an error while another thread captures."""
    waited: list[str] = []

    def stream(device: torch.device) -> Any:
        return types.SimpleNamespace(synchronize=lambda: waited.append(str(device)))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: pytest.fail("waits for the whole device"))
    costs._wait_for(torch.device("cuda", 1))
    assert waited == ["cuda:1"]


def test_clock_on_a_cpu() -> None:
    clock = Clock(torch.device("cpu"))
    first, last = clock.mark(), clock.mark()
    assert 0 <= clock.between(first, last) < 1


def test_clock_on_a_gpu_asks_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are recorded on the device's queue, and nothing is waited for until seconds are asked for."""
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            calls.append(f"record on {stream}")

        def synchronize(self) -> None:
            calls.append("wait")

        def elapsed_time(self, other: object) -> float:
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    clock = Clock(torch.device("cuda", 1))
    first, last = clock.mark(), clock.mark()
    assert calls == ["record on stream of cuda:1"] * 2
    assert clock.between(first, last) == 0.25
    assert calls[2:] == ["wait"]
