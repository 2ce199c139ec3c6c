"""Every option of `generate` says with speculation what it says without."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AsyncTextIteratorStreamer,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.engine import compat
from hf_specdec.support import plain_reason

from .plain import assert_sound, ends_apart, make_drafter, new_tokens, options, plain_texts
from .tiny import Oracle, exact_pair, ragged_prompts, tiny_model
from .tools.tiny_chat import byte_tokenizer


pytestmark = pytest.mark.usefixtures("one_thread")
DRAFTERS = ("oracle 0.7", "prompt_lookup")


@functools.cache
def model_of(name: str = "llama", attention: str = "sdpa") -> Any:
    return tiny_model(name, attn_implementation=attention)


def check(
    rows: int, drafter: Any, make: Callable[[], dict[str, Any]] | None = None, model: Any = None, **changes: Any
) -> hf_specdec.SpecStats:
    """Text with an option is plain `generate`'s; `make` builds arguments afresh for each call.

    The oracle knows the text *with* the option, so that there is something to accept.
    """
    model = model or model_of()
    prompts = ragged_prompts(rows)
    fresh = make or (lambda: {})
    expected = model.generate(**prompts, **options(**changes), **fresh())
    texts = new_tokens(expected, prompts)
    speculative = make_drafter(drafter, texts) if isinstance(drafter, str) else drafter
    output = hf_specdec.generate(model, **prompts, **options(**changes), **fresh(), speculative=speculative)
    assert output.tolist() == expected.tolist()
    stats = hf_specdec.last_stats(model)
    assert_sound(stats)
    return stats


def allowed(row: int, prefix: Tensor) -> list[int]:
    """Depends on the row, on the length and on the last token."""
    return [(int(prefix[-1]) * 7 + 11 * row + len(prefix) + i) % 97 for i in range(12)]


OPTIONS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.5},
    "no repeated n-gram": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[42], [31], [50, 47], [37, 58, 88]]},
    "min new tokens": {"min_new_tokens": 15, "eos_token_id": list(range(0, 97, 3))},
    "min length": {"min_length": 35, "eos_token_id": list(range(0, 97, 3))},
    "forced end": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "sequence bias": {"sequence_bias": {(5,): 3.0, (93, 42): -9.0, (93, 40): 9.0, (50, 47): -9.0, (6, 74, 37): -30.0}},
    "suppressed tokens": {"suppress_tokens": list(range(30, 60))},
    "suppressed first tokens": {"begin_suppress_tokens": list(range(0, 90))},
    "length penalty": {"exponential_decay_length_penalty": (6, 1.9), "eos_token_id": 9},
    "encoder repetition": {"encoder_repetition_penalty": 1.8},
    "encoder n-gram": {"encoder_no_repeat_ngram_size": 1},
    "allowed tokens": {"prefix_allowed_tokens_fn": allowed},
    "normalised": {"renormalize_logits": True},
    "invalid values": {"remove_invalid_values": True},
    "end list": {"eos_token_id": [3, 9, 27, 81, 50]},
    "many": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[7]], "min_new_tokens": 8,
             "eos_token_id": [4, 8, 12, 16], "sequence_bias": {(20, 21): 5.0}, "renormalize_logits": True},
}  # fmt: skip


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_option(option: str, rows: int, drafter: str) -> None:
    stats = check(rows, drafter, **OPTIONS[option])
    assert stats.fallback_reason is None
    if drafter.startswith("oracle") and option not in ("end list", "length penalty"):
        assert stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("option", sorted(set(OPTIONS) - {"normalised", "invalid values"}))
def test_option_matters(option: str, rows: int) -> None:
    """Otherwise the test above shows nothing."""
    prompts = ragged_prompts(rows)
    assert plain_texts(model_of(), prompts, **OPTIONS[option]) != plain_texts(model_of(), prompts)


@pytest.mark.parametrize("option", ["repetition penalty", "no repeated n-gram", "allowed tokens", "sequence bias"])
def test_option_with_a_draft_model(option: str) -> None:
    """The draft goes through the processors too, with its own prefix: a perfect draft stays perfect."""
    target, draft = exact_pair()
    config = hf_specdec.SpecConfig(drafter="draft_model", draft_model=draft, num_draft_tokens=4, draft_length="fixed")
    stats = check(3, config, model=target, **OPTIONS[option])
    assert stats.fallback_reason is None
    if option != "allowed tokens":  # a user's function is not called for drafts
        assert stats.draft_acceptance_rate == 1


# --- custom processors ----------------------------------------------------------------------------------------------


class LastTokens(LogitsProcessor):
    """Pure: forbids what the last three tokens sum up to."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        banned = (input_ids[:, -3:].sum(-1) + torch.arange(60)[:, None]).T % 97
        return scores.scatter(1, banned, float("-inf"))


class ByRow(LogitsProcessor):
    """Pure, and knows which row of the batch is which."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        banned = (
            torch.stack([torch.arange(row, 97, 4) for row in range(len(scores))]).to(scores.device)
            if len(scores) == 1
            else torch.stack([torch.arange(0, 60) + row * 10 for row in range(len(scores))])
        )
        return scores.scatter(1, banned, float("-inf"))


class CountsCalls(LogitsProcessor):
    """Stateful: what it forbids depends on how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.arange(self.calls % 5, 97, 5), float("-inf"))


class Automaton(LogitsProcessor):
    """Stateful: a grammar that advances over the token chosen last, in a tensor that changes in place."""

    def __init__(self, rows: int) -> None:
        self.states = torch.zeros(rows, dtype=torch.long)
        self.started = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.started:
            self.states.mul_(3).add_(input_ids[:, -1]).remainder_(7)
        self.started = True
        allowed_ids = (torch.arange(97) % 7)[None] == self.states[:, None]
        return scores.masked_fill(~allowed_ids, float("-inf"))


class LateState(LogitsProcessor):
    """Stateful from its seventh token on only, so that it is found out in the middle of a block."""

    def __init__(self) -> None:
        self.late: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 30:
            self.late.append(1)
        return scores.index_fill(1, torch.arange(len(self.late) % 4, 97, 4), float("-inf"))


class Locked(LogitsProcessor):
    """Holds something whose state can't be seen."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        with self.lock:
            return scores.roll(1, -1)


class FromGenerator(LogitsProcessor):
    """State in a Python generator."""

    def __init__(self) -> None:
        self.numbers = iter(number * number for number in range(1000))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.arange(next(self.numbers) % 5, 97, 5), float("-inf"))


def closure_with_state() -> LogitsProcessor:
    count = 0

    class Wrapped(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return step(scores)

    def step(scores: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return scores.index_fill(1, torch.arange(count % 5, 97, 5), float("-inf"))

    wrapped = Wrapped()
    wrapped.step = step
    return wrapped


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", [LastTokens, ByRow])
def test_pure_processor(kind: type, rows: int, drafter: str) -> None:
    stats = check(rows, drafter, lambda: {"logits_processor": LogitsProcessorList([kind()])})
    assert stats.fallback_reason is None
    if drafter.startswith("oracle"):
        assert stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", [CountsCalls, Automaton, closure_with_state, Locked, FromGenerator])
def test_processor_with_state(kind: Any, rows: int, drafter: str) -> None:
    """Found out or not to be seen: either way the text is right and the reason is told."""
    make = (lambda: Automaton(rows)) if kind is Automaton else kind
    stats = check(rows, drafter, lambda: {"logits_processor": LogitsProcessorList([make()])})
    assert "logits processor" in stats.fallback_reason


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_processor_whose_state_shows_late(drafter: str) -> None:
    stats = check(1, drafter, lambda: {"logits_processor": LogitsProcessorList([LateState()])})
    assert "LateState" in stats.fallback_reason


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_processor_whose_state_shows_late_in_a_batch(drafter: str) -> None:
    """With custom processors the rows of a batch stay at the same step, so that every call can still be made."""
    stats = check(3, drafter, lambda: {"logits_processor": LogitsProcessorList([LateState()])})
    assert "LateState" in stats.fallback_reason


def test_processor_is_called_as_often_as_in_plain_decoding() -> None:
    """Its own state follows the real text alone."""
    prompts = ragged_prompts(3)
    counts = []
    for generate in (model_of().generate, functools.partial(hf_specdec.generate, model_of())):
        processor = CountsCalls()
        generate(**prompts, **options(), logits_processor=LogitsProcessorList([processor]))
        counts.append(processor.calls)
    assert counts[0] == counts[1] == 24


# --- stopping -------------------------------------------------------------------------------------------------------


@functools.cache
def byte_model() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    return model, tokenizer


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_strings(length: int, rows: int, drafter: str) -> None:
    model, tokenizer = byte_model()
    prompts = ragged_prompts(rows, vocabulary=256, pad=tokenizer.pad_token_id)
    settings = options(pad_token_id=tokenizer.pad_token_id)
    texts = new_tokens(model.generate(**prompts, **settings), prompts)
    # a string out of each row's text, at another place in each
    places = [(4 + 3 * row, 4 + 3 * row + length) for row in range(rows)]
    strings = [tokenizer.decode(text[a:b]) for text, (a, b) in zip(texts, places, strict=True)]
    stop = {"stop_strings": [each for each in strings if "\ufffd" not in each] or ["a"], "tokenizer": tokenizer}
    expected = model.generate(**prompts, **settings, **stop)
    speculative = make_drafter(drafter, texts)
    if drafter.startswith("oracle"):
        speculative.vocabulary = len(tokenizer)
    output = hf_specdec.generate(model, **prompts, **settings, **stop, speculative=speculative)
    assert output.tolist() == expected.tolist()
    assert hf_specdec.last_stats(model).fallback_reason is None
    hf_specdec.enable()
    output = model.generate(**prompts, **settings, **stop, speculative=speculative)
    assert output.tolist() == expected.tolist()
    assert hf_specdec.last_stats(model).fallback_reason is None


class SumOver(StoppingCriteria):
    """Stops a row when its new tokens sum up to enough: fires inside a block, at another step in each row."""

    def __init__(self, prompt: int, enough: int) -> None:
        self.prompt, self.enough = prompt, enough

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, self.prompt :].sum(-1) >= self.enough * (1 + torch.arange(len(input_ids)))


@pytest.mark.parametrize("drafter", [*DRAFTERS, "oracle 1"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("enough", [1, 150, 260, 401])
def test_custom_criterion(enough: int, rows: int, drafter: str) -> None:
    make = lambda: {"stopping_criteria": StoppingCriteriaList([SumOver(24, enough)])}  # noqa: E731
    # without an end token plain decoding lets stopped rows of a batch run on
    changes = {"eos_token_id": 96} if rows > 1 else {}
    stats = check(rows, drafter, make, **changes)
    assert stats.fallback_reason is None
    assert stats.num_emitted_tokens < 24 * rows
    if rows == 3 and enough == 150:
        assert len({row.num_emitted_tokens for row in stats.rows}) == 3


def test_custom_criterion_without_an_end_token_in_a_batch_is_plain() -> None:
    make = lambda: {"stopping_criteria": StoppingCriteriaList([SumOver(24, 150)])}  # noqa: E731
    assert "end token" in check(3, "oracle 1", make).fallback_reason


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_criterion_reads_scores(drafter: str) -> None:
    """Scores are one `[1, vocabulary]` a token, as in plain decoding."""
    seen: dict[str, list[Any]] = {}

    class Confident(StoppingCriteria):
        def __init__(self, log: list[Any]) -> None:
            self.log = log

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            self.log.append((input_ids.shape, len(scores), [tuple(each.shape) for each in scores]))
            best = torch.stack([torch.softmax(each, -1).amax(-1) for each in scores]).sum()
            return torch.full((len(input_ids),), bool(best > 9), dtype=torch.bool)

    wanted = {"return_dict_in_generate": True, "output_scores": True}
    prompts = ragged_prompts(1)
    results = []
    texts = plain_texts(model_of(), prompts)
    for name in ("plain", "ours"):
        criteria = StoppingCriteriaList([Confident(seen.setdefault(name, []))])
        call = {**prompts, **options(), **wanted, "stopping_criteria": criteria}
        if name == "plain":
            results.append(model_of().generate(**call))
        else:
            results.append(hf_specdec.generate(model_of(), **call, speculative=make_drafter(drafter, texts)))
    assert results[0].sequences.tolist() == results[1].sequences.tolist()
    assert results[0].sequences.shape[1] < 48
    assert seen["plain"] == seen["ours"]


def test_max_time() -> None:
    """The text stops at a time, so only its beginning is the same."""
    model = model_of()
    prompts = ragged_prompts(1)
    texts = plain_texts(model, prompts, max_new_tokens=400)

    class Slow(Oracle):
        def propose(self, rows: Any, length: int) -> Any:
            time.sleep(0.05)
            return super().propose(rows, length)

    began = time.perf_counter()
    output = hf_specdec.generate(
        model, **prompts, **options(max_new_tokens=400), max_time=0.5,
        speculative=hf_specdec.SpecConfig(drafter=Slow(texts, 0.5), draft_length="fixed"),
    )  # fmt: skip
    assert 0.4 < time.perf_counter() - began < 5
    new = new_tokens(output, prompts)[0]
    assert 1 <= len(new) < 400
    assert new == texts[0][: len(new)]
    assert hf_specdec.last_stats(model).fallback_reason is None


# --- streamers ------------------------------------------------------------------------------------------------------


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.puts.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        self.puts.append("end")


@pytest.mark.parametrize("door", ["function", "enable"])
@pytest.mark.parametrize("drafter", [*DRAFTERS, "oracle 1"])
@pytest.mark.parametrize("ending", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_streamer_gets_the_same_puts(rows: int, ending: bool, drafter: str, door: str) -> None:
    model = model_of()
    prompts = ragged_prompts(rows)
    texts = plain_texts(model, prompts)
    settings = options(eos_token_id=ends_apart(texts)) if ending else options()
    plain, ours = Recorder(), Recorder()
    model.generate(**prompts, **settings, streamer=plain)
    speculative = make_drafter(drafter, texts)
    if door == "enable":
        hf_specdec.enable()
        model.generate(**prompts, **settings, streamer=ours, speculative=speculative)
    else:
        hf_specdec.generate(model, **prompts, **settings, streamer=ours, speculative=speculative)
    assert ours.puts == plain.puts


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer(capsys: pytest.CaptureFixture[str], skip_prompt: bool) -> None:
    model, tokenizer = byte_model()
    prompts = ragged_prompts(1, vocabulary=256)
    printed = []
    for generate in (model.generate, functools.partial(hf_specdec.generate, model)):
        generate(**prompts, **options(), streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


def test_text_iterator_streamer_in_a_thread() -> None:
    model, tokenizer = byte_model()
    prompts = ragged_prompts(1, vocabulary=256)
    pieces = []
    for generate in (model.generate, functools.partial(hf_specdec.generate, model)):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=generate, kwargs={**prompts, **options(), "streamer": streamer})
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert pieces[0] == pieces[1]
    assert "".join(pieces[0])


def test_async_text_iterator_streamer() -> None:
    model, tokenizer = byte_model()
    prompts = ragged_prompts(1, vocabulary=256)

    async def pieces(generate: Any) -> list[str]:
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=generate, kwargs={**prompts, **options(), "streamer": streamer})
        thread.start()
        found = [piece async for piece in streamer]
        thread.join()
        return found

    plain = asyncio.run(pieces(model.generate))
    assert plain == asyncio.run(pieces(functools.partial(hf_specdec.generate, model)))


@pytest.mark.parametrize("error", [RuntimeError("the pipe is closed"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [1, 2, 7])
def test_streamer_raises(error: BaseException, after: int) -> None:
    """Model, drafter and the user's cache can be used again."""
    model = model_of()
    text = ragged_prompts(1)["input_ids"]
    settings = options(pad_token_id=96, suppress_tokens=[96])
    expected = model.generate(text, **settings).tolist()

    class Broken(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.puts) > after:
                raise error

    drafter = Oracle([expected[0][24:]], 0.7)
    cache = transformers.DynamicCache()
    with pytest.raises(type(error)):
        hf_specdec.generate(model, text, **settings, streamer=Broken(), speculative=drafter, **{compat.CACHE: cache})
    for passed in ({}, {compat.CACHE: cache}):
        assert model.generate(text, **settings, **passed).tolist() == expected
    again = hf_specdec.generate(
        model, text, **settings, speculative=drafter, **{compat.CACHE: transformers.DynamicCache()}
    )
    assert again.tolist() == expected
    # a cache that was filled before and half-way through when it happened
    first = model.generate(text, **settings, **{compat.CACHE: (filled := transformers.DynamicCache())})
    longer = torch.cat([first, text[:, :5]], 1)
    expected = model.generate(longer, **settings).tolist()
    with pytest.raises(type(error)):
        hf_specdec.generate(model, longer, **settings, streamer=Broken(), **{compat.CACHE: filled})
    assert hf_specdec.generate(model, longer, **settings, **{compat.CACHE: filled}).tolist() == expected


# --- what `return_dict_in_generate` gives ---------------------------------------------------------------------------

WANTED = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def assert_close(ours: Tensor, plain: Tensor) -> None:
    assert ours.dtype == plain.dtype
    assert ours.shape == plain.shape
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drafter", ["oracle 0.7", "prompt_lookup"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3"])
def test_records(name: str, rows: int, drafter: str) -> None:
    model = model_of(name, "eager")
    prompts = ragged_prompts(rows)
    settings = options(repetition_penalty=1.2) | WANTED
    plain = model.generate(**prompts, **settings)
    texts = new_tokens(plain.sequences, prompts)
    ours = hf_specdec.generate(model, **prompts, **settings, speculative=make_drafter(drafter, texts))
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.spec_stats.fallback_reason is None
    assert set(plain) <= set(ours)
    for field in ("scores", "logits"):
        assert len(ours[field]) == len(plain[field]) == 24
        for mine, theirs in zip(ours[field], plain[field], strict=True):
            assert_close(mine, theirs)
    mask = prompts["attention_mask"].bool()
    for field in ("hidden_states", "attentions"):
        assert len(ours[field]) == len(plain[field]) == 24
        for token, (mine, theirs) in enumerate(zip(ours[field], plain[field], strict=True)):
            assert len(mine) == len(theirs)
            for layer, expected in zip(mine, theirs, strict=True):
                assert layer.shape == expected.shape
                # what plain decoding computes at padding means nothing
                if field == "hidden_states" and token == 0:
                    layer, expected = layer[mask], expected[mask]
                elif field == "attentions" and token == 0:
                    layer, expected = layer.transpose(1, 2)[mask], expected.transpose(1, 2)[mask]
                assert_close(layer, expected)


def test_records_of_rows_that_ended() -> None:
    """Fields are as long as the longest row; each row's entries are right as long as it ran."""
    model = model_of("llama", "eager")
    prompts = ragged_prompts(3)
    ends = ends_apart(plain_texts(model, prompts))
    settings = options(eos_token_id=ends) | WANTED
    plain = model.generate(**prompts, **settings)
    texts = new_tokens(plain.sequences, prompts)
    ours = hf_specdec.generate(model, **prompts, **settings, speculative=Oracle(texts, 0.7))
    assert ours.sequences.tolist() == plain.sequences.tolist()
    ran = [row.num_emitted_tokens for row in ours.spec_stats.rows]
    assert len(set(ran)) == 3
    for field in ("scores", "logits"):
        assert len(ours[field]) == len(plain[field]) == max(ran)
        for token, (mine, theirs) in enumerate(zip(ours[field], plain[field], strict=True)):
            live = [row for row in range(3) if token < ran[row]]
            assert mine.shape == theirs.shape
            assert_close(mine[live], theirs[live])
    for field in ("hidden_states", "attentions"):
        assert len(ours[field]) == len(plain[field])
        for token in range(1, max(ran)):
            live = [row for row in range(3) if token < ran[row]]
            for layer, expected in zip(ours[field][token], plain[field][token], strict=True):
                assert layer.shape == expected.shape
                assert_close(layer[live], expected[live])


def test_records_with_a_hole_in_the_mask() -> None:
    model = model_of("llama", "eager")
    prompts = ragged_prompts(3)
    prompts["attention_mask"][:, 18:20] = 0
    settings = options() | WANTED
    plain = model.generate(**prompts, **settings)
    ours = hf_specdec.generate(
        model, **prompts, **settings, speculative=Oracle(new_tokens(plain.sequences, prompts), 0.7)
    )
    assert ours.sequences.tolist() == plain.sequences.tolist()
    mask = prompts["attention_mask"].bool()
    for mine, theirs in zip(ours.hidden_states[0], plain.hidden_states[0], strict=True):
        assert_close(mine[mask], theirs[mask])
    for mine, theirs in zip(ours.attentions[5], plain.attentions[5], strict=True):
        assert_close(mine, theirs)


# --- Transformers' own names ----------------------------------------------------------------------------------------


def widths(model: Any, call: Callable[[], Any]) -> list[int]:
    """Width of every forward of a model."""
    found: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        call()
    finally:
        handle.remove()
    return found


@pytest.mark.parametrize("number", [1, 2, 6])
@pytest.mark.parametrize("where", ["argument", "draft's config", "generation config"])
def test_num_assistant_tokens(number: int, where: str) -> None:
    target, draft = exact_pair()
    prompts = ragged_prompts(1)
    settings = options(max_new_tokens=1 + 3 * (number + 1))
    if where == "argument":
        settings |= {"num_assistant_tokens": number, "num_assistant_tokens_schedule": "constant"}
    elif where == "draft's config":
        draft.generation_config.num_assistant_tokens = number
        draft.generation_config.num_assistant_tokens_schedule = "constant"
    else:
        config = transformers.GenerationConfig(**settings, num_assistant_tokens=number)
        config.num_assistant_tokens_schedule = "constant"
        settings = {"generation_config": config}
    hf_specdec.enable()
    found = widths(target, lambda: model_call(target, draft, prompts, settings))
    assert found == [24] + [number + 1] * 3


def model_call(target: Any, draft: Any, prompts: dict[str, Tensor], settings: dict[str, Any]) -> None:
    config = hf_specdec.SpecConfig(drafter="draft_model")
    target.generate(**prompts, **settings, assistant_model=draft, speculative=config)


@pytest.mark.parametrize("number", [1, 3])
def test_prompt_lookup_num_tokens(number: int) -> None:
    model = model_of()
    text = torch.tensor([[5, 6, 7, 8, 9] * 6])
    call = options(prompt_lookup_num_tokens=number)
    expected = model.generate(text, **options()).tolist()
    hf_specdec.enable()
    outputs: list[Any] = []
    found = widths(model, lambda: outputs.append(model.generate(text, **call)))
    assert outputs[0].tolist() == expected
    assert max(found[1:]) <= number + 1
    assert hf_specdec.last_stats(model).drafter == "prompt_lookup"
    found = widths(model, lambda: outputs.append(hf_specdec.generate(model, text, **call)))
    assert outputs[1].tolist() == expected
    assert max(found[1:]) <= number + 1


def test_max_matching_ngram_size() -> None:
    model = model_of()
    hf_specdec.enable()
    seen = []
    original = hf_specdec.PromptLookup.start

    def start(self: Any, context: Any) -> None:
        seen.append(self.max_ngram)
        original(self, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_specdec.PromptLookup, "start", start)
        model.generate(**ragged_prompts(1), **options(prompt_lookup_num_tokens=3, max_matching_ngram_size=2))
    assert seen == [2]


def test_assistant_confidence_threshold() -> None:
    """A draft that is never sure enough drafts one token a round."""
    target, draft = exact_pair()
    hf_specdec.enable()
    call = {"assistant_model": draft, "num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    output = target.generate(
        **ragged_prompts(1), **options(), **call, assistant_confidence_threshold=1.0,
        speculative=hf_specdec.SpecConfig(drafter="draft_model"),
    )  # fmt: skip
    stats = hf_specdec.last_stats(target)
    assert stats.num_draft_tokens <= stats.num_spec_steps
    assert new_tokens(output, ragged_prompts(1)) == plain_texts(target, ragged_prompts(1))


@pytest.mark.parametrize("how", ["model", "path"])
@pytest.mark.parametrize("drafter", ["draft_model", "hybrid"])
def test_the_threshold_holds_for_a_draft_given_by_path_and_for_any_drafter(
    drafter: str, how: str, tmp_path: Any
) -> None:
    target, draft = exact_pair()
    draft.save_pretrained(tmp_path)
    hf_specdec.enable()
    given = draft if how == "model" else str(tmp_path)
    config = hf_specdec.SpecConfig(drafter=drafter, draft_model=given, num_draft_tokens=5, draft_length="fixed")
    target.generate(
        **ragged_prompts(1), **options(), speculative=config, assistant_confidence_threshold=1.0,
    )  # fmt: skip
    stats = hf_specdec.last_stats(target)
    assert stats.drafter == drafter
    steps = stats.steps_by_source["draft_model"]
    assert steps > 0
    if drafter == "draft_model":
        assert stats.num_draft_tokens <= steps


# --- sampling with `verification="coupled"` -------------------------------------------------------------------------

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "typical": {"typical_p": 0.6},
    "epsilon": {"epsilon_cutoff": 0.02},
    "eta": {"eta_cutoff": 0.02},
    "repetition": {"repetition_penalty": 1.4},
    "many": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "no_repeat_ngram_size": 2, "repetition_penalty": 1.1},
}


@pytest.mark.parametrize("sampling", SAMPLING)
def test_coupled_text_is_the_same_with_any_draft(sampling: str) -> None:
    target, draft = exact_pair(layers=2, noise=0.3)
    prompts = ragged_prompts(3)
    settings = options(do_sample=True, **({"top_k": 0} | SAMPLING[sampling]))

    def text(inputs: dict[str, Tensor], drafter: Any, seed: int = 11, **fields: Any) -> list[list[int]]:
        config = hf_specdec.SpecConfig(
            drafter=drafter, verification="coupled", seed=seed,
            draft_model=draft if drafter in ("draft_model", "hybrid") else None, **fields,
        )  # fmt: skip
        return new_tokens(hf_specdec.generate(target, **inputs, **settings, speculative=config), inputs)

    expected = text(prompts, "none")
    for drafter, fields in (
        ("prompt_lookup", {"draft_length": "fixed", "num_draft_tokens": 3}),
        ("draft_model", {"draft_length": "fixed", "num_draft_tokens": 1}),
        ("draft_model", {"draft_length": "fixed", "num_draft_tokens": 6}),
        (Oracle(expected, 0.7), {}),
    ):
        assert text(prompts, drafter, **fields) == expected
    assert hf_specdec.last_stats(target).num_accepted_draft_tokens > 0
    for row in (0, 2):  # alone, and without padding
        mask = prompts["attention_mask"][row].bool()
        alone = {"input_ids": prompts["input_ids"][row : row + 1, mask]}
        alone["attention_mask"] = torch.ones_like(alone["input_ids"])
        if sampling in ("repetition", "many"):  # which, as in plain decoding, see the padding of a padded row
            alone = {name: value[row : row + 1] for name, value in prompts.items()}
        assert text(alone, "draft_model", draft_length="fixed") == [expected[row]]
    assert text(prompts, "none", seed=12) != expected


def test_sampling_follows_the_global_seed() -> None:
    model = model_of()
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        output = hf_specdec.generate(model, **ragged_prompts(3), **options(do_sample=True), speculative=True)
        texts.append(output.tolist())
    assert texts[0] == texts[1] != texts[2]


# --- what is decoded plainly ----------------------------------------------------------------------------------------


PLAIN: dict[str, tuple[dict[str, Any], str]] = {
    "guidance": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
    "watermark": ({"watermarking_config": WatermarkingConfig(bias=4.0)}, "Watermark"),
    "beams": ({"num_beams": 2}, "beam"),
    "no cache": ({"use_cache": False}, "use_cache"),
    "offloaded cache": ({"cache_implementation": "offloaded"}, "offloaded"),
}


@pytest.mark.parametrize("door", ["function", "enable"])
@pytest.mark.parametrize("case", PLAIN)
def test_decoded_plainly(case: str, door: str, caplog: pytest.LogCaptureFixture) -> None:
    changes, reason = PLAIN[case]
    model = model_of()
    if case == "offloaded cache" and not torch.accelerator.is_available():
        pytest.skip("Transformers' offloaded cache copies on a side stream, which needs an accelerator")
    prompts = ragged_prompts(1)
    expected = model.generate(**prompts, **options(**changes))
    hf_specdec.routing._WARNED.clear()
    generate: Any = functools.partial(hf_specdec.generate, model)
    if door == "enable":
        hf_specdec.enable()
        generate = model.generate
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):  # the reason is logged once
            output = generate(**prompts, **options(**changes), speculative="prompt_lookup")
            assert output.tolist() == expected.tolist()
            assert reason in hf_specdec.last_stats(model).fallback_reason
    assert len([record for record in caplog.records if record.name.startswith("hf_specdec")]) == 1
    with pytest.raises(hf_specdec.UnsupportedModelError, match=reason):
        generate(**prompts, **options(**changes), speculative=hf_specdec.SpecConfig(strict=True))


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static", "quantized"])
def test_other_caches_have_a_reason(kind: str) -> None:
    """The same without an accelerator: what would be decided about such a call."""
    settings = transformers.GenerationConfig(cache_implementation=kind)
    settings.use_cache = True
    ids = ragged_prompts(1)["input_ids"]
    assert kind in plain_reason(model_of(), ids, [], [], settings, False, {})


def check_plain_model(model: Any, inputs: dict[str, Any], reason: str) -> None:
    expected = model.generate(**inputs, **options(max_new_tokens=12))
    assert (
        hf_specdec.generate(model, **inputs, **options(max_new_tokens=12), speculative="prompt_lookup").tolist()
        == expected.tolist()
    )
    assert reason in hf_specdec.last_stats(model).fallback_reason
    with pytest.raises(hf_specdec.UnsupportedModelError):
        hf_specdec.generate(model, **inputs, **options(), speculative=hf_specdec.SpecConfig(strict=True))
    hf_specdec.enable()
    output = model.generate(**inputs, **options(max_new_tokens=12), speculative=True)
    assert output.tolist() == expected.tolist()
    assert reason in hf_specdec.last_stats(model).fallback_reason


def test_inputs_embeds() -> None:
    model = model_of()
    embeds = model.get_input_embeddings()(ragged_prompts(1)["input_ids"]).detach()
    check_plain_model(model, {"inputs_embeds": embeds}, "")
    assert hf_specdec.last_stats(model).fallback_reason


def test_encoder_decoder() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    check_plain_model(model, {"input_ids": ragged_prompts(1)["input_ids"]}, "encoder-decoder")


def test_recurrent_model() -> None:
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, state_size=4, num_hidden_layers=2)
    model = transformers.MambaForCausalLM(config).eval()
    check_plain_model(model, {"input_ids": ragged_prompts(1)["input_ids"]}, "")
    assert hf_specdec.last_stats(model).fallback_reason


# --- models whose positions or windows speculation would get wrong ----------------------------------------------------


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 64), ("longrope", 32)])
def test_rotary_frequencies_that_depend_on_the_length(kind: str, limit: int) -> None:
    """A block of draft tokens would switch the frequencies too early."""
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
    model = tiny_model(max_position_embeddings=64, rope_parameters=parameters)
    for new, reason in ((limit - 24, None), (limit - 23, f"behind {limit} tokens")):
        prompts = ragged_prompts(1)
        text = hf_specdec.generate(model, **prompts, **options(max_new_tokens=new), speculative=True)
        assert new_tokens(text, prompts) == plain_texts(model, prompts, max_new_tokens=new)
        found = hf_specdec.last_stats(model).fallback_reason
        assert (found is None) if reason is None else (reason in found)


def test_a_window_that_the_model_ignores() -> None:
    model = tiny_model(sliding_window=8)
    hf_specdec.generate(model, **ragged_prompts(1), **options(), speculative=True)
    assert "sliding_window" in hf_specdec.last_stats(model).fallback_reason


def test_a_model_that_prepares_its_inputs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", lambda self, *args, **kwargs: {}, raising=False)
    assert "prepares its inputs" in plain_reason(
        model, torch.ones(1, 4, dtype=torch.long), [], [], settings_of(model), False, {}
    )


def settings_of(model: Any) -> Any:
    settings = copy.deepcopy(model.generation_config)
    settings.max_length = 20
    return settings


def test_no_draft_beyond_the_last_position() -> None:
    """Plain decoding stops in time; a draft must not ask for a position that the embedding doesn't have."""
    model = tiny_model("opt", max_position_embeddings=40)
    prompts = {"input_ids": torch.arange(4, 28)[None], "attention_mask": torch.ones(1, 24, dtype=torch.long)}
    stop = [lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 38])]
    settings = options(max_new_tokens=100, stopping_criteria=stop)
    expected = model.generate(**prompts, **settings)
    texts = [expected[0, 24:].tolist() + [5] * 8]
    config = hf_specdec.SpecConfig(drafter=Oracle(texts, 1.0, length=8), num_draft_tokens=8, draft_length="fixed")
    assert torch.equal(hf_specdec.generate(model, **prompts, **settings, speculative=config), expected)
    stats = hf_specdec.last_stats(model)
    assert stats.fallback_reason is None
    assert stats.num_accepted_draft_tokens > 8
