"""A broken draft costs speed, never the answer: one warning, the right text, and the reason in the statistics."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import Draft, Drafter, Hybrid
from hf_specdec.drafters import DraftModel, Outlook

from .plain import assert_sound, ends_apart, new_tokens, options, plain_texts
from .tiny import Oracle, ragged_prompts, tiny_model


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def check(
    model: Any, rows: int, drafter: Any, caplog: pytest.LogCaptureFixture, reason: str | None, **changes: Any
) -> hf_specdec.SpecStats:
    """The text is right, and `reason` is told exactly once (never, if it is `None`)."""
    prompts = ragged_prompts(rows)
    expected = plain_texts(model, prompts, **changes)
    caplog.clear()
    if not isinstance(drafter, hf_specdec.SpecConfig):
        drafter = hf_specdec.SpecConfig(drafter=drafter, draft_length="fixed")
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        output = hf_specdec.generate(model, **prompts, **options(**changes), speculative=drafter)
    assert new_tokens(output, prompts) == expected
    stats = hf_specdec.last_stats(model)
    assert_sound(stats)
    warnings = [record for record in caplog.records if record.name.startswith("hf_specdec")]
    if reason is None:
        assert not warnings
        assert stats.fallback_reason is None
    else:
        assert len(warnings) == 1
        assert reason in warnings[0].getMessage()
        assert reason in stats.fallback_reason
    return stats


class Failing(Oracle):
    """A good drafter, one of whose methods raises at its n-th call."""

    def __init__(self, texts: list[list[int]], method: str, error: BaseException, after: int = 0) -> None:
        super().__init__(texts, 0.9)
        self.method, self.error, self.after = method, error, after

    def start(self, context: Any) -> None:
        self.calls = 0
        super().start(context)
        self.fail("start")

    def fail(self, method: str) -> None:
        if method == self.method:
            self.calls += 1
            if self.calls > self.after:
                raise self.error

    def outlook(self, rows: Any) -> Any:
        self.fail("outlook")
        return super().outlook(rows)

    def propose(self, rows: Any, length: int) -> Draft:
        self.fail("propose")
        return super().propose(rows, length)

    def commit(self, rows: Any, accepted: Any) -> None:
        self.fail("commit")

    def select(self, keep: Any) -> None:
        self.fail("select")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("method", ["start", "outlook", "propose", "commit"])
def test_method_raises(model: Any, caplog: Any, method: str, after: int, rows: int) -> None:
    texts = plain_texts(model, ragged_prompts(rows))
    drafter = Failing(texts, method, RuntimeError("broken on purpose"), 0 if method == "start" else after)
    stats = check(model, rows, drafter, caplog, "RuntimeError: broken on purpose")
    assert "oracle" in stats.fallback_reason
    # what was accepted before the failure is kept
    drafted = method != "start" and (after or method == "commit")
    assert bool(stats.num_accepted_draft_tokens) == bool(drafted)


def test_select_raises(model: Any, caplog: Any) -> None:
    texts = plain_texts(model, ragged_prompts(3))
    drafter = Failing(texts, "select", RuntimeError("broken on purpose"))
    check(model, 3, drafter, caplog, "RuntimeError: broken on purpose", eos_token_id=ends_apart(texts))


@pytest.mark.parametrize(
    "error",
    [MemoryError("no room"), torch.OutOfMemoryError("CUDA out of memory"), KeyError("id"), AssertionError("x")],
)
@pytest.mark.parametrize("method", ["start", "propose", "commit"])
def test_out_of_memory_and_other_errors(model: Any, caplog: Any, error: Exception, method: str) -> None:
    texts = plain_texts(model, ragged_prompts(3))
    check(model, 3, Failing(texts, method, error, 0), caplog, type(error).__name__)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_is_no_error_is_not_swallowed(model: Any, error: BaseException) -> None:
    prompts = ragged_prompts(3)
    texts = plain_texts(model, prompts)
    with pytest.raises(type(error)):
        hf_specdec.generate(model, **prompts, **options(), speculative=Failing(texts, "propose", error, 1))
    assert plain_texts(model, prompts) == texts


def broken_model(model: Any, what: str) -> Any:
    draft = copy.deepcopy(model)
    with torch.no_grad():
        if what == "head":
            draft.lm_head.weight.fill_(float("nan"))
        elif what == "one id":
            draft.lm_head.weight[17].fill_(float("nan"))
        elif what == "layer":
            draft.model.layers[0].mlp.down_proj.weight[3, 3] = float("nan")
        elif what == "infinite":
            draft.lm_head.weight.fill_(float("inf"))
    return draft


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("rows", [3])
@pytest.mark.parametrize("what", ["head", "one id", "layer", "infinite"])
def test_draft_gives_nan(model: Any, caplog: Any, what: str, rows: int, sample: bool) -> None:
    for wrap in (lambda draft: draft, lambda draft: Hybrid(draft)):
        drafter = wrap(DraftModel(broken_model(model, what)))
        if not sample:
            check(model, rows, drafter, caplog, "NaN")
            continue
        prompts = ragged_prompts(rows)
        config = hf_specdec.SpecConfig(drafter=drafter, seed=3, verification="coupled", num_draft_tokens=4)
        config = replace(config, draft_length="fixed")
        plainly = hf_specdec.SpecConfig(drafter="none", seed=3, verification="coupled")
        texts = [
            hf_specdec.generate(model, **prompts, **options(do_sample=True), speculative=each)
            for each in (plainly, config)
        ]
        assert texts[0].tolist() == texts[1].tolist()
        assert "NaN" in hf_specdec.last_stats(model).fallback_reason


@pytest.mark.parametrize("verification", ["rejection", "block", "auto"])
def test_draft_gives_nan_to_a_sampler(model: Any, caplog: Any, verification: str) -> None:
    """Sampling stays possible: every id in range, one warning."""
    config = hf_specdec.SpecConfig(
        drafter=DraftModel(broken_model(model, "head")), verification=verification, draft_length="fixed"
    )
    prompts = ragged_prompts(3)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        output = hf_specdec.generate(model, **prompts, **options(do_sample=True), speculative=config)
    assert output.shape == (3, 48)
    assert 0 <= output.min() <= output.max() < 97
    assert "NaN" in hf_specdec.last_stats(model).fallback_reason
    assert len(caplog.records) == 1


class Fixed(Drafter):
    """Proposes whatever a function says."""

    name = "fixed"

    def __init__(self, make: Any) -> None:
        self.make = make

    def propose(self, rows: Any, length: int) -> Draft:
        return self.make(len(rows.live), length)


def long(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.long)


WRONG = {
    "not a draft": (lambda b, k: long(b, k), "must return a Draft"),
    "none": (lambda b, k: None, "must return a Draft"),
    "one dimension": (lambda b, k: Draft(long(b), [0] * b), "needs tokens"),
    "three dimensions": (lambda b, k: Draft(long(b, k, 2), [k] * b), "needs tokens"),
    "rows missing": (lambda b, k: Draft(long(b - 1, k), [k] * (b - 1)), "needs tokens"),
    "rows too many": (lambda b, k: Draft(long(b + 1, k), [k] * (b + 1)), "needs tokens"),
    "counts missing": (lambda b, k: Draft(long(b, k), [k] * (b - 1)), "needs tokens"),
    "counts too large": (lambda b, k: Draft(long(b, k), [k + 1] * b), "counts must be"),
    "counts negative": (lambda b, k: Draft(long(b, k), [-1] * b), "counts must be"),
    "float tokens": (lambda b, k: Draft(long(b, k).float(), [k] * b), "must be integers"),
    "probs too short": (lambda b, k: Draft(long(b, k), [k] * b, torch.ones(b, k + 1, 97) / 97), "probabilities must"),
    "probs of other rows": (lambda b, k: Draft(long(b, k), [k] * b, torch.ones(1, k, 97) / 97), "probabilities must"),
    "probs of other ids": (lambda b, k: Draft(long(b, k), [k] * b, torch.ones(b, k, 90) / 90), "probabilities must"),
    "probs without vocabulary": (lambda b, k: Draft(long(b, k), [k] * b, torch.ones(b, k)), "probabilities must"),
    "a sampled tree": (
        lambda b, k: Draft(long(b, k), [k] * b, torch.ones(b, k, 97) / 97, parents=[[-1] * k] * b), "deterministic",
    ),
    "sources missing": (lambda b, k: Draft(long(b, k), [k] * b, sources=["here"] * (b - 1)), "needs 3 sources"),
    "counts that aren't whole": (lambda b, k: Draft(long(b, k), [0.5] * b), "TypeError"),
    "tokens on a device without data": (
        lambda b, k: Draft(torch.zeros(b, k, dtype=torch.long, device="meta"), [k] * b), "failed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_shapes_types_and_devices(model: Any, caplog: Any, wrong: str, sample: bool) -> None:
    make, reason = WRONG[wrong]
    config = hf_specdec.SpecConfig(drafter=Fixed(make), num_draft_tokens=3, draft_length="fixed")
    if not sample:
        check(model, 3, config, caplog, reason)
        return
    prompts = ragged_prompts(3)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        output = hf_specdec.generate(model, **prompts, **options(do_sample=True), speculative=config)
    assert output.shape == (3, 48)
    assert len(caplog.records) == 1
    assert reason in hf_specdec.last_stats(model).fallback_reason


@pytest.mark.parametrize("healthy", [True, torch.tensor([True, True, True]), False, torch.tensor([True, False, True])])
def test_health_may_be_told_in_any_form(model: Any, caplog: Any, healthy: Any) -> None:
    drafter = Fixed(lambda b, k: Draft(long(b, k), [k] * b, healthy=healthy))
    check(model, 3, drafter, caplog, None if bool(torch.as_tensor(healthy).all()) else "NaN")


@pytest.mark.parametrize("draft_length", ["adaptive", "fixed"])
@pytest.mark.parametrize("entries", [0, 2, 4])
def test_an_outlook_of_another_length(model: Any, caplog: Any, entries: int, draft_length: str) -> None:
    drafter = Fixed(lambda b, k: Draft(long(b, k), [k] * b))
    drafter.outlook = lambda rows: [Outlook("fixed")] * entries
    config = hf_specdec.SpecConfig(drafter=drafter, draft_length=draft_length)
    check(model, 3, config, caplog, f"must give 3 entries, got {entries}")


@pytest.mark.parametrize(
    "outlook",
    [
        Outlook("fixed", acceptance=float("nan")),
        Outlook("fixed", gains=[0.5, float("nan")]),
        Outlook("fixed", acceptance="high"),
        Outlook("fixed", guess=["a"]),
    ],
)
def test_an_outlook_that_says_nonsense(model: Any, caplog: Any, outlook: Outlook) -> None:
    """It would be kept by the controller beyond this generation."""
    drafter = Fixed(lambda b, k: Draft(long(b, k), [k] * b))
    drafter.outlook = lambda rows: [outlook] * 3
    check(model, 3, drafter, caplog, "the drafter 'fixed' failed")


def test_a_guess_that_is_used_again(model: Any, caplog: Any) -> None:
    """What a drafter tells is copied: it may clear its list and fill it for the next round."""
    shared: list[int] = []

    def outlook(rows: Any) -> list[Outlook]:
        shared.clear()
        shared.extend([rows.num_new(rows.live[0]), 5, 6])
        return [Outlook("fixed", acceptance=0.5, free=True, guess=shared)] * len(rows.live)

    drafter = Fixed(lambda b, k: Draft(long(b, k), [k] * b))
    drafter.outlook = outlook
    check(model, 3, drafter, caplog, None)


def test_an_attribute_called_model_need_not_be_one(model: Any, caplog: Any) -> None:
    drafter = Oracle(plain_texts(model, ragged_prompts(3)), 0.9)
    drafter.model = {"ngrams": 1}
    check(model, 3, hf_specdec.SpecConfig(drafter=drafter, draft_length="adaptive"), caplog, None)


@pytest.mark.parametrize("token", [-1, -100, 97, 98, 2**40])
def test_ids_that_do_not_exist(model: Any, caplog: Any, token: int) -> None:
    """Cut in front of the wrong id without a look at the device, so that there is nothing to warn of."""
    texts = plain_texts(model, ragged_prompts(3))

    class Partly(Oracle):
        def propose(self, rows: Any, length: int) -> Draft:
            draft = super().propose(rows, length)
            if draft.tokens.shape[1] > 1:
                draft.tokens[:, 1] = token
            return draft

    config = hf_specdec.SpecConfig(drafter=Partly(texts, 1.0), num_draft_tokens=4, draft_length="fixed")
    stats = check(model, 3, config, caplog, None)
    assert stats.num_draft_tokens == stats.num_accepted_draft_tokens > 0
    assert len(stats.acceptance_histogram) == 2


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("what", ["too little", "too much", "negative", "nan", "zero"])
def test_probs_that_are_no_distribution(model: Any, what: str, verification: str) -> None:
    """Such a draft is not used at all: the text is that of no draft."""
    wrong = torch.full((97,), 1 / 97)
    if what == "too little":
        wrong *= 0.5
    elif what == "too much":
        wrong *= 3
    elif what == "negative":
        wrong[0], wrong[1] = -1.0, 2.0
    elif what == "nan":
        wrong[5] = float("nan")
    else:
        wrong *= 0
    drafter = Fixed(lambda b, k: Draft(long(b, k) + 7, [k] * b, wrong.expand(b, k, 97).clone()))
    prompts = ragged_prompts(3)
    config = hf_specdec.SpecConfig(
        drafter=drafter, num_draft_tokens=4, draft_length="fixed", verification=verification, seed=5
    )
    output = hf_specdec.generate(model, **prompts, **options(do_sample=True), speculative=config)
    assert 0 <= output.min() <= output.max() < 97
    assert hf_specdec.last_stats(model).num_draft_tokens == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_tokens_of_other_integer_types_are_fine(model: Any, caplog: Any, dtype: torch.dtype) -> None:
    texts = plain_texts(model, ragged_prompts(3))

    class Other(Oracle):
        def propose(self, rows: Any, length: int) -> Draft:
            draft = super().propose(rows, length)
            return Draft(draft.tokens.to(dtype), draft.counts)

    stats = check(model, 3, Other(texts, 1.0), caplog, None)
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 0


def test_draft_model_on_another_device_that_fails(model: Any, caplog: Any) -> None:
    """A draft part of whose weights is elsewhere: its forward raises as torch does, the generation goes on."""
    draft = copy.deepcopy(model)
    message = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"

    def elsewhere(*args: Any) -> None:
        raise RuntimeError(message)

    draft.lm_head.register_forward_pre_hook(elsewhere)
    check(model, 3, DraftModel(draft), caplog, message)


def test_failure_is_told_once_a_generation_and_forgotten(model: Any, caplog: Any) -> None:
    """The next generation tries again with the same instance."""
    texts = plain_texts(model, ragged_prompts(3))
    drafter = Failing(texts, "propose", RuntimeError("once"), 1)
    for _ in range(2):
        check(model, 3, drafter, caplog, "once")
    drafter.method = "nothing"
    assert check(model, 3, drafter, caplog, None).num_accepted_draft_tokens > 0
