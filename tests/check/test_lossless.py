"""The greedy check: honest runs pass, planted faults fail, and a near-tie doesn't hide what comes behind it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hf_specdec import SpecConfig, SpecDecError
from hf_specdec.check import lossless
from hf_specdec.check.lossless import FirstDifference, GreedyResult, _Findings, check_greedy
from hf_specdec.tools.differences import Difference
from hf_specdec.tools.loading import LoadedModel
from hf_specdec.tools.suites import BenchPrompt

from . import faults
from .tiny_pair import PROMPTS, tiny_pair


pytestmark = pytest.mark.usefixtures("one_thread")


def checked(
    drafter: str | None = "draft_model", batch_size: int = 1, dtype: Any = torch.float32, **changes: Any
) -> Any:
    loaded, draft = tiny_pair(dtype)
    settings: dict[str, Any] = {"num_draft_tokens": 4, "draft_length": "fixed"} | changes
    config = SpecConfig(
        drafter=drafter, draft_model=draft if drafter in ("draft_model", "hybrid") else None, **settings
    )
    return check_greedy(loaded, PROMPTS[:4], config, max_new_tokens=24, batch_size=batch_size)


@pytest.mark.parametrize(
    ("drafter", "batch_size", "changes"),
    [
        ("draft_model", 1, {}),
        ("draft_model", 4, {}),
        ("prompt_lookup", 3, {}),
        ("recycling", 1, {}),
        ("hybrid", 2, {"num_draft_tokens": None, "draft_length": "adaptive"}),
    ],
)
def test_honest_runs_are_exact(drafter: str, batch_size: int, changes: dict[str, Any]) -> None:
    found = checked(drafter, batch_size, **changes)
    assert (found.verdict, found.reasons, found.passed) == ("exact", (), True)
    assert (found.texts, found.same, found.ties, found.near_ties, found.mismatches) == (4, 4, 0, 0, 0)
    assert (found.tokens, found.wrong) == (4 * 24, 0)
    assert found.worst_gap == found.plain_worst_gap <= found.band
    assert 0 < found.num_accepted_draft_tokens < found.num_draft_tokens
    assert json.loads(json.dumps(found.to_dict()))["verdict"] == "exact"


def test_half_precision_may_have_near_ties() -> None:
    found = checked(dtype=torch.bfloat16)
    assert found.verdict in ("exact", "near-tie")
    assert (found.dtype, found.wrong, found.mismatches) == ("bfloat16", 0, 0)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("fault", faults.BOTH.values(), ids=faults.BOTH.keys())
def test_planted_faults_fail(fault: Any, batch_size: int) -> None:
    with fault():
        found = checked(batch_size=batch_size)
    assert found.verdict == "fail"
    assert found.mismatches > 0
    assert found.wrong > 0
    assert found.worst_gap is None or found.worst_gap > 10 * found.band
    assert "rounding" in found.reasons[0]
    assert {each.kind for each in found.first_differences} >= {"mismatch"}
    json.dumps(found.to_dict(), allow_nan=False)


def test_processors_count() -> None:
    """A penalty makes the target choose what isn't the argmax of its raw logits."""
    loaded, _ = tiny_pair()
    with patch.object(loaded.model.generation_config, "repetition_penalty", 1.5):
        found = checked()
    assert (found.verdict, found.off_argmax, found.wrong) == ("exact", 0, 0)


def test_nothing_drafted_says_so() -> None:
    found = checked("none")
    assert (found.verdict, found.num_draft_tokens) == ("exact", 0)
    assert found.reasons == ("No draft token was verified, so nothing was checked.",)
    loaded, draft = tiny_pair()
    with patch.object(type(loaded.model), "_supports_attention_backend", False):
        found = checked()
    assert "takes no prepared mask" in found.reasons[0]


def test_no_prompts() -> None:
    with pytest.raises(SpecDecError, match="no prompts"):
        check_greedy(tiny_pair()[0], [], SpecConfig())


class FixedLogits:
    """A model that says the same logits everywhere."""

    device = torch.device("cpu")
    generation_config = SimpleNamespace(pad_token_id=0, eos_token_id=None)

    def __init__(self, logits: list[float], dtype: torch.dtype) -> None:
        self.row, self.dtype = torch.tensor(logits), dtype

    def forward(self) -> None: ...

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=self.row, parameters=lambda: iter([self.row]))

    def generate(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return ids

    def __call__(self, input_ids: torch.Tensor, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.row.expand(*input_ids.shape, -1))


def compared(logits: list[float], off: list[int], on: list[int], dtype: torch.dtype = torch.bfloat16) -> GreedyResult:
    """The verdict on two given texts."""
    loaded = LoadedModel("fixed", FixedLogits(logits, dtype), SimpleNamespace(pad_token_id=0))
    runs = [SimpleNamespace(tokens=(tuple(text),), stats=None) for text in (off, on)]
    with (
        patch.object(lossless, "decode", side_effect=runs),
        patch.object(lossless, "encoded", return_value=[torch.tensor([1, 2])]),
    ):
        return check_greedy(loaded, [BenchPrompt("one", "own", "?")], SpecConfig(draft_length="fixed"))


def test_a_near_tie_hides_nothing_behind_it() -> None:
    near = compared([12.0, 11.99, 0.0], [0, 0, 0], [1, 0, 1])
    assert (near.verdict, near.near_ties, near.off_argmax, near.wrong) == ("near-tie", 1, 2, 0)
    assert near.worst_gap == pytest.approx(0.01, abs=1e-4)
    later = compared([12.0, 11.99, 0.0], [0, 0, 0], [1, 0, 2])
    assert (later.verdict, later.near_ties, later.mismatches, later.wrong) == ("fail", 1, 0, 1)
    assert later.worst_gap == 12.0
    assert later.plain_worst_gap == 0.0


def judged(dtype: torch.dtype, plain_gap: float, gap: float) -> GreedyResult:
    """The verdict where plain decoding's own token and speculation's are so far below the highest logit (band 0.1)."""
    found = _Findings()
    found._add_plain([(plain_gap, 0.1)])
    found.gaps, found.worst, found.texts, found.tokens = [(gap, 0.1)], (gap, 0.1), 1, 1
    found.differences = [FirstDifference("one", "mismatch", Difference(0, 1, 2, gap=gap, band=0.1, apart=gap))]
    return found.result(SimpleNamespace(dtype=dtype), 1)


def test_rounding_that_plain_decoding_shows_is_no_fault() -> None:
    """In half precision the band stretches to what two plain passes over one text differ by, and no further."""
    alike = judged(torch.bfloat16, 0.3, 0.29)
    assert (alike.verdict, alike.near_ties, alike.off_argmax, alike.wrong) == ("near-tie", 1, 1, 0)
    assert alike.band == pytest.approx(0.3)
    assert judged(torch.bfloat16, 0.3, 0.31).verdict == "fail"
    assert judged(torch.bfloat16, 0.0, 0.11).verdict == "fail"
    assert judged(torch.bfloat16, 0.0, 0.09).verdict == "near-tie"
    assert judged(torch.bfloat16, 5.0, 0.41).verdict == "fail"  # a broken forward excuses nothing
    assert judged(torch.float32, 0.3, 0.29).verdict == "fail"


def test_a_text_that_is_plain_decodings_own_is_exact() -> None:
    """Both sides say a token that one pass over the text is 0.2 off: speculation did nothing to it."""
    same = compared([12.0, 11.8, 0.0], [1, 0], [1, 0])
    assert (same.verdict, same.wrong, same.off_argmax) == ("exact", 0, 1)
    assert same.worst_gap == same.plain_worst_gap == pytest.approx(0.2, abs=1e-4)


def test_float32_must_be_equal_but_for_ties() -> None:
    near = compared([12.0, 11.99999, 0.0], [0, 0], [1, 0], torch.float32)
    assert (near.verdict, near.near_ties, near.wrong) == ("fail", 1, 0)
    assert "must be equal" in near.reasons[0]
    tie = compared([12.0, 12.0, 0.0], [0, 0], [1, 0], torch.float32)
    assert (tie.verdict, tie.ties, tie.off_argmax) == ("near-tie", 1, 0)


def test_a_text_that_ends_early_or_says_no_token_fails() -> None:
    assert compared([12.0, 0.0], [0, 0, 0], [0, 0]).verdict == "fail"
    unknown = compared([12.0, 0.0], [0, 0], [0, 7])
    assert (unknown.verdict, unknown.mismatches, unknown.wrong, unknown.worst_gap) == ("fail", 1, 1, None)
    assert compared([float("nan"), 0.0], [0], [0]).verdict == "fail"


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    loaded, _ = tiny_pair()
    check_greedy(
        loaded, PROMPTS[:3], SpecConfig(drafter="prompt_lookup"), max_new_tokens=4, batch_size=2,
        tell=lambda title, done, total: told.append((done, total)),
    )  # fmt: skip
    assert told == [(0, 3), (2, 3), (3, 3)]
