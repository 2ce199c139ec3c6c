"""A whole check on a tiny model: stages, faults, and going on after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_specdec import PromptLookup, SpecConfig, SpecDecError
from hf_specdec.check import planning, run, speed
from hf_specdec.check.acceptance import measure_acceptance
from hf_specdec.check.planning import plan_work
from hf_specdec.check.prompts import Reading
from hf_specdec.check.run import CheckSettings, run_check
from hf_specdec.check.state import FORMAT, State, describe_files, fingerprint
from hf_specdec.check.static import static_facts
from hf_specdec.tools import bench
from hf_specdec.tools.loading import LoadedModel, load_model
from hf_specdec.tools.suites import BenchPrompt, Suite
from hf_specdec.tools.trials import Method, Run, decode

from ..tools.tiny_chat import save_tiny_chat_model
from .made_up import stages


pytestmark = pytest.mark.usefixtures("one_thread")

LOOKUP = Method("prompt_lookup", SpecConfig(drafter="prompt_lookup"))
Check = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def loaded(folder: str) -> LoadedModel:
    return load_model(folder, device="cpu")


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks that always say the same: plain decoding 4 s, everything else 2 s."""

    def timed(loaded: LoadedModel, inputs: Any, method: Method, tokens: int) -> Run:
        found = decode(loaded, inputs, method, tokens)
        return replace(found, seconds=4.0 if method.name == "plain" else 2.0)

    monkeypatch.setattr(bench, "decode", timed)
    monkeypatch.setattr(speed, "decode", timed)
    monkeypatch.setattr(planning, "decode", timed)


def reading() -> Reading:
    texts = ("abcabcabc abc", "one two one two", "x y x y x y", "你好你好")
    prompts = tuple(BenchPrompt(f"p{n}", "copy" if n % 2 else "talk", text) for n, text in enumerate(texts))
    return Reading(Suite("mine.jsonl", "0" * 64, prompts), "JSON lines")


@pytest.fixture
def check(folder: str, loaded: LoadedModel, tmp_path: Path, steady: None) -> Check:
    def call(**options: Any) -> dict[str, Any]:
        settings = {
            "batch_sizes": (1, 2),
            "max_new_tokens": 16,
            "temperatures": (1.0,),
            "sampled_tokens": 40,
            "trials": 2,
            "minutes": 30.0,
        }
        names = set(options) & set(CheckSettings.__dataclass_fields__)
        settings |= {name: options.pop(name) for name in names}
        options = {"folder": tmp_path / "state"} | options
        return run_check(CheckSettings(target=folder, **settings), reading(), lambda: loaded, **options)

    return call


def test_a_whole_check(check: Check, tmp_path: Path) -> None:
    news: list[str] = []
    found = check(tell=lambda title, done, total: news.append(title))
    assert found["problems"] == {}
    assert found["passed"]
    assert not found["interrupted"]
    assert found["recommendation"]["verdict"] == "on"
    assert found["speed"]["1"]["on"]["speedup"]["geometric_mean"] == pytest.approx(2.0)
    assert found["speed"]["2"]["on"]["cases"] == 2
    assert found["acceptance"]["by_category"]["all"]["prompts"] == 4
    assert set(found["costs"]) == {"1", "2"}
    assert found["lossless"]["greedy"]["verdict"] == "exact"
    assert found["curves"]["temperature"][0]["temperature"] == 1.0
    assert [each["tokens"] for each in found["curves"]["output_length"]] == [4, 8, 16]
    assert found["static"]["plain_reason"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert not list((tmp_path / "state").iterdir())  # a finished check leaves nothing
    assert {"batch 2: warm up: plain", "temperature 1"} <= {title.replace("auto", "plain") for title in news}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages whose results are made up; returns the names of those that ran. One whose name is in `STOPS` is stopped."""
    ran: list[str] = []

    def build(settings: CheckSettings, subject: Any, done: Any, tell: Any) -> dict[str, Callable[[], Any]]:
        def stage(name: str, result: Any) -> Callable[[], Any]:
            def call() -> Any:
                if name in STOPS:
                    raise STOPS[name]
                ran.append(name)
                return result

            return call

        return {name: stage(name, result) for name, result in stages().items()}

    STOPS.clear()
    monkeypatch.setattr(run, "_stages", build)
    return ran


STOPS: dict[str, BaseException] = {}


@pytest.mark.parametrize("stopped", ["plan", "speed 8", "temperatures"])
def test_an_interruption_costs_one_stage(check: Check, made_up: list[str], stopped: str) -> None:
    whole, every = check(batch_sizes=(1, 8)), list(made_up)
    made_up.clear()
    said: list[str] = []
    STOPS[stopped] = KeyboardInterrupt()
    part = check(batch_sizes=(1, 8), say=said.append)
    assert part["interrupted"]
    assert made_up == every[: every.index(stopped)]
    assert "the same command goes on" in said[-1]
    STOPS.clear()
    rest = check(batch_sizes=(1, 8), say=said.append)
    assert made_up == every  # none of them twice
    if stopped != every[0]:
        assert said[-1].startswith("Going on behind: plan")
    for each in (whole, rest):  # what memory is free differs from time to time
        each["static"].pop("memory")
    assert rest | {"date": ""} == whole | {"date": ""}


def test_other_conditions_are_another_check(check: Check, made_up: list[str], tmp_path: Path) -> None:
    STOPS["costs"] = KeyboardInterrupt()
    assert check()["interrupted"]
    assert check(max_new_tokens=12)["interrupted"]
    assert made_up.count("greedy") == 2
    assert len(list((tmp_path / "state").iterdir())) == 2
    STOPS.clear()
    check()
    assert made_up.count("greedy") == 2
    check(max_new_tokens=12, restart=True)
    assert made_up.count("greedy") == 3
    assert not list((tmp_path / "state").iterdir())


def test_a_stage_that_fails_leaves_the_others_and_is_tried_again(check: Check, made_up: list[str]) -> None:
    STOPS["costs"] = RuntimeError("no kernel for it")
    found = check()
    assert found["problems"] == {"costs": "RuntimeError: no kernel for it"}
    assert not found["passed"]
    assert found["lossless"]["sampled"] is not None
    assert "Costs could not be measured: RuntimeError: no kernel for it." in found["recommendation"]["reasons"]
    STOPS.clear()
    made_up.clear()
    assert check()["passed"]
    assert made_up == ["costs"]


def test_a_disk_that_is_full_costs_no_result(
    check: Check, made_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    said: list[str] = []
    found = check(say=said.append)
    assert found["passed"]
    assert "No space left" in said[0]


def plan(pace: float, reading: float = 0.0, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "prompts": 24, "max_new_tokens": 64, "sampled_tokens": 2000, "batch_sizes": (1, 4), "temperatures": 3, "trials": 2,
        "timed_prompts": 12, "curve_prompts": 3,
    }  # fmt: skip
    return plan_work(reading, pace, 9, **(usual | changes))


def test_a_quick_model_is_measured_in_full() -> None:
    found = plan(0.005)
    assert (found["text_tokens"], found["sampled_tokens"], found["curve_prompts"]) == (64, 2000, 3)
    assert found["timed"] == {"1": 12, "4": 2}
    assert found["timed_tokens"] == {"1": 64, "4": 64}
    assert found["sampled_prompts"] == 24
    assert plan(0.0)["timed"] == found["timed"]  # a clock that stands still


def test_a_slow_model_is_measured_less() -> None:
    found = plan(0.1)
    assert 24 < found["text_tokens"] < 64
    assert 800 < found["sampled_tokens"] < 2000
    assert 3 <= found["timed"]["1"] < 12
    assert plan(0.01, reading=3.0)["text_tokens"] < 64  # long prompts take time too
    slowest = plan(100.0)
    assert (slowest["text_tokens"], slowest["sampled_tokens"], slowest["curve_prompts"]) == (24, 800, 1)
    assert slowest["timed"] == {"1": 3, "4": 1}
    assert slowest["timed_tokens"] == {"1": 64, "4": 24}
    assert (found["sampled_prompts"], slowest["sampled_prompts"]) == (int(24 * found["text_tokens"] / 64), 6)


def test_a_plan_never_asks_for_more_than_was_said() -> None:
    found = plan(100.0, max_new_tokens=8, sampled_tokens=20, timed_prompts=2)
    assert (found["text_tokens"], found["sampled_tokens"], found["timed"]["1"]) == (8, 20, 2)


def test_ctrl_c_inside_a_benchmark(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopping(*_: Any) -> Run:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "decode", stopping)
    with pytest.raises(KeyboardInterrupt):
        speed.measure_batch(loaded, reading().suite.prompts, LOOKUP, 1, max_new_tokens=8, trials=2)


def test_a_drafter_that_breaks_is_told(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PromptLookup, rows: Any, length: int) -> Any:
        raise RuntimeError("lost the index")

    monkeypatch.setattr(PromptLookup, "propose", broken)
    rows = measure_acceptance(
        loaded, reading().suite.prompts[:2], SpecConfig(drafter="prompt_lookup"), num_draft_tokens=4, max_new_tokens=8
    )
    assert all("lost the index" in row["fallback_reason"] for row in rows)


def test_a_draft_model(check: Check, folder: str) -> None:
    found = check(draft=folder, drafter="draft_model", batch_sizes=(1,), most_prompts=2)
    assert found["problems"] == {}
    assert found["draft"] == folder
    assert found["acceptance"]["draft_acceptance_rate"] == 1
    assert found["costs"]["1"]["draft_step"] > 0
    assert found["static"]["vocabulary"]["verdict"] == "same"
    assert found["static"]["draft_choice"]["verdict"] == "fits"
    assert found["recommendation"]["draft_model"] == folder


def test_few_prompts_fill_a_batch(loaded: LoadedModel, steady: None) -> None:
    found = speed.measure_batch(loaded, reading().suite.prompts[:2], LOOKUP, 6, max_new_tokens=8, trials=2)
    assert found["on"]["cases"] == 1
    assert found["lengths"] == []


def test_without_weights(folder: str, tmp_path: Path) -> None:
    settings = CheckSettings(target=folder, batch_sizes=(4,))
    found = run_check(settings, reading(), lambda: pytest.fail("loaded"), folder=tmp_path, static_only=True)
    assert found["static_only"]
    assert found["static"]["target"]["model_type"] == "llama"
    assert found["static"]["memory"]["batch"] == 4
    assert found["static"]["problems"] == []


def test_a_model_that_is_decoded_plainly_is_not_measured(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hf_specdec.check.static.forward.unsupported_reason", lambda model: "its state can't be rolled back"
    )
    found = run_check(CheckSettings(target=folder), reading(), lambda: pytest.fail("loaded"), folder=tmp_path)
    assert found["recommendation"]["verdict"] == "off"
    assert "can't be rolled back" in found["recommendation"]["reasons"][0]


def test_nothing_is_known_of_a_target_that_is_not_there(tmp_path: Path) -> None:
    found = static_facts(str(tmp_path / "nothing"))
    assert found["target"] is None
    assert found["plain_reason"] is None
    assert found["problems"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trials": 1}, "`trials` must be at least 2"), ({"batch_sizes": (2, 2)}, "different numbers"),
        ({"batch_sizes": ()}, "different numbers"), ({"temperature": 0.0}, "greedy decoding is checked anyway"),
        ({"temperature": float("nan")}, "must be above 0"), ({"minutes": 0.0}, "`minutes` must be above 0"),
    ],
)  # fmt: skip
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecDecError, match=message):
        CheckSettings(target="x", **settings)


def test_switched_off(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_SPECDEC_DISABLE", "1")
    with pytest.raises(SpecDecError, match="there is nothing to check"):
        check()


def test_state(tmp_path: Path) -> None:
    one = State(tmp_path / "deep", "key")
    one.keep("a", {"tuple": (1, 2), "none": None, "nan": float("nan")}, 1.0)
    again = State(tmp_path / "deep", "key")
    assert again.stages == one.stages == {"a": {"tuple": [1, 2], "none": None, "nan": None}}
    assert again.seconds == one.seconds == {"a": 1.0}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["key.json"]
    again.forget()
    again.forget()
    assert State(tmp_path / "deep", "key").stages == {}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"format": 1, "stages": {"a": 1}, "seconds": {}}', f'{{"format": {FORMAT}}}',
        f'{{"format": {FORMAT}, "stages": 3, "seconds": {{}}}}', f'{{"format": {FORMAT}, "stages": {{"a": 1}}}}',
    ],
)  # fmt: skip
def test_a_broken_state_is_measured_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "key.json").write_text(text)
    assert State(tmp_path, "key").stages == {}


def test_a_state_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecDecError, match="Name a folder with --save"):
        State(tmp_path / "file", "key")


def test_a_changed_model_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("a")
    before = fingerprint({"files": describe_files(str(tmp_path))})
    (tmp_path / "model.safetensors").write_text("ab")
    assert fingerprint({"files": describe_files(str(tmp_path))}) != before
    assert describe_files("org/model") == "org/model"
