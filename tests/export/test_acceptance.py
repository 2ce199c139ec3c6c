"""What acceptance measured here means elsewhere: which family, and which figures."""

from __future__ import annotations

from typing import Any

import pytest

from hf_specdec.export import Setup, export
from hf_specdec.export.acceptance import FAMILIES, Prediction, predict


def report(**changes: Any) -> dict[str, Any]:
    """The part of a check's report that is looked at."""
    acceptance = {
        "drafter": "draft_model",
        "per_position": [0.8, 0.5],
        "sampled": {"temperature": 1.0},
        "families": {"A1": 0.6, "A2": 0.7, "B1": 0.61, "B2": 0.4},
    }
    return {"acceptance": acceptance | changes}


def predicted(
    engine: str, record: Any, temperature: float = 0.0, method: str = "draft_model", tokens: int | None = 2,
    version: str | None = None, **changes: Any,
) -> Prediction:  # fmt: skip
    setup = Setup(
        target="T", draft="X" if method == "draft_model" else None, method=method, num_draft_tokens=tokens,
        temperature=temperature,
    )  # fmt: skip
    return predict(export(engine, setup, version=version, **changes), setup, record)


def test_greedy_figures_hold_everywhere() -> None:
    for engine in ("vllm", "llama-cpp", "sglang", "mlx-lm", "tensorrt-llm", "openvino", "transformers"):
        found = predicted(engine, report())
        assert found.family == "greedy"
        assert found.mean_acceptance_length == pytest.approx(1 + 0.8 + 0.8 * 0.5)
        assert found.draft_acceptance_rate == pytest.approx((0.8 + 0.4) / 2)
        assert found.reason is None


def test_the_length_counts() -> None:
    found = predicted("vllm", report(), tokens=1)
    assert found.mean_acceptance_length == pytest.approx(1.8)
    assert found.draft_acceptance_rate == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("engine", "version", "family", "chance"),
    [
        ("vllm", "0.16.0", "A1", 0.6),
        ("vllm", "0.33.0", "A2", 0.7),  # drafts are sampled there
        ("sglang", None, "A1", 0.6),
        ("llama-cpp", None, "B1", 0.61),
        ("tensorrt-llm", None, "B1", 0.61),
        ("mlx-lm", None, "B2", 0.4),
        ("transformers", None, "A2", 0.7),
        ("custom-generate", None, "here", 0.7),
    ],
)
def test_sampling_by_family(engine: str, version: str | None, family: str, chance: float) -> None:
    found = predicted(engine, report(), temperature=1.0, version=version)
    assert found.family == family
    assert found.rule == FAMILIES[family]
    assert found.mean_acceptance_length == pytest.approx(1 + chance + chance**2)
    assert found.draft_acceptance_rate == pytest.approx((chance + chance**2) / 2)


def test_another_temperature_is_said() -> None:
    assert "measured at temperature 1, not 0.7" in str(predicted("vllm", report(), temperature=0.7).reason)


def test_other_drafts_are_said() -> None:
    lookup = report(drafter="prompt_lookup")
    assert "upper bound" in str(predicted("tgi", lookup, method="prompt_lookup").reason)
    assert "its own way" in str(predicted("vllm", lookup, method="prompt_lookup").reason)
    assert "hybrid" in str(predicted("vllm", report(drafter="hybrid")).reason)


@pytest.mark.parametrize(
    ("record", "temperature", "reason"),
    [
        (None, 0.0, "not measured"),
        ({"acceptance": None}, 0.0, "no acceptance by position"),
        (report(per_position=[]), 0.0, "no acceptance by position"),
        (report(families={"A1": None, "A2": None, "B1": None, "B2": None}, sampled=None), 1.0, "no sampled part"),
    ],
)
def test_no_figures_without_measurements(record: Any, temperature: float, reason: str) -> None:
    found = predicted("vllm", record, temperature)
    assert found.draft_acceptance_rate is None
    assert reason in str(found.reason)


def test_no_figures_where_the_rule_is_unknown() -> None:
    found = predicted("openvino", report(), temperature=1.0)
    assert found.family is None
    assert found.draft_acceptance_rate is None
    assert predicted("vllm", report(), temperature=1.0, other_sizes=True).family is None
