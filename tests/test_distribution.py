"""The sampled text has exactly the target's distribution, through the public `generate`.

A vocabulary of five makes the joint of three tokens 125 cells, which plain forwards of the target enumerate. The three
tokens are the second to the fourth: the draft of the first round stands for all three.
A chi-square test with a fixed seed compares; the same test must catch rules that are known to be biased.

Where no draft is sampled, the text is a function of the seed and of the target. Such modes and drafters are compared
token by token with decoding without a draft, which is put to the chi-square test itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import hf_specdec
from hf_specdec import Draft, Drafter, DraftModel, Hybrid, PromptLookup, SpecConfig
from hf_specdec.engine import verify
from hf_specdec.engine.rows import Rows

from . import wrong_rules
from .tiny import tiny_model


V = 5
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]  # lookup finds a match of three and more behind "3" only
PROMPTS = [PROMPT, [4], [0, 0, 0], [1, 2], [3, 1, 4, 1, 0], [2, 2, 4], [4, 3, 2, 1, 0, 4, 3, 2], [0, 1]]
N, BATCH, DRAFTED, CONTROL = 20_000, 1000, 3, 6000
RIGHT, WRONG = 1e-6, 1e-6  # p-values: above for a right rule, below for a wrong one
PLAIN = {"top_k": 0}
PROCESSED = {"temperature": 0.8, "top_k": 4, "top_p": 0.9}
PENALIZED = PROCESSED | {"repetition_penalty": 1.3}
SETTINGS: dict[str, dict[str, Any]] = {"plain": PLAIN, "processed": PROCESSED, "penalized": PENALIZED}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def models() -> tuple[Any, Any]:
    """A target and a draft that agree in part, both with several likely tokens everywhere."""
    pair = []
    for seed in (0, 1):
        model = tiny_model(seed=seed, vocab_size=V, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.15)
        pair.append(model)
    return pair[0], pair[1]


class Ragged(Drafter):
    """Drafts of random length from one fixed table, some of it zero, that has nothing to do with the target."""

    name = "ragged"
    table = torch.tensor([[0.7, 0.0, 0.0, 0.2, 0.1], [0.0, 0.1, 0.6, 0.0, 0.3], [0.2, 0.2, 0.2, 0.2, 0.2]])

    def start(self, context: Any) -> None:
        self.generator = context.generator

    def propose(self, rows: Rows, length: int) -> Draft:
        shape = (len(rows.live), length)
        q = self.table[:length].expand(shape[0], -1, -1)
        tokens = torch.multinomial(q.reshape(-1, V), 1, generator=self.generator).reshape(shape)
        counts = torch.randint(0, 3 * length, (shape[0],), generator=self.generator).clamp(max=length)
        return Draft(tokens, counts.tolist(), q)


class Adversary(Drafter):
    """Deterministic drafts that the target likes least: 0, 0, 0 and so on behind odd lengths, 4, 4, 4 behind even."""

    name = "adversary"

    def propose(self, rows: Rows, length: int) -> Draft:
        return Draft.from_lists([[4 * (len(rows.texts[row]) % 2 == 0)] * length for row in rows.live])


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "draft_model": lambda: DraftModel(models()[1]),
    "prompt_lookup": PromptLookup,
    "hybrid": lambda: Hybrid(DraftModel(models()[1]), min_match=2),
    "adversary": Adversary,
    "ragged": Ragged,
}


@cache
def joint(prompt: tuple[int, ...], settings: str) -> Tensor:
    """The target's distribution of tokens 2 to 4 behind a prompt, `[125]`, from plain forwards."""
    target, given = models()[0], SETTINGS[settings]
    processors = LogitsProcessorList()  # in the order in which `generate` applies them
    if "repetition_penalty" in given:
        processors.append(RepetitionPenaltyLogitsProcessor(given["repetition_penalty"]))
    if "temperature" in given:
        processors.append(TemperatureLogitsWarper(given["temperature"]))
        processors.append(TopKLogitsWarper(given["top_k"]))
        processors.append(TopPLogitsWarper(given["top_p"]))
    chances = torch.ones(1, dtype=torch.float64)
    for length in range(4):
        texts = torch.tensor([[*prompt, *new] for new in product(range(V), repeat=length)])
        with torch.no_grad():
            scores = processors(texts, target(texts).logits[:, -1].float())
        chances = (chances[:, None] * scores.double().softmax(-1)).flatten()
    return chances.reshape(V, -1).sum(0)


def cells(new: Tensor) -> Tensor:
    """Number of the cell of tokens 2 to 4."""
    return (new[:, 1] * V + new[:, 2]) * V + new[:, 3]


def p_value(observed: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Chi-square over several samples; cells with an expectation below 5 are pooled, smallest first."""
    statistic, freedom = 0.0, 0
    for seen, chance in zip(observed, expected, strict=True):
        counts = torch.bincount(seen, minlength=len(chance)).double()
        wanted = chance * len(seen)
        assert counts[wanted == 0].sum() == 0, "a token that the target forbids"
        order = wanted.argsort()
        pools: list[list[float]] = [[0.0, 0.0]]
        for index in order.tolist():
            if pools[-1][1] >= 5:
                pools.append([0.0, 0.0])
            pools[-1][0] += float(counts[index])
            pools[-1][1] += float(wanted[index])
        if pools[-1][1] < 5 and len(pools) > 1:
            last = pools.pop()
            pools[-1][0] += last[0]
            pools[-1][1] += last[1]
        statistic += sum((a - b) ** 2 / b for a, b in pools)
        freedom += len(pools) - 1
    return float(stats.chi2.sf(statistic, freedom))


def sample(
    drafter: Any, verification: str = "auto", settings: str = "plain", n: int = N
) -> tuple[Tensor, hf_specdec.SpecStats]:
    """The cells of `n` texts behind PROMPT, and the statistics of the last batch."""
    target, found = models()[0], []
    config = SpecConfig(drafter=drafter, num_draft_tokens=DRAFTED, draft_length="fixed", verification=verification)
    for _ in range(n // BATCH):
        output = hf_specdec.generate(
            target, torch.tensor([PROMPT]), speculative=config, do_sample=True, max_new_tokens=DRAFTED + 2,
            num_return_sequences=BATCH, **SETTINGS[settings],
        )  # fmt: skip
        found.append(cells(output[:, len(PROMPT) :]))
    statistics = hf_specdec.last_stats(target)
    assert statistics is not None
    assert statistics.fallback_reason is None
    return torch.cat(found), statistics


def p_of(seen: Tensor, settings: str = "plain") -> float:
    return p_value([seen], [joint(tuple(PROMPT), settings)])


@pytest.mark.parametrize(
    ("drafter", "verification", "settings"),
    [("draft_model", mode, settings) for mode in ("rejection", "block") for settings in ("plain", "processed")]
    + [("draft_model", "auto", "processed"), ("draft_model", "block", "penalized")]
    + [("hybrid", "block", "processed"), ("ragged", "rejection", "plain")],
)
def test_sampled_drafts_keep_the_joint_of_three_tokens(drafter: str, verification: str, settings: str) -> None:
    seen, statistics = sample(DRAFTERS[drafter](), verification, settings)
    assert p_of(seen, settings) > RIGHT
    assert statistics.sum_min_pq > 0
    assert 0 < statistics.num_accepted_draft_tokens < statistics.num_draft_tokens


@pytest.mark.parametrize(
    ("drafter", "settings"),
    [("none", "processed"), ("prompt_lookup", "plain"), ("adversary", "processed")],
)
def test_deterministic_drafts_keep_the_joint_of_three_tokens(drafter: str, settings: str) -> None:
    seen, statistics = sample(DRAFTERS.get(drafter, lambda: "none")(), "auto", settings)  # type: ignore[arg-type, return-value]
    assert p_of(seen, settings) > RIGHT
    assert (statistics.num_accepted_draft_tokens > 0) == (drafter != "none")


def test_coupled_drafts_keep_the_joint_of_three_tokens() -> None:
    seen, coupled = sample(DRAFTERS["draft_model"](), "coupled", "processed")
    assert p_of(seen, "processed") > RIGHT
    # sharing the noise makes a draft agree more often than an independent draw would
    _, rejection = sample(DRAFTERS["draft_model"](), "rejection", "processed", n=BATCH)
    independent = rejection.sum_pq / rejection.sum_min_pq * rejection.draft_acceptance_rate
    assert coupled.draft_acceptance_rate > 1.2 * independent


def texts_of(
    drafter: Any, verification: str, settings: str, seed: int = 11, length: int = 12, **inputs: Any
) -> Tensor:
    config = SpecConfig(
        drafter=drafter, num_draft_tokens=DRAFTED, draft_length="fixed", verification=verification, seed=seed
    )
    output = hf_specdec.generate(
        models()[0], speculative=config, do_sample=True, max_new_tokens=length, **inputs, **SETTINGS[settings]
    )
    statistics = hf_specdec.last_stats(models()[0])
    assert statistics is not None
    assert statistics.fallback_reason is None
    return output


@pytest.mark.parametrize("settings", ["plain", "penalized"])
@pytest.mark.parametrize(
    ("drafter", "verification"),
    [(name, mode) for name in ("prompt_lookup", "adversary") for mode in ("auto", "rejection", "block", "coupled")]
    + [("draft_model", "coupled"), ("hybrid", "coupled"), ("ragged", "coupled")],
)
def test_without_a_sampled_draft_the_text_is_a_function_of_the_seed(
    drafter: str, verification: str, settings: str
) -> None:
    inputs = {"inputs": torch.tensor([PROMPT]), "num_return_sequences": 300}
    text = texts_of(DRAFTERS[drafter](), verification, settings, **inputs)
    assert torch.equal(text, texts_of("none", "auto", settings, **inputs))
    assert not torch.equal(text, texts_of(DRAFTERS[drafter](), verification, settings, seed=12, **inputs))
    assert len(text.unique(dim=0)) > 100


def ragged_batch() -> dict[str, Tensor]:
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("drafter", "verification"),
    [
        ("draft_model", "rejection"),
        ("draft_model", "coupled"),
        ("hybrid", "rejection"),
        ("hybrid", "block"),
        ("ragged", "block"),
    ],
)
def test_a_ragged_batch_of_eight(drafter: str, verification: str) -> None:
    copies, found = 50, []
    for seed in range(8):
        output = texts_of(
            DRAFTERS[drafter](), verification, "processed", seed, 6, **ragged_batch(), num_return_sequences=copies
        )
        found.append(cells(output[:, -6:]).reshape(len(PROMPTS), copies))
    assert p_value(list(torch.cat(found, 1)), [joint(tuple(prompt), "processed") for prompt in PROMPTS]) > RIGHT


@pytest.mark.parametrize("verification", ["block", "coupled"])
def test_batches_of_exactly_eight_with_a_seed_each(verification: str) -> None:
    found = [
        cells(texts_of(DRAFTERS["draft_model"](), verification, "plain", seed, 6, **ragged_batch())[:, -6:])
        for seed in range(80)
    ]
    assert p_value(list(torch.stack(found, 1)), [joint(tuple(prompt), "plain") for prompt in PROMPTS]) > RIGHT


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_single_rows_with_a_seed_each(verification: str) -> None:
    prompt = torch.tensor([PROMPT])
    found = [
        cells(texts_of(DRAFTERS["draft_model"](), verification, "processed", seed, 6, inputs=prompt)[:, -6:])
        for seed in range(200)
    ]
    assert p_of(torch.cat(found), "processed") > RIGHT


# negative controls, through the same code: each must fail the test that the right rules pass


@pytest.mark.parametrize("rule", ["resample_from_p", "no_residual", "accept_one_more"])
def test_a_wrong_token_rule_is_caught(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setattr(verify, "accept_tokens", getattr(wrong_rules, rule))
    seen, _ = sample(DRAFTERS["ragged"](), "rejection", n=CONTROL)
    assert p_of(seen) < WRONG


def test_a_block_rule_that_stops_at_the_first_failure_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "accept_block", wrong_rules.first_failure)
    seen, _ = sample(DRAFTERS["ragged"](), "block", n=CONTROL)
    assert p_of(seen) < WRONG


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_a_residual_that_is_p_is_caught(monkeypatch: pytest.MonkeyPatch, verification: str) -> None:
    def plain_p(p: Tensor, q: Tensor, accepted: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
        return p[torch.arange(len(p)), accepted]

    monkeypatch.setattr(verify, "_residual", plain_p)
    seen, _ = sample(DRAFTERS["draft_model"](), verification, n=CONTROL)
    assert p_of(seen) < WRONG


class Lying(DraftModel):
    """Says another distribution than the one it sampled from."""

    def __init__(self, temperature: float) -> None:
        super().__init__(models()[1])
        self.temperature = temperature

    def _choose(self, logits: Tensor, rows: Rows, drafted: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        token, q, sound = super()._choose(logits, rows, drafted)
        assert q is not None
        q = q ** (1 / self.temperature)
        return token, q / q.sum(-1, keepdim=True), sound


class Greedy(DraftModel):
    """Drafts the most likely token and says that it was sampled."""

    def _choose(self, logits: Tensor, rows: Rows, drafted: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        _, q, sound = super()._choose(logits, rows, drafted)
        assert q is not None
        return q.argmax(-1), q, sound


class Dropping(DraftModel):
    """Drops the first token it finds unlikely after having drawn it."""

    def propose(self, rows: Rows, length: int) -> Draft:
        draft = super().propose(rows, length)
        if draft.probs is None:
            return draft
        sure = draft.probs.gather(2, draft.tokens[..., None]).squeeze(2) > 0.25
        counts = torch.minimum(sure.long().cumprod(-1).sum(-1), torch.tensor(draft.counts)).tolist()
        return Draft(draft.tokens, counts, draft.probs)


@pytest.mark.parametrize(
    ("liar", "verification"),
    [
        (lambda: Lying(1.6), "rejection"),
        (lambda: Lying(1.6), "block"),
        (lambda: Greedy(models()[1]), "rejection"),
        (lambda: Dropping(models()[1]), "block"),
    ],
    ids=["other temperature, rejection", "other temperature, block", "argmax draft", "drop after looking"],
)
def test_a_draft_that_says_a_wrong_q_is_caught(liar: Callable[[], Drafter], verification: str) -> None:
    seen, _ = sample(liar(), verification, n=CONTROL)
    assert p_of(seen) < WRONG
