"""The command line: help, output, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_specdec import cli
from hf_specdec.tools import demo

from ..tools.tiny_chat import save_tiny_chat_model


Run = Callable[..., tuple[int, str, str]]
COMMANDS = cli.COMMANDS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def run(shell: Any) -> Run:
    run: Run = shell
    return run


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_ends_with_examples(run: Run, command: tuple[str, ...], flag: str) -> None:
    code, out, _ = run(*command, flag)
    assert code == 0
    examples = out.partition("Examples:")[2]
    assert "hf-specdec" in examples
    assert all(len(line) <= 80 for line in out.splitlines())


def test_help_names_every_command(run: Run) -> None:
    out = run("-h")[1]
    for command in COMMANDS:
        assert f" {command} " in out


def test_defaults_are_shown(run: Run) -> None:
    out = " ".join(run("demo", "-h")[1].replace("│", " ").split())
    assert "SmolLM2-135M-Instruct, fetched once" in out
    assert "four that come with the package" in out


def test_no_arguments_is_help() -> None:
    result = CliRunner().invoke(cli.app, [])
    assert result.exit_code == 2
    assert "Usage" in result.output


def test_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("hf-specdec ")


def test_help_loads_no_torch() -> None:
    code = (
        "import sys, hf_specdec.cli\n"
        f"for arguments in [['-h'], ['--version'], *([name, '-h'] for name in {COMMANDS})]:\n"
        "    sys.argv = ['hf-specdec', *arguments]\n"
        "    try:\n        hf_specdec.cli.main()\n    except SystemExit:\n        pass\n"
        "    heavy = {'torch', 'transformers', 'huggingface_hub', 'numpy', 'prometheus_client'} & set(sys.modules)\n"
        "    assert not heavy, (arguments, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_no_other(command: str) -> None:
    code = (
        "import sys, hf_specdec.cli\n"
        f"sys.argv = ['hf-specdec', {command!r}, '-h']\n"
        "try:\n    hf_specdec.cli.main()\nexcept SystemExit:\n    pass\n"
        f"others = {{f'hf_specdec.cli.{{name}}' for name in {COMMANDS} if name != {command!r}}} & set(sys.modules)\n"
        "assert not others, others"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


def test_a_misspelt_command_is_suggested(run: Run) -> None:
    code, _, err = run("chek")
    assert code == 2
    assert "'check'" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_formats(run: Run, command: str) -> None:
    assert "<human|json|quiet>" in run(command, "-h")[1]
    code, _, err = run(command, "--format", "poem")
    assert code == 2
    assert "poem" in err


@pytest.mark.parametrize("command", ["demo", "drafts", "env", "explain", "generate", "watch"])
def test_json_and_quiet_contradict_each_other(run: Run, command: str) -> None:
    argument = {"drafts": ["model"], "generate": ["model"], "watch": ["http://localhost"]}.get(command, [])
    code, out, err = run(command, *argument, "--json", "--format", "quiet")
    assert (code, out) == (2, "")
    assert "can't go with --format quiet" in " ".join(err.replace("│", " ").split())


def test_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "hf_specdec.cli", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("hf-specdec ")


class TestErrors:
    def test_failure_is_one_line_and_exit_code_1(self, run: Run, tmp_path: Path) -> None:
        code, out, err = run("generate", str(tmp_path / "nothing"), "--prompt", "hi")
        assert code == 1
        assert out == ""
        assert err.startswith("error: The model ")
        assert err.count("\n") == 1

    def test_unknown_drafter(self, run: Run, model: str) -> None:
        code, _, err = run("generate", model, "--prompt", "hi", "--drafter", "crystal_ball", "--max-new-tokens", "2")
        assert code == 1
        assert "crystal_ball" in err.splitlines()[-1]
        assert "Traceback" not in err

    @pytest.mark.parametrize(
        "arguments",
        [
            ["nonsense"],
            ["generate"],
            ["generate", "model"],
            ["demo", "--trials", "0"],
            ["demo", "--max-new-tokens", "many"],
            ["env", "--nonsense"],
            ["generate", "model", "--prompt", "hi", "--off", "--drafter", "prompt_lookup"],
        ],
    )
    def test_wrong_usage_is_exit_code_2(self, run: Run, arguments: list[str]) -> None:
        code, out, err = run(*arguments)
        assert code == 2
        assert out == ""
        assert "Usage" in err


class TestDemo:
    arguments = ("--prompt", "abcabcabc", "--prompt", "[bold]你好[/bold]", "--max-new-tokens", "12", "--trials", "1")

    def test_table(self, run: Run, model: str) -> None:
        code, out, err = run("demo", "--model", model, *self.arguments)
        assert code == 0
        assert out.count("same text: yes") == 2
        assert "abcabcabc" in out
        assert "[bold]你好[/bold]" in out
        assert "geometric mean" in out
        assert all(len(line) <= 80 for line in out.splitlines())
        assert "Warm up" in err

    def test_json(self, run: Run, model: str) -> None:
        code, out, _ = run("demo", "--model", model, *self.arguments, "--json")
        data = json.loads(out)
        assert code == 0
        assert data["schema_version"] == demo.SCHEMA_VERSION
        assert data["command"][:2] == ["hf-specdec", "demo"]
        assert data["model"] == model
        assert data["dtype"] == "float32"
        assert data["device"]
        assert data["threads"] >= 1
        assert data["versions"]["torch"]
        assert [result["prompt"]["text"] for result in data["results"]] == ["abcabcabc", "[bold]你好[/bold]"]
        assert all(result["same_text"] for result in data["results"])

    def test_quiet_is_the_speedup(self, run: Run, model: str) -> None:
        out = run("demo", "--model", model, *self.arguments, "--format", "quiet")[1]
        assert float(out) > 0

    def test_other_text_is_exit_code_1(self, run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        difference = demo.Difference(index=3, token_off=1, token_on=2, gap=4.0, band=1e-4)
        monkeypatch.setattr(demo, "find_difference", lambda *arguments: difference)
        code, out, _ = run("demo", "--model", model, *self.arguments)
        assert code == 1
        assert "same text: no (not a near-tie at token 3, gap 4)" in out
        assert "NO" in out


class TestGenerate:
    def test_streams_text_and_prints_stats(self, run: Run, model: str) -> None:
        arguments = ("generate", model, "--prompt", "abcabc", "--max-new-tokens", "16")
        code, on, err = run(*arguments)
        assert code == 0
        assert "tokens a step" in err
        off, err = run(*arguments, "--off")[1:]
        assert on == off
        assert "speculation: off" in err

    def test_json(self, run: Run, model: str) -> None:
        arguments = ("generate", model, "--prompt", "abcabc", "--max-new-tokens", "16", "--json")
        on = json.loads(run(*arguments)[1])
        off = json.loads(run(*arguments, "--off")[1])
        assert on["schema_version"] == 1
        assert on["text"] == off["text"]
        assert on["num_tokens"] == on["stats"]["num_emitted_tokens"]
        assert off["stats"] is None

    def test_quiet_is_the_text(self, run: Run, model: str) -> None:
        arguments = ("generate", model, "--prompt", "abcabc", "--max-new-tokens", "16")
        code, out, err = run(*arguments, "--format", "quiet")
        assert code == 0
        assert "tokens a step" not in err
        assert out == run(*arguments)[1]

    @pytest.mark.parametrize("drafter", [[], ["--drafter", "prompt_lookup"]])
    def test_seed_repeats_a_sample(self, run: Run, model: str, drafter: list[str]) -> None:
        arguments = ("generate", model, "--prompt", "abc", "--max-new-tokens", "16", "--temperature", "2", *drafter)
        first, again, other = (run(*arguments, "--seed", seed)[1] for seed in ("1", "1", "2"))
        assert first == again
        assert first != other

    def test_draft_model(self, run: Run, model: str) -> None:
        arguments = ("generate", model, "--prompt", "abc", "--max-new-tokens", "12", "--json")
        data = json.loads(run(*arguments, "--draft", model)[1])
        assert data["stats"]["num_draft_tokens"] > 0
        assert data["text"] == json.loads(run(*arguments, "--off")[1])["text"]


class TestEnv:
    def test_lines(self, run: Run) -> None:
        code, out, _ = run("env")
        assert code == 0
        for name in ("python", "torch", "transformers", "CPU", "memory"):
            assert f"- {name}: " in out

    def test_json_names_no_secret(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("HF_SPECDEC_DISABLE", "0")
        out = run("env", "--json")[1]
        data = json.loads(out)
        assert data["schema_version"] == 1
        assert data["settings"]["HF_SPECDEC_DISABLE"] == "0"
        assert "hf_secret" not in out

    def test_quiet_is_one_line(self, run: Run) -> None:
        code, out, _ = run("env", "--format", "quiet")
        assert (code, out.count("\n")) == (0, 1)
        assert " torch==" in out
