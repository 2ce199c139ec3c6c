"""Rolling back leaves a cache that can't be told from a fresh prefill of the same text."""

from __future__ import annotations

import copy
import functools
import gc
import random
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_specdec
from hf_specdec.engine import cache as caches
from hf_specdec.engine import compat
from hf_specdec.engine.cache import RowCache, fill
from hf_specdec.engine.forward import RowModel, unsupported_reason

from ..tiny import tiny_model


pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("llama", "gpt2", "opt", "mistral", "gemma3")


@functools.cache
def model_of(name: str) -> Any:
    return tiny_model(name)


def texts_of(rows: int, shuffler: random.Random) -> list[list[int]]:
    return [[shuffler.randrange(2, 97) for _ in range(shuffler.randrange(3, 25))] for _ in range(rows)]


def assert_fresh(runner: RowModel, texts: list[list[int]]) -> None:
    """Each row holds the keys and values that reading its text alone would give."""
    assert runner.cache.lengths == [len(text) for text in texts]
    for row, text in enumerate(texts):
        fresh = RowModel(runner.model, 1, 8)
        with torch.no_grad():
            fresh.prefill([text])
        pairs = zip(runner.cache.take(row), fresh.cache.take(0), strict=True)
        for layer, ((keys, values), (fresh_keys, fresh_values)) in enumerate(pairs):
            torch.testing.assert_close(keys, fresh_keys, atol=3e-5, rtol=1e-4, msg=f"keys, row {row}, layer {layer}")
            torch.testing.assert_close(values, fresh_values, atol=3e-5, rtol=1e-4)


def assert_same_logits(runner: RowModel, texts: list[list[int]], logits: torch.Tensor) -> None:
    """What was said behind each text is what a model without any of our code says."""
    for row, text in enumerate(texts):
        with torch.no_grad():
            expected = runner.model(input_ids=torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_random_rounds(name: str, rows: int) -> None:
    """Blocks of random width, a random part of each row accepted, the rest rolled back by not being committed."""
    shuffler = random.Random(rows)
    texts = texts_of(rows, shuffler)
    runner = RowModel(model_of(name), rows, 8)
    with torch.no_grad():
        logits = runner.prefill(texts).logits
        assert_same_logits(runner, texts, logits)
        for _ in range(8):
            width = shuffler.choice([1, 2, 5, 9])
            counts = [shuffler.randrange(1, width + 1) for _ in texts]
            counts[0] = width
            block = [[shuffler.randrange(2, 97) for _ in range(width)] for _ in texts]
            output = runner.forward(torch.tensor(block), counts)
            kept = [shuffler.randrange(0, count + 1) for count in counts]
            ends = [text + line[:count] for text, line, count in zip(texts, block, counts, strict=True)]
            at = torch.tensor(counts) - 1
            assert_same_logits(runner, ends, output.logits[torch.arange(rows), at])
            runner.cache.commit(kept)
            texts = [text + line[:count] for text, line, count in zip(texts, block, kept, strict=True)]
            assert_fresh(runner, texts)


@pytest.mark.parametrize("name", NAMES)
def test_roll_back_select_and_go_on(name: str) -> None:
    shuffler = random.Random(7)
    texts = texts_of(4, shuffler)
    runner = RowModel(model_of(name), 4, 8)
    with torch.no_grad():
        runner.prefill(texts)
        lengths = [max(1, len(text) - shuffler.randrange(0, 6)) for text in texts]
        runner.cache.roll_back(lengths)
        texts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        assert_fresh(runner, texts)
        runner.cache.select([3, 1])
        texts = [texts[3], texts[1]]
        assert_fresh(runner, texts)
        logits = runner.prefill([[5, 6, 7], [8]]).logits
        texts = [texts[0] + [5, 6, 7], texts[1] + [8]]
        assert_same_logits(runner, texts, logits)
        assert_fresh(runner, texts)


def test_roll_back_never_lengthens() -> None:
    cache = RowCache(1, 2)
    cache.lengths = [4, 9]
    cache.roll_back([6, 2])
    assert cache.lengths == [4, 2]


def test_wrong_number_of_rows_raises() -> None:
    cache = RowCache(1, 2)
    with pytest.raises(ValueError, match="argument"):
        cache.commit([1])
    with pytest.raises(ValueError, match="argument"):
        cache.roll_back([1, 2, 3])


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_prefill_in_chunks(name: str, chunk: int) -> None:
    texts = texts_of(3, random.Random(1))
    runner = RowModel(model_of(name), 3, 8)
    with torch.no_grad():
        logits = runner.prefill(texts, chunk).logits
    assert_same_logits(runner, texts, logits)
    assert_fresh(runner, texts)


def test_rows_with_nothing_to_read() -> None:
    """`prefill` leaves them alone and gives logits for the others, in order."""
    texts = texts_of(3, random.Random(2))
    runner = RowModel(model_of("llama"), 3, 8)
    with torch.no_grad():
        runner.prefill(texts)
        logits = runner.prefill([[], [5, 6], [7]]).logits
    texts = [texts[0], texts[1] + [5, 6], texts[2] + [7]]
    assert logits.shape == (2, 97)
    assert_same_logits(runner, texts[1:], logits)
    assert_fresh(runner, texts)


def test_growth_by_doubling() -> None:
    """The buffer starts at the reserve and doubles; what it holds survives."""
    runner = RowModel(model_of("llama"), 1, 8)
    sizes, text = [], [5]
    with torch.no_grad():
        runner.prefill([text])
        for token in range(40):
            runner.forward(torch.tensor([[token + 2]]), [1])
            runner.cache.commit([1])
            text.append(token + 2)
            sizes.append(runner.cache.layers[0].keys.shape[2])
    assert sorted(set(sizes)) == [8, 16, 32, 64]
    assert_fresh(runner, [text])


def test_growth_ends_where_it_is_known_to() -> None:
    """No more than the generation can need; what was promised too low is no harm."""
    runner = RowModel(model_of("llama"), 1, 8, most=20)
    sizes, text = [], [5]
    with torch.no_grad():
        runner.prefill([text])
        for token in range(30):
            runner.forward(torch.tensor([[token + 2]]), [1])
            runner.cache.commit([1])
            text.append(token + 2)
            sizes.append(runner.cache.layers[0].keys.shape[2])
    assert sorted(set(sizes)) == [8, 16, 20, 40]
    assert_fresh(runner, [text])


def test_a_generation_reserves_what_it_can_need() -> None:
    """300 new tokens: 256 are reserved at first, and doubling would have made room for twice as many."""
    target = tiny_model()
    runners = []
    forward = RowModel.forward

    def spy(self: RowModel, *args: Any, **kwargs: Any) -> Any:
        runners.append(self)
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowModel, "forward", spy)
        ids = torch.tensor([[5, 6, 7]])
        hf_specdec.generate(target, ids, max_new_tokens=300, do_sample=False, speculative="prompt_lookup")
    assert runners[-1].cache.capacity == 3 + 300 + 16


def test_one_long_block_grows_at_once() -> None:
    runner = RowModel(model_of("llama"), 1, 8)
    with torch.no_grad():
        runner.prefill([[5, 6]])
        runner.prefill([list(range(2, 60))])
    assert runner.cache.layers[0].keys.shape[2] == 60


def test_buffer_is_not_copied_every_round() -> None:
    runner = RowModel(model_of("llama"), 2, 64)
    with torch.no_grad():
        runner.prefill([[5, 6], [7]])
        place = runner.cache.layers[0].keys.data_ptr()
        for _ in range(5):
            runner.forward(torch.tensor([[5, 6], [7, 8]]), [2, 2])
            runner.cache.commit([2, 1])
    assert runner.cache.layers[0].keys.data_ptr() == place


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_dummies_stay_inside_the_position_table(name: str) -> None:
    """A row that is full takes part with nothing; its dummies must not ask for a position the model doesn't have."""
    size = {"max_position_embeddings": 16} | ({"n_positions": 16} if name == "gpt2" else {})
    model = tiny_model(name, **size)
    runner = RowModel(model, 2, 8)
    full = [token + 2 for token in range(16)]
    with torch.no_grad():
        runner.prefill([full, [5, 6, 7]])
        runner.forward(torch.tensor([[0, 0, 0], [8, 9, 10]]), [0, 3])
        runner.cache.commit([0, 3])
    assert_fresh(runner, [full, [5, 6, 7, 8, 9, 10]])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_load_packs_the_real_slots(name: str) -> None:
    """Padding on the left, a hole in the middle, padding on the right: what stays is a fresh prefill."""
    model = model_of(name)
    ids = torch.randint(2, 97, (3, 12), generator=torch.Generator().manual_seed(0))
    keep = torch.ones(3, 12, dtype=torch.bool)
    keep[0, :4] = keep[1, 5:8] = keep[2, 10:] = False
    theirs = DynamicCache()
    with torch.no_grad():
        model(
            input_ids=ids, attention_mask=keep.long(), position_ids=(keep.long().cumsum(-1) - 1).clamp(min=0),
            use_cache=True, **{compat.CACHE: theirs},
        )  # fmt: skip
    runner = RowModel(model, 3, 8)
    runner.cache.load(theirs, keep)
    texts = [row[mask].tolist() for row, mask in zip(ids, keep, strict=True)]
    assert_fresh(runner, texts)
    with torch.no_grad():
        logits = runner.prefill([[5], [6, 7], [8]]).logits
    texts = [text + more for text, more in zip(texts, [[5], [6, 7], [8]], strict=True)]
    assert_same_logits(runner, texts, logits)
    assert_fresh(runner, texts)


def test_load_does_not_touch_the_users_cache() -> None:
    model = model_of("llama")
    theirs = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True, **{compat.CACHE: theirs})
    before = [layer.keys.clone() for layer in theirs.layers]
    runner = RowModel(model, 1, 8)
    runner.cache.load(theirs, torch.ones(1, 3, dtype=torch.bool))
    with torch.no_grad():
        runner.cache.roll_back([1])
        runner.prefill([[9, 9, 9]])
    assert all(torch.equal(layer.keys, old) for layer, old in zip(theirs.layers, before, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_fill_puts_rows_where_the_mask_says(name: str) -> None:
    """Taken, put back and read on; filled into Transformers' cache: plain decoding can go on from it."""
    model = model_of(name)
    shuffler = random.Random(3)
    texts = texts_of(3, shuffler)
    runner = RowModel(model, 3, 8)
    with torch.no_grad():
        runner.prefill(texts)
        rows = [runner.cache.take(row) for row in range(3)]
        runner.cache.select([0])
        rows = runner.read_on(rows, [[], [5, 6], [7]])
    texts = [texts[0], texts[1] + [5, 6], texts[2] + [7]]
    assert_fresh(runner, texts)
    total = max(map(len, texts)) + 2
    places = [torch.arange(total - len(text), total) for text in texts]
    if name in ("llama", "gpt2", "opt"):  # under a window plain decoding would count the hole
        places[0] = torch.cat([torch.arange(len(texts[0]) - 1), torch.tensor([total - 1])])
    cache = DynamicCache(config=compat.text_config(model))
    fill(cache, rows, places, total)
    assert cache.get_seq_length() == total
    mask = torch.zeros(3, total + 1, dtype=torch.long)
    for row, slots in enumerate(places):
        mask[row, slots] = 1
    mask[:, -1] = 1
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([[11], [12], [13]]), attention_mask=mask,
            position_ids=torch.tensor([[len(text)] for text in texts]), use_cache=True, **{compat.CACHE: cache},
        )  # fmt: skip
    read = [[*text, 11 + row] for row, text in enumerate(texts)]
    assert_same_logits(runner, read, output.logits[:, -1])


def test_read_on_with_nothing_to_read_is_free() -> None:
    runner = RowModel(model_of("llama"), 1, 8)
    with torch.no_grad():
        runner.prefill([[5, 6]])
        rows = [runner.cache.take(0)]
        assert runner.read_on(rows, [[]]) is rows


def test_which_caches_can_be_continued() -> None:
    llama, mistral = model_of("llama"), model_of("mistral")
    assert caches.unsupported_reason(None) is None
    assert caches.unsupported_reason(DynamicCache()) is None
    filled = DynamicCache(config=mistral.config)
    assert caches.unsupported_reason(filled) is None  # nothing in it yet
    with torch.no_grad():
        mistral(input_ids=torch.tensor([[5, 6]]), use_cache=True, **{compat.CACHE: filled})
    assert "sliding" in caches.unsupported_reason(filled)

    class Own(DynamicCache):
        """A user's own kind."""

    assert "Own" in caches.unsupported_reason(Own())
    assert unsupported_reason(llama) is None
    other = copy.copy(llama)
    other.config = copy.deepcopy(llama.config)
    other.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in unsupported_reason(other)


def test_buffers_die_with_their_cache() -> None:
    """At once, not when the garbage collector runs: on a GPU they are most of the memory that a generation takes."""
    runner = RowModel(model_of("llama"), 2, 8)
    with torch.no_grad():
        runner.prefill([[5, 6], [7]])
    gc.collect()
    gc.disable()
    try:
        watched = [weakref.ref(runner.cache), *(weakref.ref(layer.keys) for layer in runner.cache.layers)]
        del runner
        assert [each() for each in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_a_copied_cache_goes_on_alone() -> None:
    texts = [[5, 6, 7], [8, 9]]
    runner, other = (RowModel(model_of("llama"), 2, 8) for _ in range(2))
    with torch.no_grad():
        runner.prefill(texts)
        other.cache = copy.deepcopy(runner.cache)
        logits = other.prefill([[3], [4, 5]]).logits
        assert runner.cache.lengths == [3, 2]
        assert_same_logits(other, [[5, 6, 7, 3], [8, 9, 4, 5]], logits)
        assert_fresh(runner, texts)
