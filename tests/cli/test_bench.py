"""`hf-specdec bench`: output, files, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_specdec import PromptLookup
from hf_specdec.cli import bench as cli_bench
from hf_specdec.tools import bench, demo, plots, progress
from hf_specdec.tools.loading import LoadedModel
from hf_specdec.tools.trials import Method, Run, decode

from ..tools.test_plots import made_up_report
from ..tools.tiny_chat import save_tiny_chat_model


Outcome = tuple[int, str, str]
Bench = Callable[..., Outcome]
QUICK = ("--max-new-tokens", "8", "--trials", "2", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "abcabcabc", "category": "copy"}, {"prompt": "one two", "category": "copy"},
        {"turns": ["[bold]你好[/bold]"], "category": "talk"},
    ]  # fmt: skip
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


@pytest.fixture
def run(shell: Any) -> Bench:
    return partial(shell, "bench")


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks that always say the same: plain decoding 4 s, everything else 2 s."""

    def timed(loaded: LoadedModel, inputs: Any, method: Method, tokens: int) -> Run:
        run = decode(loaded, inputs, method, tokens)
        return Run(4.0 if method.name == "plain" else 2.0, run.tokens, run.arrivals, run.events, run.stats)

    monkeypatch.setattr(bench, "decode", timed)


def test_tables_fit_80_columns(run: Bench, model: str, prompts: str, steady: None) -> None:
    code, out, err = run(model, "--prompts", prompts, "--drafter", "all", "--vs-transformers", *QUICK)
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    for name in ("copy", "talk", "all", "prompt_lookup", "recycling", "none", "transformers_lookup"):
        assert name in out
    speed = next(line for line in out.splitlines() if "recycling" in line)
    assert "2.00×" in speed
    assert "2.00 – 2.00" in speed
    assert "hybrid: left out, needs a draft model (--draft)" in " ".join(out.split())
    assert "float32" in out
    assert "batch 1" in err  # progress


def test_widest_figures_fit_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_specdec.cli.bench import show

    monkeypatch.setenv("COLUMNS", "80")
    show(made_up_report())
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "transformers_lookup" in out
    assert "prompt_lookup 75%, none 25%" in " ".join(out.split())


def test_refusal(run: Bench, model: str, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def unsteady(loaded: LoadedModel, inputs: Any, method: Method, tokens: int) -> Run:
        calls.append(0)
        run = decode(loaded, inputs, method, tokens)
        return Run(float(len(calls)), run.tokens, run.arrivals, run.events, run.stats)

    monkeypatch.setattr(bench, "decode", unsteady)
    code, out, _ = run(model, "--prompts", prompts, "--categories", "talk", "--no-ideal", *QUICK)
    assert code == 0
    assert "the plain runs themselves differ by" in out
    assert "×" not in out
    assert "let the machine do nothing else" in out
    assert "–" in next(line for line in out.splitlines() if "auto" in line)


def test_files(run: Bench, model: str, prompts: str, tmp_path: Path, steady: None) -> None:
    target, out = tmp_path / "deep" / "result.json", tmp_path / "out"
    arguments = (model, "--prompts", prompts, "--json", str(target), "--out", str(out), "--batch", "1,2", *QUICK)
    code, stdout, err = run(*arguments)
    assert code == 0
    assert "speed-up" in stdout
    data = json.loads(target.read_text())
    assert data == json.loads((out / "results.json").read_text())
    assert data["command"][:3] == ["hf-specdec", "bench", model]
    assert data["settings"]["batch_sizes"] == [1, 2]
    assert data["prompts"]["file"] == prompts
    for name in ("speedup_by_category.png", "cost_curve.svg", "speedup_by_batch.png"):
        assert (out / name).stat().st_size > 4000
        assert name in err
    assert "fill a batch of 2: 1." in stdout


def test_json_to_stdout(run: Bench, model: str, prompts: str) -> None:
    code, out, _ = run(model, "--prompts", prompts, "--categories", "talk", "--json", "-", "--no-ideal", *QUICK)
    assert code == 0
    data = json.loads(out)
    assert [case["category"] for case in data["cases"]] == ["talk"]
    assert data["cost_curves"] == []


def test_formats(run: Bench, model: str, prompts: str, tmp_path: Path, steady: None) -> None:
    arguments = (model, "--prompts", prompts, "--categories", "talk", "--no-ideal", "--drafter", "recycling", *QUICK)
    code, out, _ = run(*arguments, "--format", "quiet")
    assert (code, out) == (0, "1 recycling 2.000\n")
    target = tmp_path / "result.json"
    code, out, _ = run(*arguments, "--format", "json", "--json", str(target))
    assert code == 0
    assert json.loads(out) == json.loads(target.read_text())


def test_without_matplotlib(
    run: Bench, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "has_matplotlib", lambda: False)
    code, _, err = run(model, "--prompts", prompts, "--out", str(tmp_path), "--no-ideal", *QUICK)
    assert code == 0
    assert (tmp_path / "results.json").exists()
    assert sum("pip install 'hf-specdec[bench]'" in line for line in err.splitlines()) == 1


def test_draft_model(run: Bench, model: str, prompts: str) -> None:
    arguments = ("--prompts", prompts, "--categories", "talk", "--draft", model, "--drafter", "all")
    code, out, _ = run(model, *arguments, "--vs-transformers", "--json", "-", *QUICK)
    assert code == 0
    data = json.loads(out)
    methods = data["cases"][0]["methods"]
    assert {"draft_model", "hybrid", "transformers_draft"} <= set(methods)
    assert data["draft"]["parameters"] == data["target"]["parameters"]
    assert data["cost_curves"][0]["draft_step"] > 0
    assert not data["failures"]


def test_ctrl_c_prints_what_is_finished(run: Bench, model: str, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def stopping(loaded: LoadedModel, inputs: Any, method: Method, tokens: int) -> Run:
        calls.append(method.name)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return decode(loaded, inputs, method, tokens)

    monkeypatch.setattr(bench, "decode", stopping)
    code, out, _ = run(model, "--prompts", prompts, "--no-ideal", *QUICK)
    assert code == 130
    assert "interrupted" in out
    assert "copy" in out


def test_failing_drafter_is_exit_code_1(run: Bench, model: str, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(loaded: LoadedModel, inputs: Any, method: Method, tokens: int) -> Run:
        if method.name == "recycling":
            raise RuntimeError("no kernel for it")
        return decode(loaded, inputs, method, tokens)

    monkeypatch.setattr(bench, "decode", failing)
    arguments = ("--prompts", prompts, "--drafter", "recycling", "--drafter", "none", "--no-ideal")
    code, out, _ = run(model, *arguments, *QUICK)
    assert code == 1
    assert "recycling at batch 1: RuntimeError: no kernel for it" in out
    assert "  none" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--categories", "poetry"], "no prompts of the category 'poetry'"),
        (["--prompts", "nothing.jsonl"], "can't be read"),
        (["--drafter", "crystal_ball"], "no drafter 'crystal_ball'"),
        (["--drafter", "hybrid"], "Name one with --draft"),
        (["--json", "."], ". can't be written (Is a directory)"),
        (["--batch", "64"], "A batch of 64 needs"),
        (["--dtype", "int3"], "`dtype` must be one of"),
    ],
)
def test_errors_are_one_line(run: Bench, model: str, arguments: list[str], message: str) -> None:
    code, out, err = run(model, *arguments)
    assert code == 1
    assert out == ""
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "crystal_ball"], "no drafter 'crystal_ball'"),
        (["--drafter", "hybrid"], "Name one with --draft"),
        (["--json", "{place}"], "{place} can't be written"),
        (["--out", "{place}"], "results.json can't be written"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(
    run: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(demo, "load_demo_model", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "results.json").mkdir()
    code, _, err = run(*(each.format(place=tmp_path) for each in arguments))
    assert code == 1
    assert message.format(place=tmp_path) in " ".join(err.split())


def test_trying_a_place_leaves_nothing_there(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("kept")
    for file in (old, tmp_path / "new.json"):
        cli_bench._make_places(str(file), None)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.json", "kept")]


@pytest.mark.parametrize("to_stdout", [True, False])
def test_call_that_fell_back(
    run: Bench, model: str, prompts: str, monkeypatch: pytest.MonkeyPatch, to_stdout: bool
) -> None:
    def broken(self: PromptLookup, rows: Any, length: int) -> Any:
        raise RuntimeError("lost the index")

    monkeypatch.setattr(PromptLookup, "propose", broken)
    arguments = ["--prompts", prompts, "--categories", "copy", "--drafter", "prompt_lookup", "--no-ideal"]
    code, out, err = run(model, *arguments, *(["--json", "-"] if to_stdout else []), *QUICK)
    assert code == 0, err
    assert "lost the index" in out
    if to_stdout:
        (ours,) = (each for each in json.loads(out)["summaries"] if each["method"] == "prompt_lookup")
        assert sum(ours["fallback_reasons"].values()) == 2


def test_a_category_is_no_markup(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # a bar is drawn
    monkeypatch.setenv("COLUMNS", "80")
    with progress.show_count() as tell:
        tell("batch 1, [/x]", 1, 2)
    assert "batch 1, [/x]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch", "one"], ["--batch", "0"], ["--batch", "2,2"], ["--batch", ""], ["--trials", "1"],
        ["--json", "-", "--format", "quiet"],
    ],
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(run: Bench, arguments: list[str]) -> None:
    code, out, err = run("model", *arguments)
    assert code == 2
    assert out == ""
    assert "Usage" in err
