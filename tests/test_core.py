"""The promise in one file: the same ids as plain `generate`, for every drafter, family and batch size."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import SpecConfig, SpecDecError
from hf_specdec.engine import compat

from .tiny import ARCHITECTURES, Oracle, exact_pair, ragged_prompts, tiny_model


GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


def fixed(drafter: Any, draft_model: Any = None, length: int = 4) -> SpecConfig:
    return SpecConfig(drafter=drafter, draft_model=draft_model, draft_length="fixed", num_draft_tokens=length)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_ids_equal_plain(name: str, rows: int) -> None:
    model, prompts = tiny_model(name), ragged_prompts(rows)
    plain = model.generate(**prompts, **GREEDY)
    known = plain[:, prompts["input_ids"].shape[1] :].tolist()
    drafters = {
        "lookup": fixed("prompt_lookup"),
        "itself": fixed("draft_model", tiny_model(name)),
        "hybrid": SpecConfig(draft_model=tiny_model(name)),
        "adversarial": fixed(Oracle(known, 0.0)),
        "partial": fixed(Oracle(known, 0.7)),
        "perfect": fixed(Oracle(known, 1.0)),
        "none": SpecConfig(drafter="none"),
    }
    for label, config in drafters.items():
        assert torch.equal(hf_specdec.generate(model, **prompts, speculative=config, **GREEDY), plain), label
        stats = hf_specdec.last_stats(model)
        assert stats.fallback_reason is None, label
        assert sum(stats.acceptance_histogram) == stats.num_spec_steps
        if label == "adversarial":
            assert stats.num_accepted_draft_tokens == 0
        if label in ("perfect", "itself"):
            assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_end_early_are_padded_like_plain(rows: int) -> None:
    target, draft = exact_pair(noise=0.3)
    prompts = ragged_prompts(rows)
    free = target.generate(**prompts, **GREEDY)[:, prompts["input_ids"].shape[1] :]
    ends = [int(free[row, 3 + 4 * row]) for row in range(rows)]
    options = GREEDY | {"eos_token_id": ends}
    plain = target.generate(**prompts, **options)
    for config in (fixed("draft_model", draft), fixed("prompt_lookup"), SpecConfig(draft_model=draft)):
        assert torch.equal(hf_specdec.generate(target, **prompts, speculative=config, **options), plain)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_filled_cache_is_continued(attention: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(attention)
    prompts = ragged_prompts(3)
    options = GREEDY | {"return_dict_in_generate": True, "max_new_tokens": 8}
    first = {
        "plain": model.generate(**prompts, **options),
        "ours": hf_specdec.generate(model, **prompts, **options),
    }
    assert torch.equal(first["plain"].sequences, first["ours"].sequences)
    new = torch.randint(2, 97, (3, 5))
    ids = torch.cat([first["plain"].sequences, new], 1)
    mask = torch.cat([prompts["attention_mask"], torch.ones(3, 13, dtype=torch.long)], 1)
    follow = {"input_ids": ids, "attention_mask": mask, **GREEDY}
    plain = model.generate(**follow, **{compat.CACHE: getattr(first["plain"], compat.CACHE)})
    ours = hf_specdec.generate(model, **follow, **{compat.CACHE: getattr(first["ours"], compat.CACHE)})
    assert torch.equal(ours, plain)


def test_coupled_text_depends_on_the_seed_alone() -> None:
    target, draft = exact_pair(noise=0.5)
    prompts = ragged_prompts(3)
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "top_k": 20, "pad_token_id": 0}

    def text(**fields: Any) -> torch.Tensor:
        config = SpecConfig(verification="coupled", seed=7, **fields)
        return hf_specdec.generate(target, **prompts, speculative=config, **options)

    off = text(drafter="none")
    assert torch.equal(text(draft_model=draft), off)
    assert torch.equal(text(drafter="prompt_lookup", num_draft_tokens=3, draft_length="fixed"), off)
    alone = {name: tensor[1:2] for name, tensor in prompts.items()}
    config = SpecConfig(verification="coupled", seed=7, draft_model=draft)
    assert torch.equal(hf_specdec.generate(target, **alone, speculative=config, **options), off[1:2])


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "draft_model"])
def test_a_row_with_a_seed_of_its_own_says_what_it_says_alone(drafter: str) -> None:
    target, draft = exact_pair(noise=0.5)
    prompts = {name: tensor[[0, 1, 2, 1]] for name, tensor in ragged_prompts(3).items()}  # one prompt twice
    options = {"max_new_tokens": 20, "do_sample": True, "pad_token_id": 0}
    model = draft if drafter == "draft_model" else None
    fields: dict[str, Any] = {"drafter": drafter, "draft_model": model}

    def text(rows: list[int], seed: Any, **more: Any) -> torch.Tensor:
        config = SpecConfig(seed=seed, **fields, **more)
        inputs = {name: tensor[rows] for name, tensor in prompts.items()}
        return hf_specdec.generate(target, **inputs, speculative=config, **options)

    seeds = (3, 4, 2**61, 5)
    together = text([0, 1, 2, 3], seeds)
    for row, seed in enumerate(seeds):
        assert torch.equal(text([row], seed, verification="coupled"), together[row : row + 1])
    assert not torch.equal(together[1], together[3])
    assert torch.equal(text([1, 3], (4, 4))[0], together[1])
    with pytest.raises(SpecDecError, match="3 seeds, and the batch 4 rows"):
        text([0, 1, 2, 3], (1, 2, 3))


@pytest.mark.parametrize(
    "warpers", [{"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.5}, {"top_p": 0.8}, {"top_k": 5}]
)
@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_a_model_that_drafts_for_itself_is_always_accepted(warpers: dict[str, float], verification: str) -> None:
    model = tiny_model()
    config = SpecConfig(
        drafter="draft_model", draft_model=tiny_model(), verification=verification, seed=0, draft_length="fixed"
    )
    hf_specdec.generate(
        model, **ragged_prompts(3), speculative=config, do_sample=True, max_new_tokens=24, pad_token_id=0, **warpers
    )
    stats = hf_specdec.last_stats(model)
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 0


@pytest.mark.usefixtures("enabled")
def test_enabled_generate_takes_speculative_and_assistant_model() -> None:
    target, draft = exact_pair()
    prompts = ragged_prompts(2)
    plain = target.generate(**prompts, **GREEDY)
    for extra in ({"speculative": True}, {"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(target.generate(**prompts, **extra, **GREEDY), plain)
        assert hf_specdec.last_stats(target).num_spec_steps > 0
    with pytest.raises(ValueError, match="batch_size = 1"):  # Transformers' own loop
        target.generate(**prompts, assistant_model=draft, speculative=False, **GREEDY)


def test_one_enabled_model_copies_and_pickles() -> None:
    model, other = tiny_model(), tiny_model()
    kind = type(model)
    hf_specdec.enable(model)
    prompts = ragged_prompts(1)
    plain = other.generate(**prompts, **GREEDY)
    assert torch.equal(model.generate(**prompts, speculative=True, **GREEDY), plain)
    with pytest.raises(ValueError, match="speculative"):
        other.generate(**prompts, speculative=True, **GREEDY)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(**prompts, speculative=True, **GREEDY), plain)
    assert type(pickle.loads(pickle.dumps(model))) is kind
    hf_specdec.disable(model)
    assert type(model) is kind


@pytest.mark.parametrize("options", [{"guidance_scale": 1.5}, {"num_beams": 3}, {"use_cache": False}])
def test_unsupported_options_run_plainly_with_a_reason(options: dict[str, Any]) -> None:
    model, prompts = tiny_model(), ragged_prompts(1)
    plain = model.generate(**prompts, **options, **GREEDY)
    assert torch.equal(hf_specdec.generate(model, **prompts, **options, **GREEDY), plain)
    assert hf_specdec.last_stats(model).fallback_reason
    with pytest.raises(hf_specdec.UnsupportedModelError):
        hf_specdec.generate(model, **prompts, speculative=SpecConfig(strict=True), **options, **GREEDY)


@pytest.mark.parametrize("method", ["start", "outlook", "propose", "commit"])
def test_a_broken_drafter_costs_no_text(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = tiny_model(), ragged_prompts(3)
    plain = model.generate(**prompts, **GREEDY)
    broken = Oracle(plain[:, 24:].tolist(), 0.5)

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(broken, method, fail, raising=False)
    assert torch.equal(hf_specdec.generate(model, **prompts, speculative=fixed(broken), **GREEDY), plain)
    assert "broken" in hf_specdec.last_stats(model).fallback_reason


def test_a_draft_model_with_nan_weights_costs_no_text() -> None:
    target, draft = exact_pair()
    with torch.no_grad():
        draft.lm_head.weight.fill_(float("nan"))
    prompts = ragged_prompts(3)
    plain = target.generate(**prompts, **GREEDY)
    assert torch.equal(
        hf_specdec.generate(target, **prompts, speculative=fixed("draft_model", draft), **GREEDY), plain
    )
    assert "NaN" in hf_specdec.last_stats(target).fallback_reason


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [6, 7]]},
        {"min_new_tokens": 8, "eos_token_id": [3, 4, 5]},
        {"sequence_bias": {(5,): 3.0, (6, 7): 2.0}},
        {"encoder_repetition_penalty": 1.4},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(10 + row, 90))},
        {"suppress_tokens": [3, 4, 5]},
        {"forced_eos_token_id": 9},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
@pytest.mark.parametrize("rows", [1, 3])
def test_processors_see_each_position_with_its_own_prefix(options: dict[str, Any], rows: int) -> None:
    model, prompts = tiny_model(), ragged_prompts(rows)
    plain = model.generate(**prompts, **options, **GREEDY)
    for chance in (0.6, 1.0):
        oracle = fixed(Oracle(plain[:, 24:].tolist(), chance))
        assert torch.equal(hf_specdec.generate(model, **prompts, speculative=oracle, **options, **GREEDY), plain)
        assert hf_specdec.last_stats(model).num_accepted_draft_tokens > 0


def test_scores_hidden_states_and_attentions_equal_plain() -> None:
    model, prompts = tiny_model(), ragged_prompts(3)
    model.set_attn_implementation("eager")
    wanted = dict.fromkeys(
        ("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states", "output_attentions"),
        True,
    )
    plain = model.generate(**prompts, **wanted, **GREEDY)
    oracle = fixed(Oracle(plain.sequences[:, 24:].tolist(), 0.7))
    ours = hf_specdec.generate(model, **prompts, speculative=oracle, **wanted, **GREEDY)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.spec_stats.num_accepted_draft_tokens > 0
    for name in ("scores", "logits"):
        for mine, theirs in zip(getattr(ours, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    for name in ("hidden_states", "attentions"):
        for token, (mine, theirs) in enumerate(zip(getattr(ours, name), getattr(plain, name), strict=True)):
            for one, other in zip(mine, theirs, strict=True):
                assert one.shape == other.shape
                if token:  # the prompt's own entries hold arbitrary values at its padding
                    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_attentions_that_a_kernel_does_not_give() -> None:
    """With sdpa, plain decoding has one empty tuple a token."""
    model, prompts = tiny_model(), ragged_prompts(2)
    wanted = {"return_dict_in_generate": True, "output_attentions": True}
    plain = model.generate(**prompts, **wanted, **GREEDY)
    assert set(plain.attentions) == {()}
    ours = hf_specdec.generate(model, **prompts, speculative="prompt_lookup", **wanted, **GREEDY)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.attentions == plain.attentions


def test_real_model_greedy_equality(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    code = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n"
    for text in (
        f"Rewrite this code with type hints:\n{code}",
        "Name three rivers in Europe.",
        "把这句话翻译成英文：你好",
    ):
        chat = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        assert torch.equal(hf_specdec.generate(model, **inputs, max_new_tokens=24, do_sample=False), plain)
