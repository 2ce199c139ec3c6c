"""The predicted speed-up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_specdec.selection import ranking
from hf_specdec.selection.candidates import ModelFacts
from hf_specdec.selection.catalog import load_catalog


def model(active: float, layers: int = 32, output: float = 0.0, **fields: float) -> ModelFacts:
    return ModelFacts(
        "org/name", "llama", int(active), int(active), layers, 32000, 1000, output_parameters=int(output), **fields
    )  # type: ignore[arg-type]


def known(id: str) -> ModelFacts:
    member = load_catalog().member(id)
    assert member is not None
    return member.facts


def test_leviathan_without_overheads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theorem 3.8 of arXiv 2211.17192: (1 − α^(γ+1)) / ((1 − α)(γc + 1))."""
    monkeypatch.setattr(ranking, "EXTRA_TOKEN", 0.0)
    found = ranking.predict(model(1e9), model(1e8), acceptance=0.8, overhead=0.0)
    c, k = found.cost, found.num_draft_tokens
    by_hand = {g: (1 - 0.8 ** (g + 1)) / (0.2 * (g * c + 1)) for g in range(1, ranking.MOST_DRAFT_TOKENS + 1)}
    assert found.speedup == pytest.approx(max(by_hand.values()))
    assert k == max(by_hand, key=lambda g: by_hand[g])


def test_perfect_draft() -> None:
    found = ranking.predict(model(1e10), model(1e7, layers=1), acceptance=1.0)
    assert found.num_draft_tokens == ranking.MOST_DRAFT_TOKENS
    assert found.speedup > 6


@pytest.mark.parametrize(
    ("target", "draft", "measured"),
    [("HuggingFaceTB/SmolLM2-360M", "HuggingFaceTB/SmolLM2-135M", 0.475)],
)
def test_step_cost_is_near_what_was_measured(target: str, draft: str, measured: float) -> None:
    assert ranking.step_cost(known(target), known(draft)) == pytest.approx(measured, rel=0.1)


def test_step_cost_of_parts() -> None:
    """Two layers of SmolLM2-135M with its output layer took .19 of its step, one layer with 8192 rows .058."""
    whole = known("HuggingFaceTB/SmolLM2-135M")
    layer = (whole.active_parameters - whole.output_parameters) // whole.layers
    two = replace(whole, active_parameters=2 * layer + whole.output_parameters, layers=2)
    one = replace(whole, active_parameters=layer + 8192 * 576, layers=1)
    assert ranking.step_cost(whole, two) == pytest.approx(0.19, abs=0.05)
    assert ranking.step_cost(whole, one) == pytest.approx(0.058, abs=0.015)


def test_output_layer_counts() -> None:
    target = known("Qwen/Qwen2.5-7B")
    draft = known("Qwen/Qwen2.5-0.5B")
    body = replace(draft, active_parameters=draft.active_parameters - draft.output_parameters)
    assert ranking.step_cost(target, draft) > ranking.step_cost(target, body)


def test_drafts_are_dearer_for_quantised_targets() -> None:
    """What counts are the bytes that a step reads, so a draft of 2 bytes a weight is three to four times as dear."""
    target, draft = known("Qwen/Qwen3-4B"), known("Qwen/Qwen3-0.6B")
    packed = replace(target, bits=4.25)
    ratio = draft.active_parameters / target.active_parameters
    assert ranking.step_cost(packed, draft) > 3 * (1 - ranking.LAYER_SHARE) * ratio
    assert ranking.cannot_pay(target, draft, ranking.predict(target, draft)) is None
    assert "4.02 B of 4.25 bits" in (ranking.cannot_pay(packed, draft, ranking.predict(packed, draft)) or "")


def test_experts_make_verification_dear() -> None:
    dense, sparse = known("Qwen/Qwen3-8B"), known("Qwen/Qwen3-30B-A3B")
    assert ranking.forward_cost(dense, 1) == ranking.forward_cost(sparse, 1) == 1
    assert ranking.forward_cost(dense, 4) == pytest.approx(1.06)
    # batch-1 speed-ups of half the tokens a step are what others measure on mixtures of experts
    assert 1.5 < ranking.forward_cost(sparse, 4) < 2.2


def test_acceptance_prior() -> None:
    target = model(10e9)
    tenth = ranking.usual_acceptance(target, model(1e9))
    assert tenth == pytest.approx(0.7)
    assert ranking.usual_acceptance(target, model(4e9)) > tenth > ranking.usual_acceptance(target, model(0.25e9))
    assert ranking.usual_acceptance(target, model(1e9), same_kind=False) < tenth
    assert 0.5 <= ranking.usual_acceptance(target, model(1e3)) < 0.6
    # measured: 2.28 tokens a step of Vicuna-7B with a draft of 68 M
    assert ranking.usual_acceptance(known("lmsys/vicuna-7b-v1.5"), known("double7/vicuna-68m")) == pytest.approx(
        0.58, abs=0.03
    )


def test_what_cannot_pay() -> None:
    target, draft = known("HuggingFaceTB/SmolLM2-360M"), known("HuggingFaceTB/SmolLM2-135M")
    reason = ranking.cannot_pay(target, draft, ranking.predict(target, draft))
    assert reason is not None
    for number in ("135 M", "134 M"):
        if number in reason:
            break
    else:
        pytest.fail(reason)
    assert "0.47" in reason
    assert "32" in reason
    small = ranking.predict(model(1e9), model(2e8), acceptance=0.2)
    reason = ranking.cannot_pay(model(1e9), model(2e8), small)
    assert reason is not None
    assert "20%" in reason
    assert f"{small.speedup:.2f}×" in reason
    pays = ranking.predict(model(1e10), model(1e8))
    assert ranking.cannot_pay(model(1e10), model(1e8), pays) is None


def test_float32_on_a_cpu_is_harder() -> None:
    target, draft = known("meta-llama/Llama-3.2-3B"), known("meta-llama/Llama-3.2-1B")
    usual = ranking.predict(target, draft)
    slow = ranking.predict(target, draft, overhead=ranking.FLOAT32_ON_CPU)
    assert ranking.cannot_pay(target, draft, usual) is None
    assert ranking.cannot_pay(target, draft, slow) is not None


def test_memory() -> None:
    draft = known("Qwen/Qwen3-0.6B")
    weights = 2 * draft.parameters
    assert ranking.memory_bytes(draft, context=0) == weights
    assert ranking.memory_bytes(draft, context=10, rows=3) == weights + 2 * 2 * 28 * 8 * 128 * 10 * 3
    assert ranking.memory_bytes(draft, context=0, dtype="float32") == 2 * weights
    assert ranking.size(596e6) == "596 M"
    assert ranking.size(8.19e9) == "8.19 B"
