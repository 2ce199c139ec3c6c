"""`hf-specdec explain`: output, picture, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.tools import drawing

from ..tools.test_plots import made_up_report


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(shell: Any) -> Run:
    return partial(shell, "explain")


def test_tables_fit_80_columns(run: Run) -> None:
    code, out, err = run("--acceptance", "0.7", "--cost-ratio", "0.1", "--num-draft-tokens", "5", "--batch", "8")
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    best, yours = (
        next(line for line in out.splitlines() if line.rstrip().endswith(mark)) for mark in ("best", "yours")
    )
    assert best.split()[:4] == ["2", "2.19", "1.53", "1.43×"]
    assert yours.split()[:4] == ["5", "2.94", "2.25", "1.31×"]
    text = " ".join(out.split())
    assert "pays from 29% acceptance on" in text
    assert "a draft step may cost up to 0.51 of the target's" in text
    assert "What limits most: acceptance." in text
    assert "never" in out
    assert "By batch size" in out


def test_widest_figures_fit_80_columns(run: Run) -> None:
    chances = ",".join(["0.999"] * 24)
    wide = ("--cost-ratio", "0.0123456", "--overhead", "0.0123456", "--num-draft-tokens", "200")
    code, out, _ = run("--acceptance", chances, *wide)
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())


def test_loses(run: Run) -> None:
    text = " ".join(run("--acceptance", "0.2", "--cost-ratio", "0.5")[1].split())
    assert "Drafting doesn't pay under these conditions" in text
    text = " ".join(run("--acceptance", "0.9", "--cost-ratio", "3")[1].split())
    assert "would lose even if every draft token were accepted" in text


def test_json_and_quiet(run: Run) -> None:
    data = json.loads(run("--format", "json", "--acceptance", "0.8")[1])
    assert data == json.loads(run("--json", "--acceptance", "0.8")[1])
    assert data["schema_version"] == 1
    assert data["best"]["num_draft_tokens"] == int(run("--format", "quiet", "--acceptance", "0.8")[1])
    assert data["from"] is None
    assert run("--format", "quiet", "--acceptance", "0.1", "--cost-ratio", "1")[1] == "0\n"


def test_from_a_benchmark(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(made_up_report().to_dict()))
    code, out, _ = run("--from", str(path))
    assert code == 0
    assert "Measured: org/Model-1B, prompt_lookup, batch 1, from a benchmark" in out
    assert "75% of the rounds have a draft" in " ".join(out.split())
    data = json.loads(run("--from", str(path), "--method", "recycling", "--cost-ratio", "0.3", "--json")[1])
    assert data["conditions"]["draft_cost"] == 0.3  # what is given goes before what was measured
    assert "recycling" in data["from"]


@pytest.mark.parametrize(
    ("name", "more"),
    [("gain.png", []), ("deep/gain.svg", ["--verify-cost", "1,1.1,1.2", "--acceptance", "0.9,0.8"])],
)
def test_picture(run: Run, tmp_path: Path, name: str, more: list[str]) -> None:
    target = tmp_path / name
    code, out, err = run("--plot", str(target), *more)
    assert code == 0
    assert "draft" in out
    assert target.stat().st_size > 8000
    assert str(target) in err


def test_without_matplotlib(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "has_matplotlib", lambda: False)
    code, out, err = run("--plot", str(tmp_path / "gain.png"))
    assert (code, out) == (1, "")
    assert "pip install 'hf-specdec[bench]'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--acceptance", "1.5"], "from 0 to 1, got 1.5"),
        (["--acceptance", "nan"], "from 0 to 1, got nan"),
        (["--acceptance", ",".join(["0.9"] * 40 + ["inf"])], "from 0 to 1, got inf"),
        (["--cost-ratio", "-1"], "draft step must be"),
        (["--verify-cost", "0,1"], "positive numbers"),
        (["--plot", "gain.bmp"], "must end in .png"),
        (["--from", "nothing.json"], "can't be read"),
    ],
)
def test_errors_are_one_line(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--acceptance", "high"],
        ["--verify-cost", "1,"],
        ["--num-draft-tokens", "0"],
        ["--batch", "0"],
        ["--method", "auto"],
    ],
)
def test_wrong_usage_is_exit_code_2(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage" in err
