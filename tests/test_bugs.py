"""What Transformers' own assisted generation gets wrong, with the right value: B1 to B13 of 5.24.

The comment at the head of each group says what the native loop does; `tests/test_hook.py` has what enabling needs.
"""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, TextGenerationPipeline

import hf_specdec
from hf_specdec import PromptLookup, SpecConfig, StepEvent
from hf_specdec.engine import compat
from hf_specdec.request import read_request

from .plain import options, plain_texts
from .tiny import exact_pair, ragged_prompts, tiny_model
from .tools.tiny_chat import byte_tokenizer


pytestmark = pytest.mark.usefixtures("enabled")


def stats_of(model: Any) -> hf_specdec.SpecStats:
    stats = hf_specdec.last_stats(model)
    assert stats is not None
    return stats


def watched(events: list[StepEvent], **fields: Any) -> SpecConfig:
    return SpecConfig(on_step=events.append, **fields)


def plain(model: Any, **settings: Any) -> Tensor:
    return model.generate(**settings, speculative=False)


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# B1: the native loop applies temperature and top-p to the draft twice; a model drafting for itself loses up to 59 %.


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
@pytest.mark.parametrize(
    "warper", [{"temperature": 0.5}, {"temperature": 0.7}, {"temperature": 1.5}, {"top_p": 0.8}], ids=str
)
def test_b1_a_model_drafting_for_itself_is_always_accepted(warper: dict[str, float], verification: str) -> None:
    model = tiny_model()
    model.generate(
        **ragged_prompts(4), assistant_model=model, do_sample=True, max_new_tokens=40, pad_token_id=0, **warper,
        speculative=SpecConfig(
            drafter="draft_model", num_draft_tokens=4, draft_length="fixed", verification=verification, seed=1
        ),
    )  # fmt: skip
    stats = stats_of(model)
    assert stats.num_draft_tokens > 100
    # p and q come from forwards of different width, so a coin in a million may fall the other way
    assert stats.num_accepted_draft_tokens >= stats.num_draft_tokens - 4
    assert stats.fallback_reason is None


# B2: with an assistant the native loop raises "we could not locate a tokenizer" for any stop string.


@pytest.mark.parametrize("rows", [1, 3])
def test_b2_stop_strings_work_with_an_assistant_model(rows: int) -> None:
    tokenizer = byte_tokenizer()
    target, draft = exact_pair(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    prompts = ragged_prompts(rows, vocabulary=len(tokenizer) - 1)
    settings = options(max_new_tokens=40, tokenizer=tokenizer)
    length = prompts["input_ids"].shape[1]
    free = plain(target, **prompts, **settings)
    # two bytes in the middle of the first row's text, as the tokenizer writes them
    stop = tokenizer.decode(free[0, length + 8 : length + 10])
    if "\N{REPLACEMENT CHARACTER}" in stop:
        stop = next(c for token in free[0, length + 5 :] if (c := tokenizer.decode(token)).isascii())
    expected = plain(target, **prompts, **settings, stop_strings=[stop])
    got = target.generate(**prompts, **settings, stop_strings=[stop], assistant_model=draft)
    assert torch.equal(got, expected)
    assert stats_of(target).num_accepted_draft_tokens > 0
    if rows == 1:
        assert expected.shape[1] < free.shape[1]


# B3: the native loop asks criteria only at the end of an accepted block and runs past the stop.


class StopAfter(StoppingCriteria):
    """Stop a row as soon as its last token is one of these."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize("stop_at", [1, 5, 6, 7, 8, 9])
def test_b3_a_criterion_fires_inside_a_block(stop_at: int) -> None:
    target, draft = exact_pair()
    prompts = ragged_prompts(1)
    text = plain_texts(target, prompts, max_new_tokens=40)[0]
    stop = text[stop_at - 1]
    events: list[StepEvent] = []
    criterion = StopAfter([stop])
    output = target.generate(
        **prompts, **options(max_new_tokens=40), stopping_criteria=[criterion], assistant_model=draft,
        speculative=watched(events, drafter="draft_model", num_draft_tokens=8, draft_length="fixed"),
    )  # fmt: skip
    length = text.index(stop) + 1
    assert output[0, 24:].tolist() == text[:length]
    assert criterion.lengths == list(range(25, 25 + length)), "each prefix once, none behind the stop"
    # the whole text but its first token lay inside one accepted block
    assert [len(event.emitted[0]) for event in events] == ([1, length - 1] if length > 1 else [1])


# B4: the native loop feeds the whole prompt into a cache that holds it already: silently wrong text.


@pytest.mark.parametrize("speculation", ["assistant", "prompt_lookup"])
@pytest.mark.parametrize("turns", [1, 3])
def test_b4_a_filled_cache_is_continued(speculation: str, turns: int) -> None:
    target, draft = exact_pair()
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(2, 97, (1, 20), generator=generator)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(text, **{compat.CACHE: cache}, use_cache=True)
    widths: list[int] = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    how = {"assistant_model": draft} if speculation == "assistant" else {"speculative": "prompt_lookup"}
    for _ in range(turns):
        text = torch.cat([text, torch.randint(2, 97, (1, 6), generator=generator)], 1)
        expected = plain(target, input_ids=text, **options())
        unread = text.shape[1] - cache.get_seq_length()
        widths.clear()
        got = target.generate(text, **options(), **{compat.CACHE: cache}, **how)
        assert torch.equal(got, expected)
        assert widths[0] == unread, "what the cache holds is not read again"
        assert stats_of(target).num_target_forwards > 1
        assert cache.get_seq_length() == got.shape[1] - 1
        text = got


# B5: the native loop calls the stateful guidance processor k + 1 times a round: silently different text.


def test_b5_guidance_is_plain_decoding() -> None:
    target, draft = exact_pair()
    prompts, settings = ragged_prompts(1), options(guidance_scale=2.5)
    expected = plain(target, **prompts, **settings)
    assert torch.equal(target.generate(**prompts, **settings, assistant_model=draft), expected)
    assert not torch.equal(expected, plain(target, **prompts, **options()))
    assert "Unbatched" in str(stats_of(target).fallback_reason)


# B7: the native loop reads these names from the assistant's config alone; given to `generate` they are ignored.


def drafted_lengths(target: Any, **settings: Any) -> list[int]:
    """How many tokens each round drafted, where there was room for ten."""
    events: list[StepEvent] = []
    config = watched(events, drafter="draft_model")
    target.generate(**ragged_prompts(1), **options(max_new_tokens=60), **settings, speculative=config)
    lengths, emitted = [], 0
    for event in events:
        if event.step and emitted < 50:
            lengths.append(len(event.drafted[0]))
        emitted += len(event.emitted[0])
    assert emitted == 60
    return lengths


@pytest.mark.parametrize("number", [1, 3, 7])
def test_b7_num_assistant_tokens_takes_effect(number: int) -> None:
    target, draft = exact_pair()
    lengths = drafted_lengths(target, assistant_model=draft, num_assistant_tokens=number)
    assert set(lengths) == {number}


def test_b7_num_assistant_tokens_on_the_assistants_config_takes_effect() -> None:
    target, draft = exact_pair()
    draft.generation_config.num_assistant_tokens = 2
    assert set(drafted_lengths(target, assistant_model=draft)) == {2}
    given = drafted_lengths(target, assistant_model=draft, num_assistant_tokens=6)
    assert set(given) == {6}, "what is given to the call wins"


def test_b7_the_schedule_takes_effect() -> None:
    target, draft = exact_pair(noise=0.5)
    settings = {"assistant_model": draft, "num_assistant_tokens": 6}
    assert set(drafted_lengths(target, **settings)) == {6}
    assert set(drafted_lengths(target, **settings, num_assistant_tokens_schedule="constant")) == {6}
    heuristic = drafted_lengths(target, **settings, num_assistant_tokens_schedule="heuristic")
    assert set(heuristic) != {6}
    assert max(heuristic) <= 6, "the number is the most that is drafted"


def test_b7_the_confidence_threshold_takes_effect() -> None:
    target, draft = exact_pair()
    settings = {"assistant_model": draft, "num_assistant_tokens": 6}
    assert set(drafted_lengths(target, **settings, assistant_confidence_threshold=1e-6)) == {6}
    assert set(drafted_lengths(target, **settings, assistant_confidence_threshold=1.0)) == {1}
    draft.generation_config.assistant_confidence_threshold = 1.0
    assert set(drafted_lengths(target, **settings)) == {1}


@pytest.mark.parametrize("number", [1, 3, 9])
def test_b7_prompt_lookup_num_tokens_takes_effect(number: int) -> None:
    target, events = tiny_model(), []
    start = torch.arange(2, 22).repeat(2)[None]
    config = watched(events, draft_length="fixed")
    got = target.generate(start, **options(), prompt_lookup_num_tokens=number, speculative=config)
    assert torch.equal(got, plain(target, input_ids=start, **options()))
    assert max(len(event.drafted[0]) for event in events) == number
    assert stats_of(target).drafter == "prompt_lookup"


def test_b7_prompt_lookup_names_need_no_speculative() -> None:
    target = tiny_model()
    start = torch.arange(2, 22).repeat(3)[None]
    target.generate(start, **options(), prompt_lookup_num_tokens=3)
    stats = stats_of(target)
    assert stats.drafter == "prompt_lookup"
    assert len(stats.acceptance_histogram) <= 4


def test_b7_max_matching_ngram_size_takes_effect() -> None:
    request = read_request(tiny_model(), None, {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2})
    config = request.config(None)
    assert config is not None
    assert isinstance(config.drafter, PromptLookup)
    assert (config.drafter.max_ngram, config.num_draft_tokens) == (2, 3)


# B8: the native loop takes a padded vocabulary for another tokenizer and demands two of them.


@pytest.mark.parametrize("sizes", [(256, 264), (264, 256)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_b8_padded_vocabularies_fit(sizes: tuple[int, int], do_sample: bool) -> None:
    shared, (target_size, draft_size) = 250, sizes
    target, draft = exact_pair(vocab_size=max(sizes))
    smaller = target if target_size < draft_size else draft
    smaller.resize_token_embeddings(min(sizes))
    assert (target.config.vocab_size, draft.config.vocab_size) == sizes
    with torch.no_grad():  # ids of padding are never said
        for model in (target, draft):
            model.lm_head.weight[shared:] = 0
    prompts = ragged_prompts(3, vocabulary=shared)
    settings = options(do_sample=do_sample)
    config = SpecConfig(
        drafter="draft_model", verification="coupled", seed=1, num_draft_tokens=4, draft_length="fixed"
    )
    got = target.generate(**prompts, **settings, assistant_model=draft, speculative=config)
    stats = stats_of(target)
    assert stats.fallback_reason is None
    assert stats.num_draft_tokens > 0
    # the draft is the target without the layers that do nothing
    assert stats.draft_acceptance_rate > 0.9
    if not do_sample:
        assert torch.equal(got, plain(target, **prompts, **settings))


# B9: the native pipeline demands an assistant tokenizer if special-token ids differ, which `generate` then refuses.


@pytest.mark.parametrize("batch_size", [1, 2])
def test_b9_a_pipeline_takes_an_assistant_with_other_special_tokens(batch_size: int) -> None:
    tokenizer = byte_tokenizer(chat=False)
    end = tokenizer.eos_token_id
    sizes = {"vocab_size": len(tokenizer)}
    target, draft = exact_pair(**sizes, eos_token_id=end, pad_token_id=end, bos_token_id=None)
    for config in (draft.config, draft.generation_config):
        config.eos_token_id, config.pad_token_id, config.bos_token_id = 1, 2, 3
    texts = ["hello there", "a b c"]
    alone = TextGenerationPipeline(model=target, tokenizer=tokenizer)
    wanted = alone(texts, max_new_tokens=16, do_sample=False, batch_size=batch_size)
    pipe = TextGenerationPipeline(model=target, tokenizer=tokenizer)
    settings = {"max_new_tokens": 16, "do_sample": False, "batch_size": batch_size}
    got = pipe(texts, **settings, assistant_model=draft, num_assistant_tokens=4)
    assert got == wanted
    assert stats_of(target).num_accepted_draft_tokens > 0


# B10: the native loop prunes and remaps the user's assistant; it also writes its schedule into the assistant's config.


def test_b10_the_users_draft_is_never_modified() -> None:
    first, draft = exact_pair()
    second = tiny_model(seed=5)
    before, saved = weights_of(draft), draft.generation_config.to_dict()
    modules, config = [id(module) for module in draft.modules()], draft.config.to_dict()
    outputs = []
    for target in (first, second, first, second):
        for do_sample in (False, True):
            torch.manual_seed(0)
            outputs.append(
                target.generate(
                    **ragged_prompts(3),
                    **options(do_sample=do_sample),
                    assistant_model=draft,
                    num_assistant_tokens=4,
                    num_assistant_tokens_schedule="heuristic",
                )  # fmt: skip
            )
    assert [id(module) for module in draft.modules()] == modules
    assert draft.config.to_dict() == config
    assert draft.generation_config.to_dict() == saved
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())
    for once, again in zip(outputs[:4:2], outputs[4::2], strict=True):
        assert torch.equal(once, again)
    assert torch.equal(outputs[2], plain(second, **ragged_prompts(3), **options()))


# B11: the native loop re-infers the draft's mask from its ids; once it says the pad id, acceptance collapses.


@pytest.mark.parametrize("rows", [1, 3])
def test_b11_a_draft_may_say_the_pad_id(rows: int) -> None:
    model = tiny_model()
    prompts = ragged_prompts(rows)
    text = plain_texts(model, prompts, max_new_tokens=40)[0]
    pad = text[2]
    for config in (model.config, model.generation_config):
        config.pad_token_id = pad
    config = SpecConfig(drafter="draft_model", num_draft_tokens=4, draft_length="fixed")
    settings = options(max_new_tokens=40, pad_token_id=pad)
    got = model.generate(**prompts, **settings, assistant_model=model, speculative=config)
    assert got[0, 24:].tolist() == text
    assert pad in text[:-10]
    stats = stats_of(model)
    assert stats.num_draft_tokens > 20
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens


# B12: the native loop dies of an IndexError when the text outgrows the draft's positions.


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("prompt_length", [8, 24, 31, 32, 40])
@pytest.mark.parametrize("drafter", ["draft_model", "hybrid"])
def test_b12_a_draft_with_a_shorter_context_stops_drafting(drafter: str, prompt_length: int, rows: int) -> None:
    target = tiny_model("gpt2")
    draft = tiny_model("gpt2", max_position_embeddings=32)
    weights = target.state_dict()
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:32]
    draft.load_state_dict(weights)
    prompts = ragged_prompts(rows, longest=prompt_length)
    got = target.generate(
        **prompts, **options(max_new_tokens=30), assistant_model=draft,
        speculative=SpecConfig(drafter=drafter, num_draft_tokens=5, draft_length="fixed"),
    )  # fmt: skip
    assert torch.equal(got, plain(target, **prompts, **options(max_new_tokens=30)))
    stats = stats_of(target)
    assert stats.fallback_reason is None
    lengths = prompts["attention_mask"].sum(-1)
    if int(lengths.min()) < 31:
        assert stats.num_draft_tokens > 0
    if drafter == "draft_model" and int(lengths.min()) >= 32:
        assert stats.num_draft_tokens == 0


# B13: the native loop fails to reshape 0 elements when `inputs_embeds` come with an assistant.


def test_b13_inputs_embeds_are_plain_decoding(caplog: pytest.LogCaptureFixture) -> None:
    target, draft = exact_pair()
    embeds = target.get_input_embeddings()(ragged_prompts(1)["input_ids"]).detach()
    expected = plain(target, inputs_embeds=embeds, **options())
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        got = target.generate(inputs_embeds=embeds, **options(), assistant_model=draft)
    assert torch.equal(got, expected)
    assert "inputs_embeds" in str(stats_of(target).fallback_reason)


def test_two_threads_may_share_a_draft_of_two_targets() -> None:
    """B10 again: a draft that is never written to may serve anyone at any time."""
    first, draft = exact_pair()
    second = copy.deepcopy(first)
    wanted = plain(first, **ragged_prompts(3), **options())
    found: list[Tensor] = []

    def work(target: Any) -> None:
        for _ in range(3):
            found.append(target.generate(**ragged_prompts(3), **options(), assistant_model=draft))

    threads = [threading.Thread(target=work, args=(target,)) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(torch.equal(each, wanted) for each in found)
