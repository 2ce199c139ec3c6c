"""The Space: its card, what it installs, how it gets to the Hub, and that it runs as it will lie there."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import pickle
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement


pytest.importorskip("gradio")

import gradio as gr
import huggingface_hub.cli.hf
from huggingface_hub import HfApi, SpaceCard

from hf_specdec import SpecDecError
from hf_specdec.web import zerogpu
from hf_specdec.web.settings import Limits, RunSettings
from hf_specdec.web.timeline import Comparison, Side

from .tools.tiny_chat import save_tiny_chat_model


ROOT = Path(__file__).parent.parent
SPACE = ROOT / "space"
WORKFLOW = ROOT / ".github" / "workflows" / "space.yml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ZEROGPU_TORCH = ("2.8.0", "2.9.1", "2.10.0", "2.11.0")
COLORS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
START_SECONDS = 240  # far more than it takes, for machines that do much else


class TestCard:
    @pytest.fixture
    def card(self) -> dict[str, Any]:
        return SpaceCard.load(SPACE / "README.md").data.to_dict()

    def test_gradio_is_what_the_tests_run_with(self, card: dict[str, Any]) -> None:
        assert card["sdk"] == "gradio"
        assert card["sdk_version"] == version("gradio")
        assert f"gradio=={card['sdk_version']}" in PROJECT["dependency-groups"]["test"]
        assert f"gradio=={card['sdk_version']}" in (SPACE / "README.md").read_text(encoding="utf-8")

    def test_fields_that_the_hub_checks(self, card: dict[str, Any]) -> None:
        assert (SPACE / card["app_file"]).is_file()
        assert card["python_version"] == "3.12"  # a string: 3.10 as a number would be 3.1
        assert {card["colorFrom"], card["colorTo"]} <= COLORS
        assert len(card["short_description"]) <= 60
        assert card["license"] == "apache-2.0"
        assert card["suggested_hardware"] == "cpu-basic"
        assert card["pinned"] is False
        assert card["title"]
        assert card["emoji"]

    def test_models_are_those_of_the_page(self, card: dict[str, Any]) -> None:
        from hf_specdec.web.models import families

        offered = families(on_gpu=True).values()
        assert set(card["models"]) == {each.name for each in offered} | {each.draft for each in offered if each.draft}


class TestRequirements:
    @pytest.fixture
    def required(self) -> dict[str, Requirement]:
        lines = (SPACE / "requirements.txt").read_text(encoding="utf-8").splitlines()
        found = [Requirement(line) for line in lines if line and not line.startswith("#")]
        return {each.name: each for each in found}

    def test_what_the_package_needs(self, required: dict[str, Requirement]) -> None:
        project = PROJECT["project"]
        needed = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
        expected = {each.name: each for each in map(Requirement, needed)}
        assert required.keys() == expected.keys()
        assert all(required[name] == expected[name] for name in expected if name != "torch")
        (pin,) = required["torch"].specifier
        assert pin.operator == "=="
        assert pin.version in ZEROGPU_TORCH
        assert expected["torch"].specifier.contains(pin.version)


@pytest.mark.skipif(not WORKFLOW.exists(), reason="not a checkout: workflows aren't part of the source distribution")
class TestWorkflow:
    @pytest.fixture
    def workflow(self) -> dict[str, Any]:
        loaded: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
        return loaded | {"on": loaded[True]}  # YAML 1.1 reads `on` as true

    @pytest.fixture
    def steps(self, workflow: dict[str, Any]) -> list[dict[str, Any]]:
        (job,) = workflow["jobs"].values()
        return list(job["steps"])

    def test_when_it_runs(self, workflow: dict[str, Any]) -> None:
        assert workflow["on"]["push"]["branches"] == ["main"]
        assert {"space/**", "hf_specdec/**"} <= set(workflow["on"]["push"]["paths"])
        assert "workflow_dispatch" in workflow["on"]
        assert "vars.SPACE_ID != ''" in workflow["jobs"]["deploy"]["if"]

    def test_it_may_do_little(self, workflow: dict[str, Any], steps: list[dict[str, Any]]) -> None:
        assert workflow["permissions"] == {}
        assert workflow["jobs"]["deploy"]["permissions"] == {"contents": "read"}
        actions = [step["uses"] for step in steps if "uses" in step]
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)
        assert [step["name"] for step in steps if "secrets." in json.dumps(step)] == ["Upload"]
        assert not any("${{" in step.get("run", "") for step in steps), "values go through env, not into the script"

    def test_upload_is_a_command_that_hf_knows(
        self, steps: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The line runs through the real command; only the calls that would reach the Hub are replaced."""
        calls: dict[str, dict[str, Any]] = {}

        def answer(name: str) -> Any:
            def call(self: HfApi, **given: Any) -> Any:
                calls[name] = given
                return SimpleNamespace(repo_id=given["repo_id"])

            return call

        for name in ("create_repo", "upload_folder"):
            monkeypatch.setattr(HfApi, name, answer(name))
        (line,) = [line.strip() for line in steps[-1]["run"].splitlines() if line.strip().startswith("hf ")]
        (tmp_path / "space").mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [each.replace("$SPACE_ID", "org/name") for each in shlex.split(line)])
        with contextlib.suppress(SystemExit):
            huggingface_hub.cli.hf.main()
        given = calls["upload_folder"]
        assert (given["repo_id"], given["folder_path"], given["path_in_repo"]) == ("org/name", "space", ".")
        assert given["repo_type"] == "space"
        assert given["delete_patterns"] == ["*"]

    def test_without_the_secret_nothing_is_uploaded(self, steps: list[dict[str, Any]], tmp_path: Path) -> None:
        called = tmp_path / "called"
        hf = tmp_path / "hf"
        hf.write_text(f'#!/bin/sh\necho "$@" > {called}\n')
        hf.chmod(0o755)

        def upload(token: str) -> str:
            env = {"PATH": f"{tmp_path}:/bin:/usr/bin", "HF_TOKEN": token, "SPACE_ID": "org/name", "GITHUB_SHA": "f00"}
            return subprocess.run(
                ["bash", "-e", "-c", steps[-1]["run"]], env=env, capture_output=True, text=True, check=True
            ).stdout

        assert "::notice::" in upload("")
        assert not called.exists()
        upload("secret")
        assert called.read_text().startswith("upload org/name space . --repo-type space")
        assert "secret" not in called.read_text()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny model of one's own, named as a Space names it."""
    folder = str(save_tiny_chat_model(tmp_path / "tiny"))
    monkeypatch.setenv("HF_SPECDEC_DEMO_TARGET", folder)
    return folder


class TestApp:
    def run(self) -> dict[str, Any]:
        return runpy.run_path(str(SPACE / "app.py"), run_name="space")

    def test_own_models(self, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_SPECDEC_DEMO_DRAFT", tiny)
        names = self.run()
        (family,) = names["offered"].values()
        assert (family.target, family.draft) == (tiny, tiny)
        assert isinstance(names["page"], gr.Blocks)
        assert not names["IS_ZEROGPU"]

    def test_zerogpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_SPECDEC_DEMO_TARGET", raising=False)
        monkeypatch.setenv("SPACES_ZERO_GPU", "true")
        asked: list[dict[str, Any]] = []

        def gpu(**options: Any) -> Callable[[Any], Any]:
            asked.append(options)
            return lambda task: task

        monkeypatch.setitem(sys.modules, "spaces", SimpleNamespace(GPU=gpu))
        names = self.run()
        assert names["IS_ZEROGPU"]
        assert next(iter(names["offered"])) == "qwen3"
        assert asked == [{"duration": zerogpu.duration}]

    def test_spaces_comes_first(self) -> None:
        """Not even torch may be imported before it."""
        code = (SPACE / "app.py").read_text(encoding="utf-8")
        imported = re.findall(r"^ *(?:import|from) ([\w.]+)", code, re.MULTILINE)
        assert imported[:2] == ["os", "spaces"]


def test_runs_as_it_lies_on_the_hub(tiny: str, tmp_path: Path) -> None:
    """The workflow's layout, in a process that knows no checkout, opened as a browser does."""
    folder = tmp_path / "space"
    shutil.copytree(SPACE, folder, ignore=shutil.ignore_patterns("__pycache__", "hf_specdec"))
    shutil.copytree(ROOT / "hf_specdec", folder / "hf_specdec", ignore=shutil.ignore_patterns("__pycache__"))
    prompts = folder / "hf_specdec" / "web" / "examples.jsonl"
    prompts.write_text(prompts.read_text(encoding="utf-8").replace("Code edit", "Of the copy"), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # if another process takes it meanwhile, the next free one is served, and printed
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "app.py"], cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )
    try:
        page = opened(process, tmp_path / "log")
    finally:
        process.terminate()
        process.wait(30)
        log.close()
    assert "Of the copy" in page
    assert "sd-prompt" in page


def opened(process: subprocess.Popen[Any], log: Path) -> str:
    """A page, as soon as its address is printed."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if address := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            with urllib.request.urlopen(address[0], timeout=30) as answer:
                return str(answer.read().decode())
        time.sleep(0.25)
    raise AssertionError(f"not served: {log.read_text()}")


class TestZeroGpu:
    """With a `spaces.GPU` that treats a task as the real one does: values are pickled, errors lose their type."""

    settings = RunSettings(prompt="hi", max_new_tokens=96)

    @pytest.fixture
    def workers(self) -> SimpleNamespace:
        log = SimpleNamespace(durations=[], closed=0, lost=[])

        def GPU(*, duration: Callable[..., int]) -> Callable[[Any], Any]:
            def decorate(task: Any) -> Any:
                assert inspect.isgeneratorfunction(task)

                @functools.wraps(task)
                def run(*arguments: Any) -> Iterator[Any]:
                    log.durations.append(duration(*arguments))
                    running = task(*pickle.loads(pickle.dumps(arguments)))
                    try:
                        for value in running:
                            yield pickle.loads(pickle.dumps(value))
                    except GeneratorExit:
                        running.close()
                        log.closed += 1
                        raise
                    except gr.Error as error:
                        raise pickle.loads(pickle.dumps(error)) from None
                    except Exception as error:
                        log.lost.append(error)
                        raise gr.Error(type(error).__name__, title="ZeroGPU worker error") from None

                return run

            return decorate

        log.GPU = GPU
        return log

    def record(self, key: str, settings: RunSettings, limits: Limits, title: str) -> Iterator[tuple[str, Comparison]]:
        self.limits = limits
        found = Comparison(Side(), Side(), {}, key, "", title=title)
        yield "loading", found
        if settings.prompt == "bad":
            raise SpecDecError("The prompt has 9 tokens; at most 3 are taken here. Shorten it.")
        if settings.prompt == "none left":
            raise gr.Error('No quota. <a href="https://example.org">Sign in</a>', print_exception=False)
        yield "done", found

    def test_runs(self, workers: SimpleNamespace) -> None:
        run = zerogpu.on_zerogpu(workers.GPU)(self.record)
        stages = [(stage, found.model) for stage, found in run("qwen3", self.settings, Limits(), "own prompt")]
        assert stages == [("loading", "qwen3"), ("done", "qwen3")]

    @pytest.mark.parametrize(("tokens", "most"), [(8, 60.0), (96, 60.0), (256, 60.0), (256, 7.0)])
    def test_both_sides_end_in_the_time_asked_for(self, workers: SimpleNamespace, tokens: int, most: float) -> None:
        run = zerogpu.on_zerogpu(workers.GPU)(self.record)
        list(run("qwen3", RunSettings(prompt="hi", max_new_tokens=tokens), Limits(seconds=most), ""))
        assert self.limits.seconds <= most
        assert 2 * self.limits.seconds + zerogpu.OTHER_SECONDS <= workers.durations[0] <= 120

    def test_errors_keep_their_message_and_the_worker(
        self, workers: SimpleNamespace, caplog: pytest.LogCaptureFixture
    ) -> None:
        run = zerogpu.on_zerogpu(workers.GPU)(self.record)
        with caplog.at_level(logging.INFO), pytest.raises(SpecDecError, match=r"^The prompt has 9 tokens; at most 3"):
            list(run("qwen3", RunSettings(prompt="bad"), Limits(), ""))
        assert workers.lost == []
        assert caplog.records == []

    def test_zerogpus_own_errors(self, workers: SimpleNamespace) -> None:
        run = zerogpu.on_zerogpu(workers.GPU)(self.record)
        with pytest.raises(SpecDecError, match=r"^No quota. Sign in$"):
            list(run("qwen3", RunSettings(prompt="none left"), Limits(), ""))

    def test_stop_reaches_the_worker(self, workers: SimpleNamespace) -> None:
        running = zerogpu.on_zerogpu(workers.GPU)(self.record)("qwen3", self.settings, Limits(), "")
        next(running)
        running.close()  # type: ignore[attr-defined]
        assert workers.closed == 1
