"""`hf-specdec demo --web`: what it offers, what it prints, and what it refuses."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ..tools.tiny_chat import save_tiny_chat_model


pytest.importorskip("gradio")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def run(shell: Any) -> Run:
    return partial(shell, "demo")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is served, without serving it."""
    seen = SimpleNamespace(families=None, options=None, blocked=False)

    def block_thread() -> None:
        seen.blocked = True

    def build(families: Any) -> Any:
        seen.families = families
        return SimpleNamespace(block_thread=block_thread)

    def launch(page: Any, **options: Any) -> Any:
        seen.options = options
        return None, "http://127.0.0.1:7860/", None

    monkeypatch.setattr("hf_specdec.web.app.build", build)
    monkeypatch.setattr("hf_specdec.web.app.launch", launch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return seen


def test_serves_the_default_families(run: Run, served: SimpleNamespace) -> None:
    code, out, _ = run("--web")
    assert code == 0
    assert "http://127.0.0.1:7860/" in out
    assert list(served.families) == ["smollm2"]
    assert served.families["smollm2"].dtype == "float32"
    assert served.options["server_port"] is None
    assert "share" not in served.options
    assert served.blocked


def test_dtype_and_port(run: Run, served: SimpleNamespace) -> None:
    assert run("--web", "--dtype", "bfloat16", "--port", "7999")[0] == 0
    assert served.families["smollm2"].dtype == "bfloat16"
    assert served.options["server_port"] == 7999


def test_own_models(run: Run, served: SimpleNamespace, model: str) -> None:
    assert run("--web", "--model", model, "--draft", model)[0] == 0
    (family,) = served.families.values()
    assert (family.target, family.draft, family.dtype) == (model, model, "float32")


def test_a_model_that_is_not_there(run: Run, served: SimpleNamespace, tmp_path: Path) -> None:
    code, out, err = run("--web", "--model", str(tmp_path / "nothing"))
    assert (code, out) == (1, "")
    assert err.startswith("error: The model ")
    assert served.options is None


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--web", "--prompt", "hi"], "--prompt"),
        (["--web", "--trials", "2"], "--trials"),
        (["--web", "--json"], "--json"),
        (["--web", "--max-new-tokens", "8"], "--max-new-tokens"),
        (["--web", "--drafter", "auto"], "--drafter"),
        (["--web", "--draft", "x"], "--model"),
        (["--web", "--port", "70000"], "--port"),
        (["--port", "7861"], "--web"),
        (["--web", "--share"], "--share"),
    ],
)
def test_what_does_not_go_together(run: Run, served: SimpleNamespace, arguments: list[str], word: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert word in err.partition("Error")[2]
    assert served.families is None


@pytest.mark.parametrize("gradio", [None, SimpleNamespace(__version__="5.49.1")])
def test_without_gradio(run: Run, monkeypatch: pytest.MonkeyPatch, gradio: Any) -> None:
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    code, out, err = run("--web")
    assert (code, out) == (1, "")
    assert "pip install 'hf-specdec[demo,web]'" in err
    assert err.count("\n") == 1


def test_a_port_that_is_taken(run: Run, model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = run("--web", "--model", model, "--port", str(port))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"error: The page can't be served on port {port}")


def test_draft_in_the_terminal(run: Run, model: str) -> None:
    code, out, _ = run(
        "--model", model, "--draft", model, "--prompt", "abc abc", "--max-new-tokens", "8", "--trials", "1"
    )
    assert code == 0
    assert "same text: yes" in out
    assert " ".join(out.split()).count(model.rpartition("/")[2]) >= 1
