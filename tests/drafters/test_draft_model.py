"""A draft model: any vocabulary padding, never changed, and its own cache in step with the text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import IncompatibleDraftError, SpecConfig
from hf_specdec.drafters import DraftModel

from ..plain import new_tokens, options, plain_texts
from ..tiny import exact_pair, ragged_prompts, tiny_model


pytestmark = pytest.mark.usefixtures("one_thread")


def generate(
    target: Any, drafter: Any, rows: int = 1, prompts: Any = None, length: int = 4, **changes: Any
) -> hf_specdec.SpecStats:
    """Fixed draft length; the text is plain decoding's."""
    prompts = prompts or ragged_prompts(rows)
    if not isinstance(drafter, DraftModel):
        drafter = DraftModel(drafter)
    config = SpecConfig(drafter=drafter, draft_length="fixed", num_draft_tokens=length)
    output = hf_specdec.generate(target, **prompts, **options(**changes), speculative=config)
    if not changes.get("do_sample"):
        assert new_tokens(output, prompts) == plain_texts(target, prompts, **changes)
    stats = hf_specdec.last_stats(target)
    assert stats.fallback_reason is None
    return stats


def resized(model: Any, size: int, wild: bool = True) -> Any:
    """The same model with a shorter or longer vocabulary; the extra ids are the likeliest of all if `wild`."""
    changed = copy.deepcopy(model)
    old = model.lm_head.weight.shape[0]
    changed.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        if size > old:
            changed.lm_head.weight[old:] = 30 * torch.randn(size - old, model.lm_head.weight.shape[1]) if wild else 0
    assert changed.config.vocab_size == size
    return changed


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [98, 128, 1000])
def test_drafts_vocabulary_is_padded(size: int, rows: int) -> None:
    """Ids beyond the target's are never drafted, however likely the draft finds them."""
    target, draft = exact_pair()
    stats = generate(target, resized(draft, size), rows)
    assert stats.draft_acceptance_rate == 1


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [98, 128])
def test_targets_vocabulary_is_padded(size: int, rows: int) -> None:
    target, draft = exact_pair()
    stats = generate(resized(target, size, wild=False), draft, rows)
    assert stats.draft_acceptance_rate == 1


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
@pytest.mark.parametrize(("target_size", "draft_size"), [(128, 97), (97, 128)])
def test_padded_vocabularies_when_sampling(target_size: int, draft_size: int, verification: str) -> None:
    target, draft = exact_pair()
    if target_size > 97:
        target = resized(target, target_size, wild=False)
    else:
        draft = resized(draft, draft_size)
    config = SpecConfig(
        drafter="draft_model", draft_model=draft, draft_length="fixed", verification=verification, seed=1
    )
    output = hf_specdec.generate(
        target, **ragged_prompts(3), **options(do_sample=True, max_new_tokens=40), speculative=config
    )
    assert 0 <= output.min() <= output.max() < target_size
    assert hf_specdec.last_stats(target).num_accepted_draft_tokens > 0
    assert hf_specdec.last_stats(target).fallback_reason is None


def test_text_with_ids_the_draft_does_not_have() -> None:
    """They are out of its embedding, which on a GPU would be the end of the process: the draft reads another id."""
    target, draft = exact_pair()
    larger = resized(target, 128, wild=False)
    prompts = ragged_prompts(1)
    prompts["input_ids"][0, 3] = 120
    assert generate(larger, draft, prompts=prompts).num_accepted_draft_tokens > 0


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("door", ["instance", "assistant_model"])
def test_draft_is_never_changed(sample: bool, door: str) -> None:
    target, draft = exact_pair(noise=0.3)
    draft.generation_config.temperature = 0.3
    draft.generation_config.num_assistant_tokens = 3
    before = (
        {name: value.clone() for name, value in draft.state_dict().items()}, draft.generation_config.to_dict(),
        draft.config.to_dict(), type(draft), dict(vars(draft)), draft.training,
    )  # fmt: skip
    settings = options(do_sample=sample, repetition_penalty=1.2)
    if door == "instance":
        hf_specdec.generate(target, **ragged_prompts(3), **settings, speculative=DraftModel(draft))
    else:
        hf_specdec.enable()
        target.generate(**ragged_prompts(3), **settings, assistant_model=draft, speculative="draft_model")
    assert all(torch.equal(value, before[0][name]) for name, value in draft.state_dict().items())
    assert draft.generation_config.to_dict() == before[1]
    assert draft.config.to_dict() == before[2]
    assert type(draft) is before[3]
    assert vars(draft).keys() == before[4].keys()
    assert all(vars(draft)[name] is value for name, value in before[4].items())
    assert draft.training == before[5]
    assert all(parameter.grad is None for parameter in draft.parameters())


def test_instance_keeps_nothing_of_a_generation() -> None:
    target, draft = exact_pair()
    drafter = DraftModel(draft)
    before = dict(vars(drafter))
    generate(target, drafter)
    assert vars(drafter) == before


def test_one_forward_a_drafted_token() -> None:
    """And the draft reads each token once: the prompt, then what is new."""
    target, draft = exact_pair()
    read: list[int] = []
    draft.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    generate(target, draft, length=4, max_new_tokens=21)
    # a full acceptance leaves two tokens to read: the last drafted one and the bonus
    assert read == [25, 1, 1, 1] + [2, 1, 1, 1] * 3


@pytest.mark.parametrize("noise", [0.2, 1.0])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_ragged_rows_draft_what_they_would_draft_alone(rows: int, noise: float) -> None:
    """The draft's own cache stays in step: each row's drafts are those of the row alone, without padding."""
    target, draft = exact_pair(noise=noise)
    prompts = ragged_prompts(rows)

    def drafted(inputs: dict[str, torch.Tensor]) -> list[dict[int, tuple[int, ...]]]:
        """For each row: where in its text it drafted what."""
        events: list[hf_specdec.StepEvent] = []
        config = SpecConfig(
            drafter="draft_model", draft_model=draft, draft_length="fixed", num_draft_tokens=4, on_step=events.append
        )
        hf_specdec.generate(target, **inputs, **options(), speculative=config)
        found: list[dict[int, tuple[int, ...]]] = [{} for _ in inputs["input_ids"]]
        written = [0] * len(found)
        for event in events:
            for row, guess, emitted in zip(event.rows, event.drafted, event.emitted, strict=True):
                found[row][written[row]] = guess
                written[row] += len(emitted)
        return found

    together = drafted(prompts)
    for row in range(rows):
        mask = prompts["attention_mask"][row].bool()
        ids = prompts["input_ids"][row : row + 1, mask]
        assert drafted({"input_ids": ids, "attention_mask": torch.ones_like(ids)}) == [together[row]]


def test_confidence_threshold() -> None:
    """Nothing is drafted behind the first unsure token; the text doesn't change."""
    target, draft = exact_pair(noise=0.3)
    never, always = DraftModel(draft, confidence_threshold=0.0), DraftModel(draft, confidence_threshold=1.1)
    full = generate(target, DraftModel(draft), 3)
    assert generate(target, never, 3).num_draft_tokens == full.num_draft_tokens
    cut = generate(target, always, 3)
    assert len(cut.acceptance_histogram) <= 2
    between = generate(target, DraftModel(draft, confidence_threshold=0.9), 3)
    assert cut.num_draft_tokens < between.num_draft_tokens < full.num_draft_tokens
    assert between.draft_acceptance_rate > full.draft_acceptance_rate


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_draft_is_sampled_from_what_verification_is_told(verification: str) -> None:
    """The target as its own draft: p = q at every position, so that nothing can be rejected."""
    model = tiny_model()
    config = SpecConfig(
        drafter="draft_model", draft_model=model, draft_length="fixed", num_draft_tokens=5, verification=verification
    )
    settings = options(do_sample=True, temperature=0.7, top_k=10, repetition_penalty=1.3, no_repeat_ngram_size=2)
    hf_specdec.generate(model, **ragged_prompts(3), **settings, speculative=config)
    stats = hf_specdec.last_stats(model)
    assert stats.draft_acceptance_rate == 1
    assert stats.sum_min_pq == pytest.approx(stats.num_draft_tokens, rel=1e-4)


def test_other_kinds_of_drafts_are_refused() -> None:
    target, _ = exact_pair()
    draft = tiny_model()
    draft.config._attn_implementation = "flash_attention_2"
    with pytest.raises(IncompatibleDraftError, match="flash_attention_2") as error:
        hf_specdec.drafters.DraftModel(draft).start(None)
    assert "prompt_lookup" in str(error.value)


def test_draft_in_another_dtype() -> None:
    target, draft = exact_pair()
    stats = generate(target, copy.deepcopy(draft).to(torch.bfloat16), 3)
    assert stats.draft_acceptance_rate > 0.5


def test_draft_of_another_architecture() -> None:
    target, _ = exact_pair()
    generate(target, tiny_model("gpt2"), 3)
    generate(target, tiny_model("gemma3"), 3)
