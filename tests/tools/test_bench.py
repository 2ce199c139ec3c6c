"""The benchmark: in which order it measures, what its figures are made of, when it refuses to give one."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import hf_specdec
from hf_specdec import PromptLookup, SpecConfig, SpecDecError
from hf_specdec.drafters import DRAFTERS, draft_model, recycling
from hf_specdec.engine import length
from hf_specdec.engine.fast import FastForward
from hf_specdec.engine.graphs import CAPTURE_AFTER
from hf_specdec.tools import bench, costs
from hf_specdec.tools.bench import WARM_UP_PROMPT, BenchSettings, choose_methods, run_bench
from hf_specdec.tools.bench_report import SCHEMA_VERSION, BenchReport, Failure
from hf_specdec.tools.costs import measure_costs
from hf_specdec.tools.differences import Difference, find_difference
from hf_specdec.tools.loading import LoadedModel, encode_batch, load_model
from hf_specdec.tools.suites import BenchPrompt, Suite
from hf_specdec.tools.summaries import MAX_SPREAD, Latency, Summary, Texts, refusal, summarise
from hf_specdec.tools.timing import geometric_mean, percentile, quartiles, relative_spread
from hf_specdec.tools.trials import PLAIN, Case, Learnt, Method, Run, Trial, decode, first_differences, interleave

from .test_plots import made_up_report
from .tiny_chat import save_tiny_chat_model


QUICK = BenchSettings(max_new_tokens=12, trials=2)
A, B = Method("a", speculative=True), Method("b", options={"prompt_lookup_num_tokens": 10})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32", device="cpu")


def suite(*texts: str, category: str = "own") -> Suite:
    prompts = tuple(BenchPrompt(f"{category}/{index}", category, text) for index, text in enumerate(texts))
    return Suite("test", "0" * 64, prompts)


def run_of(seconds: float, tokens: int = 10, **options: Any) -> Run:
    return Run(seconds, (tuple(range(tokens)),), **options)


def case_of(plain: Sequence[float], trials: Mapping[str, Sequence[tuple[int, float]]], **options: Any) -> Case:
    return Case(
        batch=options.pop("batch", 1),
        category=options.pop("category", "own"),
        prompts=("p",),
        prompt_tokens=(5,),
        plain=tuple(map(run_of, plain)),
        trials={
            name: tuple(Trial(before, run_of(seconds)) for before, seconds in runs) for name, runs in trials.items()
        },
        **options,
    )


class TestTiming:
    def test_geometric_mean(self) -> None:
        assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)

    def test_quartiles(self) -> None:
        assert quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == (2.0, 3.0, 4.0)
        assert quartiles([7.0]) == (7.0, 7.0, 7.0)
        assert percentile([0.0, 1.0], 0.9) == pytest.approx(0.9)
        with pytest.raises(ValueError, match="at least one"):
            percentile([], 0.5)

    def test_one_hiccup_is_no_spread(self) -> None:
        assert relative_spread([1.0, 1.0, 1.0, 1.0, 9.0]) == 0.0
        assert relative_spread([1.0, 1.0, 1.5, 2.0, 2.0]) == pytest.approx(1 / 1.5)


class TestProtocol:
    def test_methods_take_turns_with_plain_around_each(self) -> None:
        order: list[str] = []

        def run(method: Method) -> Run:
            order.append(method.name)
            return run_of(float(len(order)))

        plain, trials = interleave(run, [A, B], 2, {})
        assert order == ["plain", "a", "plain", "b", "plain", "a", "plain", "b", "plain"]
        assert [each.seconds for each in plain] == [1, 3, 5, 7, 9]
        assert [(each.before, each.run.seconds) for each in trials["a"]] == [(0, 2), (2, 6)]
        assert [(each.before, each.run.seconds) for each in trials["b"]] == [(1, 4), (3, 8)]

    def test_plain_is_the_mean_of_both_neighbours(self) -> None:
        # a machine that slows down steadily: each trial by itself is a fair comparison
        case = case_of([1.0, 3.0, 5.0], {"a": [(0, 1.0), (1, 2.0)]})
        assert case.speedup("a") == pytest.approx((2.0 / 1.0 + 4.0 / 2.0) / 2)

    def test_median_over_trials(self) -> None:
        case = case_of([4.0] * 4, {"a": [(0, 2.0), (1, 1.0), (2, 100.0)]})
        assert case.speedup("a") == pytest.approx(2.0)

    def test_texts_of_other_length_are_compared_by_token(self) -> None:
        short = Run(1.0, ((1, 2, 3, 4, 5),))
        case = Case(1, "own", ("p",), (5,), (run_of(4.0), run_of(4.0)), {"a": (Trial(0, short),)})
        assert case.speedup("a") == pytest.approx((4.0 / 10) / (1.0 / 5))

    def test_failing_method_leaves_and_the_others_go_on(self) -> None:
        calls: list[str] = []

        def run(method: Method) -> Run:
            calls.append(method.name)
            if method.name == "a" and calls.count("a") == 2:
                raise RuntimeError("out of\nmemory")
            return run_of(1.0)

        failed: dict[str, str] = {}
        plain, trials = interleave(run, [A, B], 3, failed)
        assert failed == {"a": "RuntimeError: out of memory"}
        assert set(trials) == {"b"}
        assert [each.before for each in trials["b"]] == [1, 2, 3]
        assert len(plain) == 5
        assert calls.count("a") == 2

    def test_what_failed_before_is_left_out(self) -> None:
        _, trials = interleave(lambda method: run_of(1.0), [A, B], 2, {"a": "earlier"})
        assert set(trials) == {"b"}


class TestRefusal:
    @pytest.mark.parametrize("spread", [0.0, 0.05, MAX_SPREAD])
    def test_steady_enough(self, spread: float) -> None:
        assert refusal(spread) is None

    def test_says_how_much(self) -> None:
        assert "the plain runs themselves differ by 23 %: no speed-up is given" in (refusal(0.23) or "")
        assert "10.4 %" in (refusal(0.104) or "")

    def test_no_speedup_from_a_noisy_machine(self) -> None:
        noisy = case_of([1.0, 1.3, 1.0, 1.3], {"a": [(0, 0.5), (1, 0.5), (2, 0.5)]})
        summary = summarise(1, "own", [noisy], "a")
        assert summary.speedup is None
        assert summary.efficiency is None
        assert summary.refused
        assert summary.tokens_per_second == pytest.approx(20.0)

    def test_one_noisy_prompt_of_three_is_tolerated(self) -> None:
        steady = case_of([1.0, 1.0, 1.0], {"a": [(0, 0.5), (1, 0.5)]})
        noisy = case_of([1.0, 1.3, 1.6], {"a": [(0, 0.5), (1, 0.5)]})
        summary = summarise(1, "own", [steady, noisy, steady], "a")
        assert summary.refused is None
        assert summary.speedup is not None
        assert summary.speedup.worst == pytest.approx(2.0)
        assert summary.speedup.cases == 3

    def test_all_leaves_out_refused_categories(self) -> None:
        steady = case_of([1.0, 1.0, 1.0], {"a": [(0, 0.5), (1, 0.5)]}, category="steady")
        noisy = case_of([1.0, 1.3, 1.6], {"a": [(0, 0.1), (1, 0.1)]}, category="noisy")
        report = made_up_report(cases=(steady, noisy, noisy), methods=("a",))
        found = {(each.category, each.method): each for each in report.summaries()}
        everything = found["all", "a"]
        assert (everything.refused, everything.cases) == (None, 3)
        assert everything.speedup == found["steady", "a"].speedup
        assert found["noisy", "a"].refused
        assert "batch 1, all: the speed-up leaves out noisy, whose own is refused." in report.notes()
        none_left = summarise(1, "all", [noisy, replace(noisy, category="other")], "a")
        assert none_left.speedup is None
        assert none_left.refused

    def test_there_is_no_knob(self) -> None:
        assert not [name for name in BenchSettings.__slots__ if "spread" in name or "refus" in name]


class TestRuns:
    run = Run(
        1.0,
        ((1, 2, 3, 4), (1, 2)),
        arrivals=(((0.2, 1), (0.3, 2), (0.7, 1)), ((0.2, 1), (0.3, 1))),
    )

    def test_tokens_that_arrive_together_are_0_apart(self) -> None:
        assert self.run.token_gaps == pytest.approx([0.1, 0.0, 0.4, 0.1])
        assert self.run.block_gaps == pytest.approx([0.1, 0.4, 0.1])
        assert self.run.first_token == 0.2
        assert self.run.num_tokens == 6

    def test_latency(self) -> None:
        latency = Latency.of([self.run])
        assert latency is not None
        assert latency.token_p50 == pytest.approx(0.1)
        assert latency.block_p90 == pytest.approx(0.34)
        assert Latency.of([run_of(1.0)]) is None
        only_first = Latency.of([Run(1.0, ((1,),), (((0.5, 1),),))])
        assert only_first == Latency(0.5, None, None, None, None)


class TestCosts:
    def test_measured(self, loaded: LoadedModel) -> None:
        inputs = encode_batch(loaded, ["abcabc", "a"])
        answers = [[65] * 12, [66] * 3]
        costs = measure_costs(loaded.model, inputs, answers, [1, 3, 8], draft=loaded.model)
        assert costs is not None
        assert list(costs.forward) == [2, 4, 8]  # whole rows
        assert costs.rows == 2
        assert costs.context == len("[abcabc]") + 6
        assert min(costs.plain_step, *costs.forward.values()) > 0
        assert costs.draft_step is not None
        assert costs.draft_step > 0

    def test_graphs_are_captured_before_the_clock_counts(
        self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A forward is slow here until it has been used often enough for a graph, and once more."""
        uses: Counter[int] = Counter()

        class Idle:
            """Stands for the forwards of fixed shape: they are there, but decline."""

            def block(self, *arguments: Any) -> None:
                return None

        def timed(self: Any, width: int) -> float:
            uses[width] += 1
            return 100.0 if uses[width] <= CAPTURE_AFTER + 2 else 1.0

        monkeypatch.setattr(FastForward, "of", lambda *arguments, **options: Idle())
        monkeypatch.setattr(costs._Behind, "forward", timed)
        found = measure_costs(loaded.model, encode_batch(loaded, ["abc"]), [[65] * 12], [1, 3])
        assert found is not None
        assert found.forward == {1: 1.0, 3: 1.0}

    def test_too_short_to_measure(self, loaded: LoadedModel) -> None:
        assert measure_costs(loaded.model, encode_batch(loaded, ["a"]), [[1, 2]], [1]) is None


def test_a_case_counts_once_for_acceptance_by_position() -> None:
    """Its trials repeat one another."""
    case = made_up_report((1,)).cases[0]
    trials = {name: runs * 3 for name, runs in case.trials.items()}
    found = summarise(1, "chat", [replace(case, trials=trials), case], "none")
    assert found.acceptance_by_position[:2] == ((60, 40), (40, 32))


class TestEfficiency:
    """η is the measured speed-up ÷ that of the same forwards alone."""

    def case(self, plain: float, **changes: Any) -> Case:
        trials = {"a": (Trial(0, run_of(5.0, forward_seconds=4.0)),)}
        return Case(1, "own", ("p",), (5,), (run_of(10.0), run_of(plain)), trials, **changes)

    def test_given(self) -> None:
        summary = summarise(1, "own", [self.case(10.0)], "a")
        assert summary.speedup is not None
        assert summary.speedup.geometric_mean == pytest.approx(2.0)
        assert summary.ideal == pytest.approx(10 / 4)
        assert summary.efficiency == pytest.approx(2.0 / 2.5)

    def test_refused(self) -> None:
        summary = summarise(1, "own", [self.case(20.0)], "a")
        assert summary.speedup is summary.ideal is summary.efficiency is None

    def test_without_replays(self) -> None:
        summary = summarise(1, "own", [case_of([1.0, 1.0], {"a": [(0, 0.5)]})], "a")
        assert summary.speedup is not None
        assert summary.ideal is summary.efficiency is None


class TestTexts:
    def test_kinds(self) -> None:
        found = Texts.of(
            [
                None,
                Difference(3, 1, 2, gap=0.0, band=0.05, apart=0.0),
                Difference(3, 1, 2, gap=0.125, band=0.25, apart=0.125),
                Difference(3, 1, 2, gap=0.0, band=0.25, apart=0.125),  # a plain forward sides with speculation
                Difference(3, 1, 2, gap=4.0, band=0.25, apart=4.0),
                Difference(3, None, 2, gap=None, band=0.25),
            ]
        )
        assert (found.texts, found.same, found.ties, found.near_ties, found.mismatches) == (6, 1, 1, 2, 2)
        assert found.gaps == (0.0, 0.125, 0.0, 4.0, None)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_logits_that_are_no_numbers(self, value: float) -> None:
        """JSON has no NaN; such a difference is told, and is no near-tie."""
        logits = torch.tensor([[[1.0, value, 2.0]]])
        model = Mock(dtype=torch.float32, return_value=SimpleNamespace(logits=logits))
        found = find_difference(model, torch.tensor([[1]]), [0], [1])
        assert found is not None
        assert (found.gap, found.apart, found.kind) == (None, None, "mismatch")
        assert "aren't finite" in str(found)

    def test_first_difference_of_each_row_in_any_trial(self, loaded: LoadedModel) -> None:
        inputs = encode_batch(loaded, ["abc", "a"])
        plain = (Run(1.0, ((1, 2, 3), (4, 5, 6))),) * 3
        trials = [Trial(0, plain[0]), Trial(1, Run(1.0, ((1, 2, 3), (4, 9, 6))))]
        first, second = first_differences(loaded, inputs, plain, trials)
        assert first is None
        assert second is not None
        assert (second.index, second.token_off, second.token_on) == (1, 5, 9)
        with torch.no_grad():
            ids = encode_batch(loaded, ["a"])["input_ids"]
            logits = loaded.model(torch.cat([ids, torch.tensor([[4]])], 1)).logits[0, -1]
        assert second.apart == pytest.approx(abs(float(logits[5] - logits[9])), abs=1e-5)


class TestDecode:
    @pytest.mark.parametrize("texts", [["abcabcabc"], ["abcabcabc", "one two", "a"]])
    def test_every_method_gives_the_same_tokens(self, loaded: LoadedModel, texts: list[str]) -> None:
        inputs = encode_batch(loaded, texts)
        plain = decode(loaded, inputs, PLAIN, 20)
        ours = decode(loaded, inputs, Method("ours", SpecConfig(drafter="prompt_lookup")), 20)
        assert ours.tokens == plain.tokens
        assert len(plain.tokens) == len(texts)
        for run in (plain, ours):
            assert [sum(count for _, count in row) for row in run.arrivals] == [len(row) for row in run.tokens]
            assert run.first_token is not None
            assert 0 < run.first_token < run.seconds
            assert len(run.token_gaps) == run.num_tokens - len(texts)
            assert sum(run.token_gaps) <= len(texts) * run.seconds
        assert ours.stats is not None
        assert [event.step for event in ours.events] == list(range(len(ours.events)))
        assert sum(len(event.rows) for event in ours.events[1:]) == ours.stats["num_spec_steps"]

    def test_transformers_own_loop(self, loaded: LoadedModel) -> None:
        inputs = encode_batch(loaded, ["abcabcabcabc"])
        run = decode(loaded, inputs, B, 20)
        assert run.tokens == decode(loaded, inputs, PLAIN, 20).tokens
        assert run.stats is None
        assert sum(count for _, count in run.arrivals[0]) == run.num_tokens

    @pytest.mark.parametrize("switch", [None, "0"])
    def test_transformers_rows_are_transformers_after_enable(
        self, loaded: LoadedModel, enabled: None, monkeypatch: pytest.MonkeyPatch, switch: str | None
    ) -> None:
        monkeypatch.delenv("HF_SPECDEC_DISABLE", raising=False)
        if switch is not None:
            monkeypatch.setenv("HF_SPECDEC_DISABLE", switch)
        loaded.model.generate(**encode_batch(loaded, ["ab"]), max_new_tokens=2, speculative=True)
        before = hf_specdec.last_stats(loaded.model)
        decode(loaded, encode_batch(loaded, ["abcabc"]), B, 8)
        assert hf_specdec.last_stats(loaded.model) is before
        assert os.environ.get("HF_SPECDEC_DISABLE") == switch


class TestLearnt:
    def test_repetitions_do_not_know_the_prompt(self, loaded: LoadedModel) -> None:
        """What a run learns from a prompt is forgotten before the next run of it."""
        inputs = encode_batch(loaded, ["what was learnt"])
        before = Learnt(loaded.model)
        method = Method("recycling", SpecConfig(drafter="recycling"))
        first = decode(loaded, inputs, method, 24)
        learnt = recycling.snapshot(loaded.model)
        assert learnt.successors != before.successors.successors
        assert length.snapshot(loaded.model) != before.lengths
        before.restore()
        assert recycling.snapshot(loaded.model) == before.successors
        assert decode(loaded, inputs, method, 24).tokens == first.tokens

    def test_a_draft_model_starts_again(self, loaded: LoadedModel) -> None:
        def known() -> list[float]:
            return [calibration.overall.tried for calibration in draft_model.snapshot(loaded.model).values()]

        before, was_known = Learnt(loaded.model), known()
        config = SpecConfig(drafter="draft_model", draft_model=loaded.model)
        decode(loaded, encode_batch(loaded, ["abc"]), Method("draft_model", config), 24)
        after, learnt = Learnt(loaded.model), known()
        assert learnt != was_known
        before.restore()
        assert known() == was_known
        after.restore()
        assert known() == learnt
        before.restore()

    def test_every_trial_starts_with_the_same_knowledge(
        self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A prompt teaches the ones behind it, once; its own trials know nothing of it."""
        known: list[dict[int, tuple[int, ...]]] = []

        def noting(loaded: LoadedModel, inputs: Any, method: Method, tokens: int) -> Run:
            if method.name == "recycling" and tokens == QUICK.max_new_tokens:
                known.append(recycling.snapshot(loaded.model).successors)
            return decode(loaded, inputs, method, tokens)

        monkeypatch.setattr(bench, "decode", noting)
        run_bench(loaded, suite("first", "second"), choose_methods(["recycling"])[0], QUICK)
        first, again, second, once_more = known
        assert first == again
        assert second == once_more
        assert set(first) < set(second)

    def test_a_bench_leaves_nothing_behind(self, loaded: LoadedModel) -> None:
        before = Learnt(loaded.model)
        methods, _ = choose_methods(["recycling"])
        run_bench(loaded, suite("abcabc"), methods, BenchSettings(max_new_tokens=8, trials=2, ideal=False))
        assert recycling.snapshot(loaded.model) == before.successors


class TestMethods:
    def test_auto(self) -> None:
        methods, skipped = choose_methods()
        assert [method.name for method in methods] == ["auto"]
        assert methods[0].speculative == SpecConfig()
        assert not skipped

    def test_all_without_a_draft_model(self) -> None:
        methods, skipped = choose_methods(["all"], vs_transformers=True)
        assert [method.name for method in methods] == [
            "prompt_lookup", "recycling", "none", "transformers_lookup",
        ]  # fmt: skip
        assert {failure.method for failure in skipped} == {"draft_model", "hybrid"}
        assert all(failure.skipped and "--draft" in failure.reason for failure in skipped)

    def test_all_with_a_draft_model(self) -> None:
        draft = SimpleNamespace()
        methods, skipped = choose_methods(["all"], draft=draft, vs_transformers=True)
        assert [method.name for method in methods] == [*DRAFTERS, "transformers_lookup", "transformers_draft"]
        assert not skipped
        assert [method.ours for method in methods] == [True] * len(DRAFTERS) + [False, False]

    def test_names_are_taken_once(self) -> None:
        assert len(choose_methods(["recycling", "recycling"])[0]) == 1

    @pytest.mark.parametrize(("name", "message"), [("crystal_ball", "no drafter 'crystal"), ("hybrid", "--draft")])
    def test_errors(self, name: str, message: str) -> None:
        with pytest.raises(SpecDecError, match=message):
            choose_methods([name])


class TestSettings:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"trials": 1},
            {"max_new_tokens": 1},
            {"per_category": 0},
            {"batch_sizes": ()},
            {"batch_sizes": (1, 1)},
            {"batch_sizes": (0,)},
        ],
    )
    def test_wrong_values(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(SpecDecError, match=next(iter(wrong))):
            BenchSettings(**wrong)


@pytest.fixture(scope="module")
def report(loaded: LoadedModel) -> BenchReport:
    prompts = (*suite("abcabcabc", "one two").prompts, *suite("x y x y", "zz", category="other").prompts)
    methods, skipped = choose_methods(["all"], vs_transformers=True)
    settings = BenchSettings(max_new_tokens=12, trials=2, batch_sizes=(1, 2))
    return run_bench(loaded, Suite("test", "0" * 64, prompts), methods, settings, skipped=skipped)


class TestBench:
    def test_every_drafter_at_every_batch_size(self, report: BenchReport) -> None:
        assert [(case.batch, case.category) for case in report.cases] == [
            (1, "own"), (1, "own"), (1, "other"), (1, "other"), (2, "own"), (2, "other"),
        ]  # fmt: skip
        for case in report.cases:
            expected = {"prompt_lookup", "recycling", "none"} | ({"transformers_lookup"} if case.batch == 1 else set())
            assert set(case.trials) == expected
            assert all(len(trials) == 2 for trials in case.trials.values())
            assert len(case.plain) == 1 + 2 * len(expected)
            assert all(each is None for found in case.differences.values() for each in found)
            assert all(case.ideal(name) for name in ("prompt_lookup", "recycling", "none"))
            assert case.batch == 2 or case.ideal("transformers_lookup") is None

    def test_transformers_takes_one_prompt_at_a_time(self, report: BenchReport) -> None:
        """Its reason is told, and it doesn't count as a failure of ours."""
        failure = next(each for each in report.failures if each.method == "transformers_lookup")
        assert failure.batch == 2
        assert "batch_size = 1" in failure.reason
        assert report.ok

    def test_summaries(self, report: BenchReport) -> None:
        found = {(each.batch, each.category, each.method): each for each in report.summaries()}
        assert {(batch, name) for batch, name, _ in found} == {
            (batch, name) for batch in (1, 2) for name in ("own", "other", "all")
        }
        everything = found[1, "all", "recycling"]
        assert everything.cases == 4
        assert everything.texts == Texts(4, 4, 0, 0, 0, ())
        assert (everything.speedup is None) == (everything.refused is not None)
        assert (everything.ideal is None) == (everything.refused is not None)
        assert sum(everything.rounds_by_source.values()) == pytest.approx(1.0)
        assert found[1, "all", "none"].acceptance_length == 1.0
        assert found[1, "all", "none"].acceptance_rate is None
        assert found[2, "own", "prompt_lookup"].texts == Texts(2, 2, 0, 0, 0, ())

    def test_json(self, report: BenchReport) -> None:
        data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert data["schema_version"] == SCHEMA_VERSION
        assert data["kind"] == "bench"
        assert data["ok"] is True
        assert data["target"]["parameters"] > 0
        assert data["target"]["dtype"] == "float32"
        assert data["settings"]["max_spread"] == MAX_SPREAD
        assert data["settings"]["decoding"] == "greedy"
        assert data["environment"]["versions"]["transformers"]
        assert data["environment"]["torch_threads"] >= 1
        assert data["prompts"]["sha256"] == "0" * 64
        assert len(data["prompts"]["ids"]) == 4
        assert {"date", "command", "git_revision", "draft", "notes", "failures", "summaries"} <= set(data)
        assert [curve["rows"] for curve in data["cost_curves"]] == [1, 2]
        case = data["cases"][0]
        assert len(case["plain"]["seconds"]) == 9
        assert len(case["methods"]["recycling"]["seconds"]) == 2
        assert (case["methods"]["recycling"]["ideal"] is None) == (case["methods"]["recycling"]["speedup"] is None)
        assert case["methods"]["recycling"]["plain_before"] == [1, 5]
        assert case["methods"]["recycling"]["stats"]["num_emitted_tokens"] == case["methods"]["recycling"]["tokens"][1]

    def test_sides_take_turns_after_a_warm_up(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[str, int, int]] = []

        def counted(loaded: LoadedModel, inputs: Any, method: Method, tokens: int) -> Run:
            calls.append((method.name, inputs["input_ids"].shape[1], tokens))
            return decode(loaded, inputs, method, tokens)

        monkeypatch.setattr(bench, "decode", counted)
        told: list[tuple[int, int]] = []
        run_bench(
            loaded, suite("abc"), choose_methods(["none"])[0], QUICK, tell=lambda title, done, total: told.append((done, total))
        )  # fmt: skip
        warm = len(WARM_UP_PROMPT) + 2
        assert calls == [
            ("plain", warm, bench.WARM_UP_TOKENS), ("none", warm, bench.WARM_UP_TOKENS),
            ("plain", 5, bench.SHORT_WARM_UP_TOKENS), ("none", 5, bench.SHORT_WARM_UP_TOKENS),
            ("plain", 5, 12), ("none", 5, 12), ("plain", 5, 12), ("none", 5, 12), ("plain", 5, 12),
        ]  # fmt: skip
        assert [done for done, _ in told] == list(range(len(told)))  # every part was announced, and no more
        assert told[-1][0] == told[-1][1]

    def test_failing_method(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(loaded: LoadedModel, inputs: Any, method: Method, tokens: int) -> Run:
            if method.name == "recycling" and tokens == QUICK.max_new_tokens:
                raise RuntimeError("no kernel")
            return decode(loaded, inputs, method, tokens)

        monkeypatch.setattr(bench, "decode", failing)
        methods, _ = choose_methods(["recycling", "none"])
        report = run_bench(loaded, suite("abc", "def"), methods, QUICK)
        assert report.failures == (Failure("recycling", 1, "RuntimeError: no kernel"),)
        assert [set(case.trials) for case in report.cases] == [{"none"}, {"none"}]
        assert not report.ok
        assert "recycling at batch 1: RuntimeError: no kernel" in report.notes()

    @pytest.mark.parametrize(("error", "interrupted"), [(KeyboardInterrupt, True), (RuntimeError("full"), False)])
    def test_what_is_finished_is_kept(
        self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, error: Any, interrupted: bool
    ) -> None:
        """Ctrl-C, or plain decoding itself failing, in the second prompt."""
        calls: list[str] = []

        def stopping(loaded: LoadedModel, inputs: Any, method: Method, tokens: int) -> Run:
            calls.append(method.name)
            if len(calls) == 12:
                raise error
            return decode(loaded, inputs, method, tokens)

        monkeypatch.setattr(bench, "decode", stopping)
        report = run_bench(loaded, suite("abc", "def"), choose_methods(["none"])[0], QUICK)
        assert report.interrupted is interrupted
        assert [case.prompts for case in report.cases] == [("own/0",)]
        assert any("interrupted" in note or "full" in note for note in report.notes())
        assert report.summaries()
        json.dumps(report.to_dict())

    def test_call_that_is_decoded_plainly(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(self: PromptLookup, rows: Any, length: int) -> Any:
            raise RuntimeError("lost the index")

        monkeypatch.setattr(PromptLookup, "propose", broken)
        report = run_bench(loaded, suite("abcabcabcabc"), choose_methods(["prompt_lookup"])[0], QUICK)
        note = next(note for note in report.notes() if "decoded plainly" in note)
        assert "lost the index" in note
        assert "(1 of 1 cases)" in note
        assert report.ok
        (reasons,) = (each["fallback_reasons"] for each in json.loads(json.dumps(report.to_dict()))["summaries"][1:])
        assert list(reasons.values()) == [1]

    def test_failing_replays_cost_only_the_ideal(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []

        def failing(*arguments: Any) -> float:
            calls.append(0)
            raise RuntimeError("out of memory")

        monkeypatch.setattr(bench, "replay", failing)
        report = run_bench(loaded, suite("abc", "def"), choose_methods(["none"])[0], QUICK)
        assert len(report.cases) == 2
        assert len(calls) == 1
        assert report.failures == (Failure("ideal", 1, "RuntimeError: out of memory"),)
        assert report.ok

    def test_mismatch_is_not_ok(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        def other(loaded: LoadedModel, inputs: Any, method: Method, tokens: int) -> Run:
            run = decode(loaded, inputs, method, tokens)
            if method.name != "none":
                return run
            worst = int(loaded.model(inputs["input_ids"]).logits[0, -1].argmin())
            return Run(run.seconds, ((worst, *run.tokens[0][1:]),), run.arrivals, run.events, run.stats)

        monkeypatch.setattr(bench, "decode", other)
        report = run_bench(loaded, suite("abc"), choose_methods(["none"])[0], QUICK)
        assert report.mismatches == 1
        assert not report.ok
        assert report.to_dict()["cases"][0]["methods"]["none"]["differences"][0]["kind"] == "mismatch"

    def test_refused_ratios_are_not_in_the_json(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds: Iterator[float] = iter([1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 2.0, 0.5, 3.0])

        def timed(loaded: LoadedModel, inputs: Any, method: Method, tokens: int) -> Run:
            run = decode(loaded, inputs, method, tokens)
            return Run(next(seconds), run.tokens, run.arrivals, run.events, run.stats)

        monkeypatch.setattr(bench, "decode", timed)
        data = run_bench(loaded, suite("abc"), choose_methods(["none"])[0], QUICK).to_dict()
        ours = next(each for each in data["summaries"] if each["method"] == "none")
        assert ours["speedup"] is ours["ideal"] is ours["efficiency"] is None
        assert "differ by 50 %" in ours["refused"]
        assert data["cases"][0]["methods"]["none"]["speedup"] is None
        assert data["cases"][0]["methods"]["none"]["ideal"] is None
        assert data["cases"][0]["plain"]["seconds"] == [1.0, 2.0, 3.0]
        assert any("differ by 50 %" in note for note in data["notes"])

    def test_long_prompts_are_left_out_and_replaced(self, loaded: LoadedModel) -> None:
        settings = BenchSettings(max_new_tokens=4, trials=2, per_category=1, max_prompt_tokens=8, ideal=False)
        report = run_bench(loaded, suite("far too long", "short", "other"), choose_methods(["none"])[0], settings)
        assert [case.prompts for case in report.cases] == [("own/1",)]
        assert report.too_long == 1
        assert any("more than 8 tokens: 1." in note for note in report.notes())

    def test_incomplete_batches_are_told(self, loaded: LoadedModel) -> None:
        settings = BenchSettings(max_new_tokens=4, trials=2, batch_sizes=(2,), ideal=False)
        report = run_bench(loaded, suite("a", "b", "c"), choose_methods(["none"])[0], settings)
        assert report.incomplete == {2: 1}
        assert any("fill a batch of 2: 1." in note for note in report.notes())

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (BenchSettings(max_prompt_tokens=2), "more than 2 tokens"),
            (BenchSettings(batch_sizes=(8,)), "A batch of 8 needs 8 prompts"),
            (BenchSettings(categories=("poetry",)), "no prompts of the category 'poetry'"),
        ],
    )
    def test_nothing_to_measure(self, loaded: LoadedModel, settings: BenchSettings, message: str) -> None:
        with pytest.raises(SpecDecError, match=message):
            run_bench(loaded, suite("abc"), choose_methods(["none"])[0], settings)

    def test_switched_off(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_SPECDEC_DISABLE", "1")
        with pytest.raises(SpecDecError, match="HF_SPECDEC_DISABLE"):
            run_bench(loaded, suite("abc"), choose_methods(["none"])[0], QUICK)

    def test_no_method(self, loaded: LoadedModel) -> None:
        with pytest.raises(SpecDecError, match="no method"):
            run_bench(loaded, suite("abc"), [], QUICK)


def test_summary_is_what_the_docs_say() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "benchmark.md").read_text(encoding="utf-8")
    missing = [name for name in Summary.__slots__ if f"`{name}`" not in page]
    assert not missing
