"""The statistical check: honest runs pass, planted faults fail, and the tests hold the level and the power they claim."""

from __future__ import annotations

import json
import math
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch

import hf_specdec
from hf_specdec import PromptLookup, SpecConfig, SpecDecError
from hf_specdec.check.evidence import DRAFT, OFFERED, TOP, Evidence, Place, places, rounds_are_free
from hf_specdec.check.sampled import SampledResult, check_sampled
from hf_specdec.check.significance import Moments, StatisticalTest, judged, smallest_shift, z_test
from hf_specdec.stats import StepEvent

from . import faults
from .tiny_pair import PROMPTS, tiny_pair


pytestmark = pytest.mark.usefixtures("one_thread")
QUICK: dict[str, Any] = {"tokens": 1000, "batch_size": 16, "max_new_tokens": 64}


def checked(
    drafter: Any = "draft_model", verification: str = "auto", dtype: Any = torch.float32, seed: int = 0, **changes: Any
) -> SampledResult:
    loaded, draft = tiny_pair(dtype)
    config = SpecConfig(
        drafter=drafter, draft_model=draft if drafter in ("draft_model", "hybrid") else None, num_draft_tokens=4,
        draft_length="fixed", verification=verification,
    )  # fmt: skip
    return check_sampled(loaded, PROMPTS, config, seed=seed, **(QUICK | changes))


@pytest.mark.parametrize(
    ("drafter", "verification", "changes"),
    [
        ("draft_model", "block", {}),
        ("draft_model", "rejection", {}),
        ("draft_model", "coupled", {}),
        ("draft_model", "rejection", {"batch_size": 1, "tokens": 500}),
        ("draft_model", "block", {"temperature": 0.6}),
        ("draft_model", "block", {"dtype": torch.bfloat16}),
        ("hybrid", "block", {}),
        ("hybrid", "rejection", {"temperature": 0.6}),
        ("prompt_lookup", "auto", {"temperature": 0.6}),
        ("recycling", "auto", {}),
    ],
)
def test_ten_honest_runs_pass(drafter: str, verification: str, changes: dict[str, Any]) -> None:
    found = checked(drafter, verification, **changes)
    assert (found.verdict, found.reasons, found.rerun) == ("pass", (), False)
    assert found.tokens >= changes.get("tokens", QUICK["tokens"])
    assert 0 < found.num_accepted_draft_tokens < found.num_draft_tokens
    names = [test.name for test in found.tests]
    assert {TOP, "surprise (z)", "PIT by id (KS)", "PIT by probability (KS)"} <= set(names)
    assert (DRAFT in names) == (drafter in ("draft_model", "hybrid"))
    assert (OFFERED in names) == (drafter != "draft_model")
    assert ("later in a round (z)" in names) == (verification != "block")
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["verdict"] == "pass"


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("fault", faults.SAMPLED.values(), ids=faults.SAMPLED.keys())
def test_planted_faults_of_sampling_fail(fault: Any, verification: str) -> None:
    with fault():
        found = checked(verification=verification)
    assert (found.verdict, found.rerun) == ("fail", True)
    assert found.tokens >= QUICK["tokens"]
    assert len(found.reasons) == sum(not test.passed for test in found.tests) > 0


@pytest.mark.parametrize("fault", faults.BOTH.values(), ids=faults.BOTH.keys())
def test_planted_faults_of_the_cache_and_of_ids_fail(fault: Any) -> None:
    with fault():
        assert checked().verdict == "fail"


def test_a_draft_that_reads_other_ids_is_only_slow() -> None:
    """What it guesses is worth less, but the rule makes up for any guess."""
    loaded, draft = tiny_pair()
    size = draft.config.vocab_size
    shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(0))

    class Other(hf_specdec.DraftModel):
        def _unseen(self, texts: Any, seen: Any) -> list[list[int]]:
            return [[int(shuffled[token]) for token in row] for row in super()._unseen(texts, seen)]

    config = SpecConfig(drafter=Other(draft), num_draft_tokens=4, draft_length="fixed")
    found = check_sampled(loaded, PROMPTS, config, **QUICK)
    assert found.verdict == "pass"
    assert found.num_accepted_draft_tokens < 0.3 * found.num_draft_tokens


def test_an_adaptive_length_is_checked_with_a_fixed_one_in_turns() -> None:
    loaded, draft = tiny_pair()
    seen: list[Any] = []
    generate = hf_specdec.generate

    def noted(*arguments: Any, **options: Any) -> Any:
        seen.append(options["speculative"])
        return generate(*arguments, **options)

    with patch.object(hf_specdec, "generate", noted):
        check_sampled(loaded, PROMPTS, SpecConfig(draft_model=draft), **QUICK | {"tokens": 1025})
    assert [config.draft_length for config in seen] == ["fixed", "adaptive"]
    assert seen[0].seed != seen[1].seed
    assert seen[0].num_draft_tokens == 5


def test_too_few() -> None:
    few = checked(tokens=100, batch_size=2)
    assert (few.verdict, few.passed) == ("too few tokens", False)
    assert "500 are needed" in few.reasons[0]
    nothing = checked("none", tokens=500)
    assert nothing.verdict == "too few tokens"
    assert "0 draft tokens were verified" in nothing.reasons[0]
    sure = checked("draft_model", temperature=0.001)
    assert sure.verdict == "too few tokens"
    assert "nearly certain" in sure.reasons[0]


def test_wrong_arguments() -> None:
    loaded, _ = tiny_pair()
    with pytest.raises(SpecDecError, match="`temperature` must be above 0, got 0"):
        check_sampled(loaded, PROMPTS, SpecConfig(), temperature=0)
    with pytest.raises(SpecDecError, match="no prompts"):
        check_sampled(loaded, [], SpecConfig())
    with patch.dict(sys.modules, {"scipy": None}), pytest.raises(SpecDecError, match=r"hf-specdec\[check\]"):
        check_sampled(loaded, PROMPTS, SpecConfig())


def test_a_second_look_acquits() -> None:
    """Chance may fail a first look; the second is fresh."""
    from hf_specdec.check import sampled

    looks: list[int] = []

    def unlucky(tests: Any) -> Any:
        looks.append(1)
        return judged(tests, alpha=1e9 if len(looks) == 1 else 0.01)

    with patch.object(sampled, "judged", unlucky):
        found = checked(tokens=250)
    assert (found.verdict, found.rerun, len(looks)) == ("pass", True, 2)
    assert found.tokens >= 1000


# the statistics alone


def test_holm() -> None:
    def of(*values: float) -> list[bool]:
        return [test.passed for test in judged([StatisticalTest("", 0, value, 1) for value in values])]

    assert of(0.2, 0.004, 0.003) == [True, False, False]  # 0.01 / 3, then 0.01 / 2
    assert of(0.004, 0.004, 0.004) == [True, True, True]
    assert of(math.nan, 0.5) == [False, True]


def test_z_is_corrected_for_skewness() -> None:
    # 200 events of chance 0.05: a Poisson-like sum whose upper tail is heavier than the normal one's
    n, chance = 200, 0.05
    variance = chance * (1 - chance)
    from scipy import stats

    for hits in (20, 3):
        moments = Moments(n, hits - n * chance, n * variance, n * variance * (1 - 2 * chance))
        exact = 2 * min(stats.binom.sf(hits - 1, n, chance), stats.binom.cdf(hits, n, chance))
        assert moments.testable
        assert z_test("", moments).p_value == pytest.approx(exact, rel=0.6)
    assert not Moments(3, 0.0, 3 * variance, 3 * variance * 0.9).testable
    assert not Moments(3, 0.0, 0.0, 0.0).testable


def synthetic(seed: int, shift: float = 0.0, texts: int = 4, length: int = 240, vocabulary: int = 30) -> Evidence:
    """Tokens drawn from random distributions; with a shift, that much more often the draft's choice."""
    generator = torch.Generator().manual_seed(seed)
    evidence = Evidence(False, True, generator)
    for _ in range(texts):
        scores = 2.0 * torch.randn(length, vocabulary, generator=generator)
        draft = scores + torch.randn(length, vocabulary, generator=generator)
        p = scores.softmax(-1)
        p[torch.arange(length), draft.argmax(-1)] += shift
        tokens = torch.multinomial(p / p.sum(-1, keepdim=True), 1, generator=generator).squeeze(1).tolist()
        where = [Place(index % 3, (index % vocabulary,) if index % 2 else ()) for index in range(length)]
        evidence.add(scores, tokens, where, draft)
    return evidence


def test_the_level_holds() -> None:
    """Of 100 samples one per cent may fail: more than 6 do so in one of 10 000 cases."""
    failed = sum(not all(test.passed for test in judged(synthetic(seed).tests())) for seed in range(100))
    assert failed <= 6
    assert len(synthetic(0).tests()) == 12


def test_the_power_is_what_is_said() -> None:
    evidence = synthetic(0)
    share = evidence.power()["draft_share"]
    assert share is not None
    assert share == smallest_shift(evidence.sums[DRAFT], len(evidence.tests()))
    # p + shift, normalised, is a shift of the emitted share by (1 − p) · shift / (1 + shift)
    mean = 1 - float(torch.tensor([(2.0 * torch.randn(30) + 0).softmax(-1).max() for _ in range(500)]).mean())
    shift = share / mean / (1 - share / mean)
    found = sum(not all(test.passed for test in judged(synthetic(seed, shift).tests())) for seed in range(100, 140))
    assert found >= 29  # 36 expected


def test_tokens_that_cannot_be() -> None:
    evidence = Evidence(False, True, torch.Generator().manual_seed(0))
    scores = torch.zeros(40, 5)
    scores[:, 4] = -math.inf
    text = [index % 4 for index in range(40)]
    evidence.add(scores, text, [Place()] * 40, None)
    assert evidence.forbidden == 0
    evidence.add(scores, [4, 9, *text[2:]], [Place()] * 40, None)
    assert (evidence.forbidden, evidence.tokens) == (2, 80)
    assert not next(test for test in judged(evidence.tests()) if test.name.startswith("forbidden")).passed


def test_places() -> None:
    events = [
        StepEvent(0, (0, 1), ((), ()), (0, 0), ((5,), (6,)), ("none", "none"), 0.0),
        StepEvent(1, (0, 1), ((7, 8), (1, 2, 3)), (1, 0), ((7, 9), (4,)), ("prompt_lookup", "recycling"), 0.0),
        StepEvent(2, (0,), ((3,),), (1,), ((3, 4),), ("draft_model",), 0.0),
    ]
    first, second = places(events, [5, 2])
    assert first == [Place(), Place(0, (7,)), Place(1, (8,)), Place(0), Place(1)]
    assert second == [Place(), Place(0, (1, 2, 3))]
    assert places([], [2]) == [[Place(), Place()]]


def test_which_rounds_may_be_cut_open() -> None:
    draft = object()
    assert rounds_are_free(SpecConfig(verification="rejection"), draft)
    assert rounds_are_free(SpecConfig(drafter="prompt_lookup"), None)
    assert not rounds_are_free(SpecConfig(), draft)
    assert not rounds_are_free(SpecConfig(drafter=PromptLookup()), None)
