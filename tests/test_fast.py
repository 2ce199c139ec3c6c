"""Forwards of fixed shape give plain `generate`'s text: replayed from graphs (see `tests/tape.py`), compiled, on a GPU."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import logging
import shutil
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_specdec
from hf_specdec import DraftModel, SpecConfig
from hf_specdec.engine import capture, costs, fast, graphs
from hf_specdec.engine.cache import RowCache
from hf_specdec.engine.forward import RowModel
from hf_specdec.engine.graphs import WIDTHS, Lease, Pool, bucket, tall, wide

from . import test_distribution as distribution
from .plain import ends_apart, make_drafter, new_tokens, options, plain_texts, same_cache, stops
from .tape import Tape, TapeGraph, taped
from .test_one_copy import rounds_of
from .tiny import ARCHITECTURES, Oracle, exact_pair, ragged_prompts, tiny_model


DRAFTERS = ("none", "prompt_lookup", "recycling", "draft_model fixed", "hybrid", "oracle 0", "oracle 0.7", "oracle 1")
pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def noisy_pair(name: str) -> tuple[Any, Any]:
    """A target, and a draft that agrees with it in part."""
    target = tiny_model(name)
    draft = copy.deepcopy(target)
    head = draft.get_output_embeddings()
    noise = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1))
    head.weight = torch.nn.Parameter(head.weight + 0.5 * noise)
    return target, draft


@cache
def reference(name: str, rows: int) -> list[list[int]]:
    return plain_texts(noisy_pair(name)[0], ragged_prompts(rows))


def check(name: str, rows: int, drafter: str) -> hf_specdec.SpecStats:
    """Text equal to the reference; gives the statistics."""
    target, draft = noisy_pair(name)
    prompts, texts = ragged_prompts(rows), reference(name, rows)
    return run(target, prompts, texts, make_drafter(drafter, texts, draft))


def run(
    target: Any, prompts: dict[str, Tensor], texts: list[list[int]], speculative: Any, **changes: Any
) -> hf_specdec.SpecStats:
    output = hf_specdec.generate(target, **prompts, **options(**changes), speculative=speculative)
    assert new_tokens(output, prompts) == texts
    stats = hf_specdec.last_stats(target)
    assert stats is not None
    assert stats.fallback_reason is None
    return stats


def leases(model: Any) -> list[Lease]:
    """Leases that wait for the model's next generation."""
    graphs.settle()
    return graphs._pools[model].free


# graphs


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_from_graphs(drafter: str, rows: int) -> None:
    with taped():
        first = check("llama", rows, drafter)
        assert first.capture_seconds > 0
        again = check("llama", rows, drafter)
        for stats in (first, again):
            assert stats.eager_reason is None
            assert stats.graph_replays >= stats.num_target_forwards - 1, "every round is replayed"


@pytest.mark.parametrize("rows", [1, 3])
def test_graphs_serve_the_next_call(rows: int) -> None:
    target, texts = noisy_pair("llama")[0], reference("llama", rows)
    config = SpecConfig(drafter=Oracle(texts, 0.7), num_draft_tokens=4, draft_length="fixed")
    with taped() as made:
        run(target, ragged_prompts(rows), texts, config)
        captured = [len(tape.graphs) for tape in made]
        assert run(target, ragged_prompts(rows), texts, config).capture_seconds == 0
        assert [len(tape.graphs) for tape in made] == captured


@pytest.mark.parametrize("drafter", ["recycling", "draft_model fixed"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_text_from_graphs_of_every_architecture(name: str, drafter: str) -> None:
    with taped():
        stats = check(name, 3, drafter)
    assert stats.eager_reason is None
    assert stats.graph_replays >= stats.num_target_forwards - 1


@pytest.mark.parametrize("drafter", ["recycling", "draft_model fixed", "oracle 0.7"])
def test_a_graph_touches_nothing_but_its_model_and_its_lease(drafter: str) -> None:
    """Memory of one generation is gone when the next one replays."""
    with taped():
        check("llama", 3, drafter)
        found = 0
        for model in noisy_pair("llama"):
            for lease in leases(model) if model in graphs._pools else []:
                owned = [*model.parameters(), *model.buffers(), *lease.outputs.values(), *lease.branches]
                owned += [lease.tokens, lease.lengths, lease.fed, lease.ladder]
                owned += [states for layer in lease.cache.layers for states in (layer.keys, layer.values)]
                known = {each.untyped_storage().data_ptr() for each in owned}
                for graph in lease.graphs.values():
                    assert isinstance(graph, TapeGraph)
                    assert {each.untyped_storage().data_ptr() for each in graph.foreign()} <= known
                    found += 1
        assert found


def test_the_tape_catches_a_host_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: lengths that don't reach the device give a wrong text."""
    fill = Lease.fill

    def forgetful(self: Lease, lengths: Any, tokens: Tensor, branches: Any = None) -> None:
        before = self.lengths.clone()
        fill(self, lengths, tokens, branches)
        if self.graphs:
            self.lengths.copy_(before)

    monkeypatch.setattr(Lease, "fill", forgetful)
    with taped(), pytest.raises(AssertionError, match="assert"):
        check("llama", 3, "none")


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t[0]),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "write to a mask": lambda t: t.clone().index_put_((t > 0,), t),
    "repeats": lambda t: t.repeat_interleave(t.long()),
    "unique": lambda t: t.unique(),
}
COPIES: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda t: t.tolist(),
    "constant": lambda t: t + torch.tensor([1.0]),
}


@pytest.mark.parametrize("read", READS | COPIES)
def test_the_tape_refuses_what_a_capture_refuses(read: str) -> None:
    function = (READS | COPIES)[read]
    with pytest.raises(RuntimeError, match="not permitted"):
        Tape(torch.device("cpu")).capture(lambda: function(torch.ones(1)))


@pytest.mark.parametrize("read", READS)
def test_what_a_capture_refuses_is_seen_before(read: str) -> None:
    ones = torch.ones(3)
    with pytest.raises(RuntimeError, match="host"), graphs.Watch(torch.device("cpu")):
        READS[read](ones)
    with graphs.Watch(torch.device("cpu")):
        assert (ones.cumsum(0)[[0, 1]] * 2).shape == (2,)
        assert (ones > 0).index_put_((torch.tensor([0]),), ones[0] > 2).tolist() == [False, True, True]
        assert ones.repeat_interleave(ones.long(), output_size=3).shape == (3,)


def test_copies_from_the_host_are_seen_before() -> None:
    ones, copied = torch.ones(3, device="meta"), torch.ones(3, device="cpu")
    with pytest.raises(RuntimeError, match="host"), graphs.Watch(torch.device("meta")):
        ones.copy_(copied)
    with pytest.raises(RuntimeError, match="host"), graphs.Watch(torch.device("cpu")):
        copied.to("meta")
    with graphs.Watch(torch.device("meta")):
        assert (ones * 2 + 1).device.type == "meta"


@pytest.mark.parametrize("drafter", ["recycling", "draft_model fixed", "oracle 1"])
def test_texts_grow_out_of_the_buffers(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = noisy_pair("llama")
    prompts = ragged_prompts(2)
    texts = plain_texts(target, prompts, max_new_tokens=80)
    init = RowCache.__init__
    monkeypatch.setattr(RowCache, "__init__", lambda self, layers, rows, reserve=8: init(self, layers, rows, 8))
    for module in (graphs, fast):
        monkeypatch.setattr(module, "bucket", lambda slots: -(-slots // 16) * 16)
    with taped():
        stats = run(target, prompts, texts, make_drafter(drafter, texts, draft), max_new_tokens=80)
        assert stats.eager_reason is None
        assert stats.graph_replays >= stats.num_target_forwards - 1
        assert len({lease.capacity for lease in leases(target)}) >= 2


@pytest.mark.parametrize("drafter", ["prompt_lookup", "recycling", "draft_model fixed", "oracle 0.7"])
def test_rows_that_end_apart(drafter: str) -> None:
    target, draft = noisy_pair("llama")
    prompts, texts = ragged_prompts(5), reference("llama", 5)
    ends = ends_apart(texts)
    lengths = stops(texts, ends)
    assert len(set(lengths)) > 2
    wanted = plain_texts(target, prompts, eos_token_id=ends)
    with taped():
        run(target, prompts, wanted, make_drafter(drafter, texts, draft), eos_token_id=ends)
        assert {lease.rows for lease in leases(target)} <= {1, 2, 4, 8}
        assert len(leases(target)) > 1


@pytest.mark.parametrize("drafter", ["recycling", "draft_model fixed"])
def test_the_cache_that_is_returned(drafter: str) -> None:
    """Rows that left the batch keep what they had, though their buffers were used again."""
    target, draft = noisy_pair("llama")
    prompts = {"input_ids": torch.randint(2, 97, (3, 12))}  # plain decoding has keys of padding, too
    texts = plain_texts(target, prompts)
    wanted = options(eos_token_id=ends_apart(texts), return_dict_in_generate=True)
    plain = target.generate(**prompts, **wanted)
    with taped():
        for _ in range(2):
            found = hf_specdec.generate(target, **prompts, **wanted, speculative=make_drafter(drafter, texts, draft))
            assert found.sequences.tolist() == plain.sequences.tolist()
            same_cache(found[hf_specdec.engine.compat.CACHE], plain[hf_specdec.engine.compat.CACHE])


def test_a_whole_draft_is_one_replay() -> None:
    """Target and draft agree: every draft is accepted whole, so that the next one begins with two tokens."""
    target, draft = exact_pair()
    prompts = ragged_prompts(1)
    texts = plain_texts(target, prompts, max_new_tokens=40)
    with taped():
        stats = run(target, prompts, texts, make_drafter("draft_model fixed", texts, draft), max_new_tokens=40)
        assert stats.draft_acceptance_rate == 1.0
        rounds = stats.num_target_forwards - 1
        assert stats.graph_replays == 2 * rounds
        (lease,) = leases(draft)
        assert all(shape[0] == "chain" for shape in lease.graphs)


@pytest.mark.parametrize(
    ("drafter", "changes"),
    [
        (lambda draft: DraftModel(draft, confidence_threshold=0.3), {}),
        (DraftModel, {"repetition_penalty": 1.3}),
        (DraftModel, {"max_new_tokens": 3}),
    ],
    ids=["threshold", "processor", "short"],
)
def test_drafts_that_need_their_steps(drafter: Callable[[Any], Any], changes: dict[str, Any]) -> None:
    target, draft = noisy_pair("llama")
    prompts = ragged_prompts(3)
    texts = plain_texts(target, prompts, **changes)
    config = SpecConfig(drafter=drafter(draft), num_draft_tokens=4, draft_length="fixed")
    with taped():
        stats = run(target, prompts, texts, config, **changes)
        assert stats.num_draft_tokens > 0
        assert stats.graph_replays > 0


def test_a_draft_of_another_vocabulary_and_context() -> None:
    """A draft with fewer ids than the target, and with fewer positions than the text has tokens."""
    target = tiny_model()
    for changes in ({"vocab_size": 90}, {"vocab_size": 110}, {"max_position_embeddings": 32}):
        draft = tiny_model(**changes)
        prompts, texts = ragged_prompts(3), plain_texts(target, ragged_prompts(3))
        with taped():
            stats = run(target, prompts, texts, make_drafter("draft_model fixed", texts, draft))
        assert stats.num_draft_tokens > 0


def test_a_broken_draft_is_noticed_in_a_graph() -> None:
    target = noisy_pair("llama")[0]
    draft = tiny_model(seed=1)
    prompts, texts = ragged_prompts(1), reference("llama", 1)
    with torch.no_grad():
        draft.lm_head.weight[3] = float("nan")
    with taped():
        output = hf_specdec.generate(
            target, **prompts, **options(), speculative=make_drafter("draft_model fixed", texts, draft)
        )
    assert new_tokens(output, prompts) == texts
    assert "NaN" in str(hf_specdec.last_stats(target).fallback_reason)


def test_a_capture_has_to_pay() -> None:
    target, texts = noisy_pair("llama")[0], reference("llama", 1)
    with taped(after=5) as made:
        stats = run(target, ragged_prompts(1), texts, "none")
        assert stats.graph_replays == stats.num_target_forwards - 1 - 5
        assert [len(tape.graphs) for tape in made] == [1]
        assert run(target, ragged_prompts(1), texts, "none").graph_replays == stats.num_target_forwards - 1


def test_sampled_drafts_keep_the_joint_through_graphs() -> None:
    with taped():
        seen, statistics = distribution.sample(distribution.DRAFTERS["draft_model"](), "block", "processed", n=5000)
    assert distribution.p_of(seen, "processed") > distribution.RIGHT
    assert statistics.graph_replays > 0
    assert statistics.eager_reason is None


@pytest.mark.parametrize("drafter", ["draft_model", "recycling", "none"])
def test_text_of_a_seed_is_the_same_through_graphs(drafter: str) -> None:
    inputs = {"inputs": torch.tensor([distribution.PROMPT]), "num_return_sequences": 50}
    given = distribution.DRAFTERS["draft_model"]() if drafter == "draft_model" else drafter
    eager = distribution.texts_of("none", "auto", "plain", **inputs)
    with taped():
        assert torch.equal(distribution.texts_of(given, "coupled", "plain", **inputs), eager)
        assert hf_specdec.last_stats(distribution.models()[0]).graph_replays > 0


@pytest.mark.parametrize("drafter", ["prompt_lookup", "draft_model fixed", "recycling"])
@pytest.mark.parametrize(
    "changes", [{}, {"do_sample": True, "temperature": 0.8, "top_k": 20}], ids=["greedy", "sampled"]
)
def test_one_copy_a_round_through_graphs(drafter: str, changes: dict[str, Any]) -> None:
    target, draft = exact_pair(layers=2, noise=0.3)
    with taped(after=10_000):  # the warm-up of a capture may measure, which isn't a round's work
        rounds = rounds_of(target, ragged_prompts(3), make_drafter(drafter, [], draft), max_new_tokens=14, **changes)
    assert rounds
    for found in rounds:
        assert found == ["tolist in sampling.py:to_host"]


# who has the buffers, and for how long


def test_two_threads_have_buffers_of_their_own() -> None:
    target, draft = noisy_pair("llama")
    prompts, texts = [ragged_prompts(3), ragged_prompts(2)], [reference("llama", 3), reference("llama", 2)]
    together, found, failed = threading.Barrier(2, timeout=30), {}, []

    def generate(index: int) -> None:
        meetings = 0

        def meet(event: Any) -> None:
            nonlocal meetings
            meetings += 1
            if meetings < 4:  # both are in the middle of their text
                together.wait()

        config = SpecConfig(
            drafter="draft_model", draft_model=draft, num_draft_tokens=3, draft_length="fixed", on_step=meet
        )
        try:
            output = hf_specdec.generate(target, **prompts[index], **options(), speculative=config)
            found[index] = new_tokens(output, prompts[index])
        except Exception as error:
            failed.append(error)

    with taped():
        threads = [threading.Thread(target=generate, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert found == dict(enumerate(texts))
        assert len(leases(target)) >= 2


def test_a_lease_is_given_back_when_the_generation_ends() -> None:
    target, draft = noisy_pair("llama")
    gc.disable()
    try:
        with taped() as made:
            check("llama", 1, "draft_model fixed")
            assert len(leases(target)) == len(leases(draft)) == 1
            check("llama", 1, "draft_model fixed")
            assert [tape.events for tape in made] == [["mark", "wait", "mark"]] * 2
    finally:
        gc.enable()


@pytest.mark.parametrize("drafter", ["recycling", "draft_model fixed"])
def test_a_lease_serves_calls_with_and_without_inference_mode(drafter: str) -> None:
    with taped() as made:
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                stats = check("llama", 1, drafter)
            assert stats.eager_reason is None
            assert stats.graph_replays >= stats.num_target_forwards - 1
        assert len(made) <= 2


def test_a_lease_is_given_back_after_an_error() -> None:
    def stop(event: Any) -> None:
        if event.step == 3:
            raise KeyboardInterrupt

    target = noisy_pair("llama")[0]
    with taped():
        with pytest.raises(KeyboardInterrupt):
            hf_specdec.generate(
                target, **ragged_prompts(1), **options(), speculative=SpecConfig(drafter="none", on_step=stop)
            )
        gc.collect()
        assert len(leases(target)) == 1
        check("llama", 1, "none")


def test_a_lease_tells_nothing_of_the_text_before() -> None:
    target = noisy_pair("llama")[0]
    with taped():
        check("llama", 1, "none")
        (lease,) = leases(target)
        for layer in lease.cache.layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
        check("llama", 1, "none")
        assert leases(target) == [lease]


def test_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    target = noisy_pair("llama")[0]
    with taped() as made:
        check("llama", 1, "oracle 0.7")
        (lease,) = leases(target)
        assert len(lease.uses) > 2
        # none is thrown away: that would free a workspace which the others use
        assert list(lease.graphs.values()) == made[0].graphs
        assert len(made[0].graphs) == 2


def test_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_KEPT", 2)
    target = noisy_pair("llama")[0]
    with taped():
        for rows in (1, 2, 3, 5):
            run(target, ragged_prompts(rows), reference("llama", rows), "none")
        assert [lease.rows for lease in leases(target)] == [4, 8]
        Tape.share = 10 * leases(target)[0].nbytes  # a tenth of it may be kept
        run(target, ragged_prompts(3), reference("llama", 3), "none")
        assert [lease.rows for lease in leases(target)] == [4]


def test_graphs_die_with_their_model() -> None:
    target = tiny_model()
    with taped() as made:
        run(target, ragged_prompts(1), plain_texts(target, ragged_prompts(1)), "none")
        model, pool, lease = weakref.ref(target), weakref.ref(graphs._pools[target]), weakref.ref(leases(target)[0])
        made.clear()
        del target
        gc.collect()
        assert (model(), pool(), lease()) == (None, None, None)


@pytest.mark.parametrize("one", [False, True], ids=["all", "one"])
@pytest.mark.parametrize("free", [hf_specdec.disable, hf_specdec.reset])
def test_disable_and_reset_free_graphs(free: Callable[..., None], one: bool) -> None:
    target, other = noisy_pair("llama")[0], noisy_pair("gpt2")[0]
    with taped():
        check("llama", 1, "none")
        check("gpt2", 1, "none")
        pool = graphs._pools[target]
        free(*([target] if one else []))
        assert list(graphs._pools) == ([other] if one else [])
        assert pool.closed
        assert not pool.free


def test_a_lease_may_come_back_while_its_pool_is_locked() -> None:
    """The garbage collector runs finalizers wherever it likes, in the middle of `lend` as well."""
    target = noisy_pair("llama")[0]
    with taped():
        runner = RowModel(target, 1, 8)
        assert runner.fast is not None
        with torch.no_grad():
            runner.prefill([[5, 6]])
            runner.forward(torch.tensor([[7]]), [1])
        lease, runner.fast.lease, pool, held = runner.fast.lease, None, runner.fast.pool, [runner]
        assert lease is not None
        assert pool is not None
        del runner

        def drop() -> None:
            with pool._lock:
                held.clear()

        thread = threading.Thread(target=drop, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), "deadlock"
        assert leases(target) == [lease]


@pytest.mark.parametrize("change", ["weights", "in place", "setting"])
def test_a_changed_model_gets_new_graphs(change: str) -> None:
    target = tiny_model()
    prompts = ragged_prompts(1)
    before = plain_texts(target, prompts)
    with taped():
        run(target, prompts, before, "none")
        pool = graphs._pools[target]
        if change == "weights":
            target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.roll(1, 0))
        elif change == "in place":
            with torch.no_grad():
                target.lm_head.weight.copy_(target.lm_head.weight.roll(1, 0))
        else:
            torch.use_deterministic_algorithms(True)
        try:
            texts = plain_texts(target, prompts)
            assert (texts == before) == (change == "setting")
            run(target, prompts, texts, "none")
            # what is at the same address is read anew by every replay
            assert (graphs._pools[target] is pool) == (change == "in place")
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_hooked_model_is_not_captured() -> None:
    target = copy.deepcopy(noisy_pair("llama")[0])
    calls: list[int] = []
    target.model.layers[0].register_forward_hook(lambda *args: calls.append(1))
    with taped():
        stats = run(target, ragged_prompts(1), reference("llama", 1), "none")
    assert "hook" in str(stats.eager_reason)
    assert stats.graph_replays == 0
    assert len(calls) >= stats.num_target_forwards


class Broken(Tape):
    """A device on which a capture fails after it has begun."""

    def capture(self, body: Callable[[], None]) -> Any:
        super().capture(body)
        raise RuntimeError("CUDA error: operation not permitted\nmore of it")


class Full(Tape):
    """A device without memory."""

    def __init__(self, device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


class Crowded(Tape):
    """A device that has memory for another capture only when no lease is idle."""

    def capture(self, body: Callable[[], None]) -> Any:
        if any(pool.free for pool in graphs._pools.values()):
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:  # the end of the capture raises as well
                raise RuntimeError("previous error during capture")
        return super().capture(body)


def test_memory_of_idle_leases_is_freed_for_a_capture() -> None:
    target = noisy_pair("llama")[0]
    with taped(backend=Crowded):
        check("llama", 3, "none")
        assert [lease.rows for lease in leases(target)] == [4]
        stats = check("llama", 1, "none")
        assert stats.eager_reason is None
        assert stats.graph_replays == stats.num_target_forwards - 1
        assert [lease.rows for lease in leases(target)] == [1]


@pytest.mark.parametrize("drafter", ["recycling", "draft_model fixed"])
def test_graphs_are_tried_again_once_there_is_memory(drafter: str, caplog: pytest.LogCaptureFixture) -> None:
    fast._told.clear()
    with taped(backend=Full), caplog.at_level(logging.WARNING):
        for _ in range(2):
            stats = check("llama", 3, drafter)
            assert "can't be captured: OutOfMemoryError" in str(stats.eager_reason)
            assert stats.graph_replays == 0
        with pytest.MonkeyPatch.context() as patch:  # undone before `taped` undoes its own
            patch.setattr(graphs, "backend_for", lambda device: Tape)
            stats = check("llama", 3, drafter)
        assert stats.eager_reason is None
        assert stats.graph_replays > 0
    assert len([each for each in caplog.records if "runs eagerly" in each.message]) == 1


def test_nothing_is_captured_or_replayed_under_autocast() -> None:
    target, prompts = noisy_pair("llama")[0], ragged_prompts(1)
    with taped() as made:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                stats = run(target, prompts, plain_texts(target, prompts), "none")
            assert "autocast" in str(stats.eager_reason)
            assert stats.graph_replays == 0
            assert not any(tape.replays for made_by in made for tape in made_by.graphs[1:])
            stats = check("llama", 1, "none")
            assert stats.eager_reason is None
            assert stats.graph_replays > 0
        assert [len(tape.graphs) for tape in made] == [1]


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="has one setting only")
def test_the_newer_setting_of_precision() -> None:
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with taped():
        check("llama", 1, "none")
        pool = graphs._pools[noisy_pair("llama")[0]]
        matmul.fp32_precision = "tf32"
        try:
            assert check("llama", 1, "none").eager_reason is None
            assert graphs._pools[noisy_pair("llama")[0]] is not pool
        finally:
            matmul.fp32_precision = before


def test_an_error_before_any_capture_costs_speed_only() -> None:
    def broken() -> str:
        raise RuntimeError("no such setting")

    with taped():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs, "_float32_precision", broken)
            stats = check("llama", 1, "none")
        assert "no such setting" in str(stats.eager_reason)
        assert stats.graph_replays == 0


def test_no_finalizer_runs_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    collecting = []

    class Asking(Tape):
        def capture(self, body: Callable[[], None]) -> Any:
            collecting.append(gc.isenabled())
            return super().capture(body)

    with taped(backend=Asking):
        check("llama", 1, "none")
    assert collecting == [False]
    assert gc.isenabled()


def test_measured_costs_are_those_of_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[int] = []
    update = costs.CostTable.update

    def noting(self: costs.CostTable, tokens: int, seconds: float) -> None:
        replays.append(fast.tally().replays)
        update(self, tokens, seconds)

    monkeypatch.setattr(costs.CostTable, "update", noting)
    monkeypatch.setattr(costs, "SHORT", 1000.0)  # every forward counts as short, however busy the machine is
    with taped(after=2), torch.no_grad():
        target = RowModel(noisy_pair("llama")[0], 1, 64)
        target.prefill([[5, 6, 7, 8]])
        before = fast.tally().replays
        costs.measure(target, costs.CostTable(), most=17, steps=10_000)
    # each timed forward is the replay after that of the timed one before; one more is untimed for every new width
    assert replays[0] == before + 2
    assert len(replays) > len(costs.WIDTHS)
    assert len(replays) + len(costs.WIDTHS) == replays[-1] - before


@pytest.mark.parametrize("drafter", ["recycling", "draft_model fixed"])
def test_a_failed_capture_costs_speed_only(drafter: str, caplog: pytest.LogCaptureFixture) -> None:
    with taped(backend=Broken), caplog.at_level(logging.WARNING):
        for _ in range(2):
            stats = check("llama", 3, drafter)
            assert "can't be captured" in str(stats.eager_reason)
            assert "more of it" not in str(stats.eager_reason)
            assert stats.graph_replays == 0
    models = 2 if drafter.startswith("draft_model") else 1
    assert [each.message for each in caplog.records if "runs eagerly" in each.message] == [
        f"the model's forward runs eagerly: {stats.eager_reason}"
    ] * models


def test_a_forward_that_looks_at_its_data_is_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    at = RowModel.at

    def looking(self: RowModel, tokens: Tensor, *args: Any) -> Tensor:
        return at(self, tokens, *args) + (0 if tokens.sum() > 0 else 1)

    monkeypatch.setattr(RowModel, "at", looking)
    with taped() as made:
        stats = check("llama", 3, "oracle 0.7")
        assert "_local_scalar_dense" in str(stats.eager_reason)
        assert not any(tape.graphs for tape in made)


def test_where_graphs_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_SPECDEC_GRAPHS", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    assert graphs.backend_for(torch.device("cuda", 1)) is None
    monkeypatch.setenv("HF_SPECDEC_GRAPHS", "1")
    assert graphs.backend_for(torch.device("cpu")) is None
    assert graphs.backend_for(torch.device("cuda", 1)) is graphs.CudaGraphs
    for value in ("0", "", "true"):
        monkeypatch.setenv("HF_SPECDEC_GRAPHS", value)
        assert graphs.backend_for(torch.device("cuda", 1)) is None
    assert RowModel(noisy_pair("llama")[0], 1, 8).fast is None


class FakeCuda:
    """What `CudaGraphs` asks of torch, without a device; `calls` has what happened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.current, self.broken = "stream of the call", False
        fake, suppressed = self, contextlib.nullcontext

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.wait_stream = lambda other: None

        class Event:
            def record(self, stream: Any) -> None:
                fake.calls.append(("record", stream))

            def wait(self, stream: Any) -> None:
                fake.calls.append(("wait", stream))

        class Graph:
            def replay(self) -> None:
                fake.calls.append("replay")

        @contextlib.contextmanager
        def graph(graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> Iterator[None]:
            assert capture_error_mode == "thread_local"
            yield
            fake.calls.append("healed" if pool is None else "captured")
            if fake.broken and pool is not None:
                raise RuntimeError("previous error during capture")

        handles = iter(range(100))
        current = lambda device=None: types.SimpleNamespace(name=fake.current, wait_stream=lambda other: None)  # noqa: E731
        for name, value in {
            "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": graph, "current_stream": current,
            "graph_pool_handle": lambda: next(handles), "device": suppressed, "stream": suppressed,
            "current_device": lambda: 7,
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "zeros", lambda *args, **kwargs: None)
        ended = lambda *args: fake.calls.append(("ended", *args))  # noqa: E731
        patch.setattr(torch._C, "_cuda_endAllocateToPool", ended, raising=False)
        patch.setattr(capture, "_streams", collections.defaultdict(collections.deque))


def test_streams_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    device = torch.device("cuda", 0)
    first, second = capture.CudaGraphs(device), capture.CudaGraphs(device)
    graph, stream, other = first.capture(lambda: None), first.stream, second.stream
    assert stream is not other
    del first
    assert capture.CudaGraphs(device).stream not in (stream, other), "the graph still needs it"
    del graph
    assert capture.CudaGraphs(device).stream is stream
    assert capture.CudaGraphs(torch.device("cuda", 1)).stream is not stream


def test_the_end_of_a_generation_is_marked_where_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    backend = capture.CudaGraphs(torch.device("cuda", 0))
    graph = backend.capture(lambda: None)
    cuda.current = "stream of the replay"
    graph.replay()
    cuda.current = "stream of whoever collects garbage"
    backend.mark()
    assert [call[1].name for call in cuda.calls if call[0] == "record"] == ["stream of the replay"]


def test_the_allocator_is_told_of_a_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    backend = capture.CudaGraphs(torch.device("cuda", 7))
    pool, cuda.broken = backend.pool, True
    with pytest.raises(RuntimeError, match="during capture"):
        backend.capture(lambda: None)
    assert cuda.calls == ["captured", ("ended", 7, pool), "healed"]
    cuda.broken = False
    backend.capture(lambda: None)
    assert backend.pool != pool


def test_rounding_up() -> None:
    assert [wide(n) for n in (1, 5, 8, 10, 18, 33)] == [1, 5, 9, 13, 25, 33]
    assert all(wide(n) in WIDTHS and wide(n) >= n for n in range(1, WIDTHS[-1] + 1))
    assert [tall(n) for n in (1, 2, 3, 5, 8, 9, 16, 17)] == [1, 2, 4, 8, 8, 16, 16, 24]
    assert [bucket(n) for n in (1, 256, 257, 384, 385, 512, 513, 768, 769, 3000)] == [
        256, 256, 384, 384, 512, 512, 768, 768, 1024, 3072
    ]  # fmt: skip
    assert all(n <= bucket(n) <= max(256, 1.5 * n + 2) for n in range(1, 3000))
    assert all(bucket(bucket(n)) == bucket(n) for n in range(1, 3000))


def test_a_pool_lends_what_fits() -> None:
    runner = RowModel(noisy_pair("llama")[0], 1, 8)
    with torch.no_grad():
        runner.prefill([[5, 6]])
    pool, like, device = Pool((), None), runner.cache, torch.device("cpu")
    small, large = (pool.lend(like, 1, slots, device, Tape) for slots in (200, 3000))
    assert (small.capacity, large.capacity) == (256, 3072)
    pool.returned.extend([small, large])
    assert pool.lend(like, 2, 200, device, Tape) not in (small, large), "other rows"
    assert pool.lend(like, 1, 100, device, Tape) is small
    assert pool.lend(like, 1, 100, device, Tape) is not large, "far too large"
    assert pool.lend(like, 1, 1000, device, Tape) is large
    assert isinstance(like, RowCache)


# compiled


@pytest.fixture
def eager_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traces like any compilation, but generates no code, which takes a minute."""
    monkeypatch.setattr(fast, "COMPILER", "eager")
    fast._compiled.clear()
    yield
    fast._compiled.clear()
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "drafter"), [("llama", "oracle 0.7"), ("gpt2", "recycling")])
@pytest.mark.usefixtures("eager_compiler")
def test_text_from_traced_code(name: str, drafter: str) -> None:
    target = tiny_model(name, **({"n_layer": 1} if name == "gpt2" else {"num_hidden_layers": 1}))
    prompts = ragged_prompts(1)
    texts = plain_texts(target, prompts)
    config = SpecConfig.from_argument(make_drafter(drafter, texts), compile=True)
    stats = run(target, prompts, texts, config)
    assert stats.compiled_forwards >= stats.num_target_forwards - 1
    assert stats.capture_seconds > 0
    assert stats.eager_reason is None
    if name == "llama":  # what was compiled serves other widths and longer texts
        config = SpecConfig(drafter=Oracle(texts, 0.0), num_draft_tokens=3, draft_length="fixed", compile=True)
        again = run(target, prompts, texts, config)
        assert again.compiled_forwards == again.num_target_forwards - 1
        assert len(fast._compiled[target].shapes) <= 4


@pytest.mark.usefixtures("eager_compiler")
def test_compiled_code_dies_with_its_model() -> None:
    target = tiny_model(num_hidden_layers=1)
    prompts = ragged_prompts(1)
    stats = run(target, prompts, plain_texts(target, prompts), SpecConfig(drafter="none", compile=True))
    assert stats.compiled_forwards > 0
    model, weight = weakref.ref(target), weakref.ref(target.lm_head.weight)
    del target
    gc.collect()
    assert (model(), weight(), len(fast._compiled)) == (None, None, 0)


@pytest.mark.usefixtures("eager_compiler")
def test_graphs_of_compiled_code() -> None:
    target = noisy_pair("gpt2")[0]
    texts = reference("gpt2", 1)
    with taped() as made:
        for compile in (True, False):  # each has graphs of its own
            stats = run(target, ragged_prompts(1), texts, SpecConfig(drafter="none", compile=compile))
            assert stats.graph_replays == stats.num_target_forwards - 1
        assert [len(tape.graphs) for tape in made] == [2]


def test_what_does_not_compile_is_captured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no working C++ compiler found")

    monkeypatch.setattr(fast, "COMPILER", no_compiler)
    fast._compiled.clear()
    target, watched = noisy_pair("llama")[0], []
    init = graphs.Watch.__init__

    def noting(self: graphs.Watch, device: torch.device) -> None:
        watched.append(device)
        init(self, device)

    monkeypatch.setattr(graphs.Watch, "__init__", noting)
    with taped():
        stats = run(target, ragged_prompts(1), reference("llama", 1), SpecConfig(drafter="none", compile=True))
        assert "can't be compiled" in str(stats.eager_reason)
        assert "captured" not in str(stats.eager_reason)
        assert stats.graph_replays == stats.num_target_forwards - 2
        assert len(watched) == 1
    fast._compiled.clear()


def test_a_failed_compilation_costs_speed_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no working C++ compiler found")

    monkeypatch.setattr(fast, "COMPILER", no_compiler)
    fast._compiled.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            texts = reference("llama", 1)
            config = SpecConfig(drafter=Oracle(texts, 0.7), draft_length="fixed", compile=True)
            stats = run(noisy_pair("llama")[0], ragged_prompts(1), texts, config)
            assert "C++ compiler" in str(stats.eager_reason)
            assert stats.compiled_forwards == 0
    assert len([each for each in caplog.records if "runs eagerly" in each.message]) == 1
    fast._compiled.clear()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_text_from_compiled_code() -> None:
    target = tiny_model(num_hidden_layers=1)
    prompts = ragged_prompts(1)
    texts = plain_texts(target, prompts)
    fast._compiled.clear()
    config = SpecConfig(drafter=Oracle(texts, 0.7), draft_length="fixed", num_draft_tokens=3, compile=True)
    stats = run(target, prompts, texts, config)
    assert stats.eager_reason is None
    assert stats.compiled_forwards >= stats.num_target_forwards - 1


# the real thing


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compile", [False, True], ids=["graphs", "graphs of compiled code"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_on_a_gpu(drafter: str, rows: int, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_SPECDEC_GRAPHS", "1")
    if compile and drafter not in ("none", "oracle 0.7"):
        pytest.skip("two drafters are enough for compiled code")
    target, draft = (copy.deepcopy(model).cuda() for model in noisy_pair("llama"))
    prompts = {name: value.cuda() for name, value in ragged_prompts(rows).items()}
    texts = plain_texts(target, prompts, max_new_tokens=100)
    config = SpecConfig.from_argument(make_drafter(drafter, texts, draft), compile=compile)
    for _ in range(2):
        stats = run(target, prompts, texts, config, max_new_tokens=100)
        assert stats.eager_reason is None
        assert stats.graph_replays > 0
    assert stats.graph_replays >= stats.num_target_forwards // 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_failed_capture_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host would break the capture; the device and its stream stay usable."""
    monkeypatch.setenv("HF_SPECDEC_GRAPHS", "1")
    target = copy.deepcopy(noisy_pair("llama")[0]).cuda()
    prompts = {name: value.cuda() for name, value in ragged_prompts(1).items()}
    texts = plain_texts(target, prompts)
    at = RowModel.at

    def reading(self: RowModel, tokens: Tensor, *args: Any) -> Tensor:
        tokens.sum().item()
        return at(self, tokens, *args)

    monkeypatch.setattr(RowModel, "at", reading)
    stream = torch.cuda.current_stream()
    stats = run(target, prompts, texts, "none")
    assert "can't be captured" in str(stats.eager_reason)
    assert torch.cuda.current_stream() == stream
    monkeypatch.setattr(RowModel, "at", at)
    graphs.free()
    assert run(target, prompts, texts, "none").graph_replays > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_capture_that_breaks_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator and the generators of torch stay usable, and other graphs can be captured."""
    monkeypatch.setenv("HF_SPECDEC_GRAPHS", "1")
    target = copy.deepcopy(noisy_pair("llama")[0]).cuda()
    prompts = {name: value.cuda() for name, value in ragged_prompts(1).items()}
    texts = plain_texts(target, prompts)
    at = RowModel.at

    def breaking(self: RowModel, tokens: Tensor, *args: Any) -> Tensor:
        logits = at(self, tokens, *args)
        if torch.cuda.is_current_stream_capturing():  # neither the look before nor the warm-up sees it
            tokens.sum().item()
        return logits

    monkeypatch.setattr(RowModel, "at", breaking)
    stats = run(target, prompts, texts, "none")
    assert "can't be captured" in str(stats.eager_reason)
    torch.cuda.empty_cache()
    assert 0 <= float(torch.rand(1, device="cuda")) < 1
    monkeypatch.setattr(RowModel, "at", at)
    graphs.free()
    assert run(target, prompts, texts, "none").graph_replays > 0
