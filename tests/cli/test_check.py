"""`hf-specdec check`: output, files, exit codes."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_specdec.check import run as check_run
from hf_specdec.check.verdict import OFF
from hf_specdec.cli import check as cli_check
from hf_specdec.tools import demo

from ..check.made_up import GREEDY, report, speed
from ..tools.tiny_chat import save_tiny_chat_model


Outcome = tuple[int, str, str]
Check = Callable[..., Outcome]
QUICK = ("--quick", "--max-prompts", "3", "--max-new-tokens", "8", "--sampled-tokens", "20", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [
        '{"prompt": "abcabcabc", "category": "[red]copy"}',
        "not a record",
        '{"messages": [{"role": "user", "content": "你好"}]}',
    ]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def run(shell: Any, tmp_path: Path) -> Check:
    return partial(shell, "check", "--save", str(tmp_path / "state"))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the command find a report that was made up."""

    def plant(**changes: Any) -> None:
        monkeypatch.setattr(check_run, "run_check", lambda *_, **__: report(**changes))

    return plant


def test_a_whole_check(run: Check, model: str, prompts: str, tmp_path: Path, one_thread: None) -> None:
    files = [tmp_path / "deep" / name for name in ("check.json", "report.html", "report.md")]
    arguments = [
        text
        for name, file in zip(("--json", "--html", "--markdown"), files, strict=True)
        for text in (name, str(file))
    ]
    code, out, err = run(model, "--prompts", prompts, *QUICK, *arguments)
    data = json.loads(files[0].read_text())
    assert code == (2 if data["recommendation"]["verdict"] == OFF else 0), (out, err)
    assert data["passed"]
    assert data["kind"] == "check"
    assert data["prompts"]["bad_records"] == [{"line": 2, "reason": "isn't JSON (Expecting value)"}]
    assert "skipped: line 2: isn't JSON" in err
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "[red]copy" in out
    assert "Records that are no prompts" in out
    assert files[1].read_text().startswith("<!doctype html>")
    assert files[2].read_text().startswith("# PASS")
    assert "check.json" in err


def test_control_characters_of_a_file_reach_no_terminal(run: Check, model: str, tmp_path: Path) -> None:
    """Categories, ids, and what is said of bad records are a user's texts."""
    path = tmp_path / "prompts.jsonl"
    records = [{"prompt": "abcabc", "category": "\x1b[2Jcopy\x9b1m", "id": "\x1b]0;title\x07"}, {"\x1b[31mother": 1}]
    path.write_text("\n".join(map(json.dumps, records)))
    files = [tmp_path / name for name in ("report.html", "report.md")]
    _, out, err = run(model, "--prompts", str(path), *QUICK, "--html", str(files[0]), "--markdown", str(files[1]))
    assert "copy" in out
    for text in (out, err, *(file.read_text() for file in files)):
        assert not {"\x1b", "\x9b", "\x07"} & set(text)


def test_json_to_stdout(run: Check, planted: Callable[..., None]) -> None:
    planted()
    for arguments in (["--json", "-"], ["--format", "json"]):
        code, out, _ = run("model", *arguments)
        assert code == 0
        assert json.loads(out)["schema_version"] == 1


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({}, 0, "on"),
        ({"speed 8": speed(8, 0.8)}, 0, "on with settings"),
        ({"speed 1": speed(1, 0.8), "speed 8": speed(8, 0.8)}, 2, "off"),
        ({"greedy": GREEDY | {"verdict": "fail"}}, 1, "FAIL"),
        ({"interrupted": True, "speed 8": None}, 130, "off"),
    ],
)
def test_exit_codes(run: Check, planted: Callable[..., None], changes: dict[str, Any], code: int, word: str) -> None:
    planted(**changes)
    assert run("model", "--format", "quiet")[:2] == (code, f"{word}\n")


def test_what_people_see(run: Check, planted: Callable[..., None]) -> None:
    planted()
    code, out, _ = run("model")
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "PASS, lossless. Verdict: on." in out
    assert out.splitlines()[-1] == "speculative=True"
    assert "1.80×" in out
    planted(greedy=GREEDY | {"verdict": "fail", "mismatches": 3, "same": 5})
    code, out, _ = run("model")
    assert code == 1
    assert "FAIL: switch it off." in out
    assert "speculative=" not in out


def test_a_table_from_standard_input(run: Check, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"id,q\n1,abcabc\n")))
    found: list[Any] = []
    monkeypatch.setattr(check_run, "run_check", lambda settings, reading, *_, **__: found.append(reading) or report())
    assert run(model, "--prompts", "-", "--column", "q")[0] == 0
    assert [prompt.text for prompt in found[0].suite.prompts] == ["abcabc"]


def test_the_package_s_own_prompts_are_told(run: Check, model: str) -> None:
    code, out, _ = run(model, "--static")
    assert code == 0
    assert "not yours" in " ".join(out.split())
    assert "LlamaForCausalLM" in out
    assert "Nothing was measured" in out


def test_quick_is_less_and_yields_to_options(monkeypatch: pytest.MonkeyPatch, run: Check) -> None:
    found: list[Any] = []
    monkeypatch.setattr(check_run, "run_check", lambda settings, *_, **__: found.append(settings) or report())
    run("model", "--quick", "--batch", "1,2")
    run("model")
    quick, usual = found
    assert (quick.batch_sizes, quick.most_prompts) == ((1, 2), 8)
    assert quick.sampled_tokens < usual.sampled_tokens
    assert usual.most_prompts == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "nothing.jsonl"], "can't be read"),
        (["--drafter", "crystal_ball"], "no drafter 'crystal_ball'"),
        (["--drafter", "hybrid"], "Name one with --draft"),
        (["--json", "."], ". can't be written (Is a directory)"),
        (["--temperature", "0"], "`temperature` must be above 0"),
    ],
)
def test_errors_are_one_line_before_a_model_is_loaded(
    run: Check, model: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(demo, "load_demo_model", lambda *_, **__: pytest.fail("loaded"))
    code, out, err = run(model, *arguments)
    assert code == 1
    assert out == ""
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch", "one"],
        ["--batch", "2,2"],
        ["--trials", "1"],
        ["--column", "x"],
        ["--format", "xml"],
        ["--format", "quiet", "--json", "-"],
    ],
)
def test_wrong_usage_is_exit_code_2(run: Check, arguments: list[str]) -> None:
    code, out, err = run("model", *arguments)
    assert code == 2
    assert out == ""
    assert "Usage" in err


def test_quick_settings_are_settings() -> None:
    check_run.CheckSettings(target="x", **cli_check.QUICK)
