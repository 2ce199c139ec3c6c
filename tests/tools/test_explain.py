"""What `explain` puts together, and what it reads from reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_specdec import SpecDecError
from hf_specdec.tools.explain import Conditions, explain
from hf_specdec.tools.gain import speedup
from hf_specdec.tools.measured import conditions_of, read_record

from .test_plots import made_up_report


def test_best_and_chosen_length() -> None:
    found = explain(Conditions(0.7, 0.1, batch=8), num_draft_tokens=5)
    assert [each.num_draft_tokens for each in found.lengths] == list(range(17))
    assert found.lengths[0].speedup == 1.0
    assert found.best.speedup == max(each.speedup for each in found.lengths)
    assert found.chosen is not None
    assert found.chosen.speedup == pytest.approx(speedup(0.7, 5, 0.1, batch=8, overhead=0.05))
    assert found.pays
    assert [each.num_draft_tokens for each in explain(Conditions(0.7, 0.1), num_draft_tokens=20).lengths][-1] == 20


def test_nothing_pays() -> None:
    found = explain(Conditions(0.2, 0.5))
    assert not found.pays
    assert found.best.num_draft_tokens == 0
    assert found.break_even_acceptance == pytest.approx(0.57)
    assert explain(Conditions(0.9, 2.0)).break_even_acceptance is None


def test_what_limits() -> None:
    assert next(iter(explain(Conditions(0.5, 0.02)).limits)) == "rejections"
    assert next(iter(explain(Conditions(0.95, 0.6)).limits)) == "draft"
    assert next(iter(explain(Conditions(0.95, 0.01, 0.5)).limits)) == "verification"
    assert next(iter(explain(Conditions(0.3, 0.0, 0.0, overhead=0.5)).limits)) in ("rejections", "overhead")


def test_regions_grow_with_acceptance_and_shrink_with_the_gain_wanted() -> None:
    regions = explain(Conditions(0.65, 0.1)).regions
    assert 0.65 in [each.acceptance for each in regions]
    for wanted in (1.0, 1.5):
        costs = [-1.0 if (cost := each.dearest[wanted]) is None else cost for each in regions]
        assert costs == sorted(costs)
    for region in regions:
        costs = [-1.0 if cost is None else cost for cost in region.dearest.values()]
        assert costs == sorted(costs, reverse=True)
        if (cost := region.dearest[1.5]) is not None:
            at_limit = explain(Conditions(region.acceptance, cost)).best.speedup
            assert at_limit == pytest.approx(1.5)


def test_large_batches_lose() -> None:
    batches = explain(Conditions(0.7, 0.1)).batches
    gains = [each.speedup for each in batches]
    assert gains == sorted(gains, reverse=True)
    assert batches[-1].num_draft_tokens == 0
    assert explain(Conditions(0.7, 0.1, (1.0, 1.1, 1.3))).batches == ()  # known at one batch size alone
    known = explain(Conditions(0.7, 0.1, {8: 1.0, 16: 1.1, 64: 2.0}, batch=8)).batches
    assert [each.batch for each in known] == [8, 16, 32]


def test_as_json() -> None:
    for conditions in (Conditions(0.7, 0.1), Conditions((0.8, 0.6), 0.1, {1: 1.0, 4: 1.2}), Conditions(0.0, 0.0)):
        data = json.loads(json.dumps(explain(conditions).to_dict(), allow_nan=False))
        assert data["schema_version"] == 1
        assert data["kind"] == "explain"
        assert {"speedup", "cost"} == set(data["regions"][0]["dearest_draft"][0])


class TestReports:
    def bench(self, tmp_path: Path, **changes: Any) -> Path:
        path = tmp_path / "results.json"
        path.write_text(json.dumps(made_up_report().to_dict() | changes))
        return path

    def check(self, tmp_path: Path, **changes: Any) -> Path:
        path = tmp_path / "check.json"
        record = {
            "schema_version": 1, "kind": "check", "target": {"name": "org/Model"}, "draft": "org/Small",
            "drafter": "draft_model",
            "acceptance": {
                "draft_acceptance_rate": 0.6, "mean_acceptance_length": 3.0, "per_position": [0.8, 0.75, 0.7],
                "num_draft_tokens": 3, "steps_by_source": {"draft_model": 90, "none": 10},
            },
            "costs": {"1": {"plain_step": 0.05, "draft_step": 0.01, "forward": {"1": 0.04, "2": 0.05, "4": 0.06}}},
        }  # fmt: skip
        path.write_text(json.dumps(record | changes))
        return path

    def test_benchmark(self, tmp_path: Path) -> None:
        record = read_record(self.bench(tmp_path))
        for summary in record["summaries"]:
            if summary["acceptance_by_position"]:
                summary["acceptance_by_position"][4] = [3, 3]  # too few tries to say anything
        found, origin = conditions_of(record, batch=8)
        assert found["acceptance"] == pytest.approx((20 / 30, 16 / 20, 13 / 15, 10 / 12))
        assert found["batch"] == 8
        assert found["share"] == pytest.approx(0.75)
        assert found["draft_cost"] == 0.0  # copied text
        assert found["verify_cost"][8] == 1.0
        assert found["verify_cost"][16] == pytest.approx((0.03 + 0.004 * 16) / (0.03 + 0.004 * 8))
        assert "prompt_lookup" in origin
        explain(Conditions(**found))

    def test_benchmark_method(self, tmp_path: Path) -> None:
        record = read_record(self.bench(tmp_path))
        assert "recycling" in conditions_of(record, method="recycling")[1]
        with pytest.raises(SpecDecError, match="no method 'crystal_ball'; there are prompt_lookup"):
            conditions_of(record, method="crystal_ball")
        with pytest.raises(SpecDecError, match="Batch 3 wasn't measured; there are 1, 8"):
            conditions_of(record, batch=3)

    def test_check(self, tmp_path: Path) -> None:
        found, origin = conditions_of(read_record(self.check(tmp_path)))
        assert found["acceptance"] == (0.8, 0.75, 0.7)
        assert found["draft_cost"] == pytest.approx(0.25)  # in the loop's own steps
        assert found["verify_cost"] == pytest.approx({1: 1.0, 2: 1.25, 4: 1.5})
        assert found["share"] == pytest.approx(0.9)
        assert "org/Model" in origin

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"kind": "poem"}, "no report of hf-specdec"),
            ({"schema_version": 7}, "schema version 7, not 1"),
            ({"acceptance": None}, "measured no acceptance"),
            ({"acceptance": {"per_position": [0.5, "x"]}, "costs": {"1": {}}}, "lacks what it should have"),
            ({"acceptance": {"per_position": [0.5, "x"], "steps_by_source": {}}}, "lacks what it should have"),
            ({"costs": {"one": {}}}, "lacks what it should have"),
            ({"costs": {"1": {"forward": {"1": 0.0}, "draft_step": 0.1}}}, "lacks what it should have"),
        ],
    )
    def test_broken_reports(self, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(SpecDecError, match=message):
            conditions_of(read_record(self.check(tmp_path, **changes)))

    @pytest.mark.parametrize(
        "content", ["", "[1, 2]", '{"kind": "check", ', "\ud800".encode("utf-8", "surrogatepass"), "[" * 10**5]
    )
    def test_no_reports(self, tmp_path: Path, content: str | bytes) -> None:
        path = tmp_path / "broken.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(SpecDecError, match="isn't JSON|no report"):
            read_record(path)
        with pytest.raises(SpecDecError, match="can't be read"):
            read_record(tmp_path)
