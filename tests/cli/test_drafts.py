"""`hf-specdec drafts`: the table, the JSON, and what it says when nothing is reachable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from hf_specdec import SpecConfig
from hf_specdec.cli import drafts
from hf_specdec.selection import pick

from ..selection.fake_hub import FakeHub
from .test_cli import run


__all__ = ["run"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A Hub in memory in the place of the real one."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    hub = FakeHub(tmp_path)
    monkeypatch.setitem(pick.pick.__kwdefaults__, "hub", hub)
    return hub


def test_table(run: Run, hub: FakeHub) -> None:
    code, out, _ = run("drafts", "Qwen/Qwen3-8B")
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    assert out.index("Qwen/Qwen3-0.6B") < out.index("Qwen/Qwen3-1.7B") < out.index("AngelSlim/Qwen3-8B_eagle3")
    for expected in ("fits", "rejected", "1.66 GB", "1.47×", "too large", "not yet runnable here", "to download"):
        assert expected in out
    assert "unverified, " not in out


def test_the_line_to_paste_is_python(run: Run, hub: FakeHub) -> None:
    line = run("drafts", "Qwen/Qwen3-8B")[1].splitlines()[-1]
    namespace: dict[str, object] = {}
    exec(f"import hf_specdec\nconfig = dict({line})", namespace)
    assert namespace["config"] == {"speculative": SpecConfig(draft_model="Qwen/Qwen3-0.6B")}


def test_json(run: Run, hub: FakeHub) -> None:
    code, out, _ = run("drafts", "Qwen/Qwen3-8B", "--json")
    data = json.loads(out)
    assert code == 0
    assert set(data) == {"schema_version", "target", "chosen", "candidates"}
    assert data["schema_version"] == drafts.SCHEMA_VERSION
    assert data["target"] == "Qwen/Qwen3-8B"
    assert data["chosen"] == {"id": "Qwen/Qwen3-0.6B", "kind": "draft_model", "verified": True}
    fields = {"id", "kind", "verdict", "reasons", "memory_bytes", "predicted_speedup"}
    assert all(set(each) == fields for each in data["candidates"])
    assert all(each["reasons"] for each in data["candidates"])
    rejected = next(each for each in data["candidates"] if each["id"] == "Qwen/Qwen3-4B")
    assert rejected["verdict"] == "rejected"
    assert "0.61 of the target's" in rejected["reasons"][0]


def test_quiet_is_the_id_or_nothing(run: Run, hub: FakeHub) -> None:
    assert run("drafts", "Qwen/Qwen3-8B", "--format", "quiet")[:2] == (0, "Qwen/Qwen3-0.6B\n")
    assert run("drafts", "HuggingFaceTB/SmolLM2-360M-Instruct", "--format", "quiet")[:2] == (0, "")


def test_nothing_pays(run: Run, hub: FakeHub) -> None:
    arguments = ("drafts", "HuggingFaceTB/SmolLM2-360M-Instruct")
    assert json.loads(run(*arguments, "--json")[1])["chosen"] is None
    code, out, _ = run(*arguments)
    assert code == 0
    assert "No draft model" in out
    assert "too large" in out
    assert out.splitlines()[-1] == "speculative=True"


@pytest.mark.parametrize("how", ["option", "environment"])
def test_offline_is_unverified(run: Run, hub: FakeHub, how: str) -> None:
    hub.offline = how == "environment"
    option = ("--offline",) if how == "option" else ()
    code, out, _ = run("drafts", "Qwen/Qwen3-8B", *option)
    assert code == 0
    assert "unverified" in out
    assert "Qwen/Qwen3-0.6B, unverified" in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines())
    code, out, err = run("drafts", "Qwen/Qwen3-8B", *option, "--json")
    data = json.loads(out)
    assert data["chosen"] == {"id": "Qwen/Qwen3-0.6B", "kind": "draft_model", "verified": False}
    assert data["candidates"][0]["verdict"] == "unverified"
    assert "unverified" in err


def test_unknown_target_is_one_line(run: Run, hub: FakeHub) -> None:
    code, out, err = run("drafts", "acme/Nowhere")
    assert code == 1
    assert out == ""
    assert err.startswith("error: acme/Nowhere")
    assert err.count("\n") == 1


def test_local_folder(run: Run, hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["./tuned-Instruct"] = hub.repositories["Qwen/Qwen3-8B"].__class__(
        id="./tuned-Instruct",
        config=hub.repositories["Qwen/Qwen3-8B"].config,
        source="path",
        complete=True,
        files=("tokenizer.json",),
    )
    hub.tokenizers["./tuned-Instruct"] = "qwen-3"
    assert json.loads(run("drafts", "./tuned-Instruct", "--json")[1])["chosen"]["id"] == "Qwen/Qwen3-0.6B"


def test_refresh(run: Run, hub: FakeHub) -> None:
    run("drafts", "Qwen/Qwen3-8B")
    hub.words["Qwen/Qwen3-0.6B"] = ["other"]
    again, fresh = (json.loads(run("drafts", "Qwen/Qwen3-8B", "--json", *more)[1]) for more in ((), ("--refresh",)))
    assert again["chosen"]["id"] == "Qwen/Qwen3-0.6B"
    assert fresh["chosen"]["id"] == "Qwen/Qwen3-1.7B"
