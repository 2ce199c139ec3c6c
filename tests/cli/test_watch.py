"""`hf-specdec watch`: output, exit codes, errors."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.tools.watch import follow

from ..tools.stand_in import Reply, metrics, served


Run = Callable[..., tuple[int, str, str]]
QUICK = ("--interval", "0.1", "--for", "0.1")


@pytest.fixture
def run(shell: Any) -> Run:
    return partial(shell, "watch")


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., str]:
    """Writes what a check measured."""

    def write(rate: float) -> str:
        path = tmp_path / "check.json"
        acceptance = {
            "draft_acceptance_rate": rate, "draft_acceptance_rate_interval": [rate - 0.02, rate + 0.02],
            "mean_acceptance_length": 3.8, "per_position": [0.9] * 5, "num_draft_tokens": 5,
        }  # fmt: skip
        path.write_text(json.dumps({"schema_version": 1, "kind": "check", "acceptance": acceptance}))
        return str(path)

    return write


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama_cpp", "tgi"])
def test_interval_fits_80_columns(run: Run, engine: str) -> None:
    with served(metrics(f"{engine}_before"), metrics(f"{engine}_after")) as server:
        code, out, err = run(server.url, *QUICK)
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "since it was started: speculation is on" in " ".join(out.split())
    assert "tokens a step" in out
    row = out[out.index("time ") :].splitlines()[1].split()
    assert len(row) == 7
    if engine == "vllm":
        assert row[2:] == ["7,640", "10,000", "5,600", "56%", "3.80"]
        assert "82% 80% 82% 80% 81%" in out


def test_a_model_s_name_moves_no_cursor(run: Run) -> None:
    text = metrics("vllm_before")
    assert isinstance(text, str)
    name = text.partition('model_name="')[2].partition('"')[0]
    with served(text.replace(name, "\x1b[2Jmodel")) as server:
        code, out, _ = run(server.url, "--once")
    assert code == 0
    assert "[2Jmodel" in out
    assert "\x1b" not in out


def test_once(run: Run) -> None:
    with served(metrics("vllm_after")) as server:
        code, out, _ = run(server.url, "--once")
        assert server.asked == ["/metrics"]
        quiet = run(server.url, "--once", "--format", "quiet")
        data = json.loads(run(server.url, "--once", "--json")[1])
    assert code == 0
    assert "55% of the drafted" in out
    assert quiet[:2] == (0, "active 0.547 3.733\n")
    assert data["schema_version"] == 1
    assert data["since"] == "start"
    assert data["draft_acceptance_rate"] == pytest.approx(8200 / 15000)


def test_json_is_an_object_a_line(run: Run, report: Callable[..., str]) -> None:
    with served(metrics("vllm_before"), metrics("vllm_after")) as server:
        code, out, _ = run(server.url, *QUICK, "--format", "json", "--compare", report(0.56))
    first, interval, total = map(json.loads, out.splitlines())
    assert code == 0
    assert [each["since"] for each in (first, interval, total)] == ["start", "interval", "watch"]
    assert interval["num_draft_tokens"] == total["num_draft_tokens"] == 10000
    assert first["comparison"] is None
    assert total["comparison"]["verdict"] == "as measured"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("vllm_unused", "unused"),
        ("vllm_off", "off"),
        ("llama_cpp_unused", "unused"),
        ("sglang_off", "off"),
        ("tgi_off", "off"),
    ],
)
def test_off_and_unused_are_exit_code_1(run: Run, text: str, status: str) -> None:
    with served(metrics(text)) as server:
        code, out, _ = run(server.url, "--once", "--format", "quiet")
        assert (code, out.split()[:2]) == (1, [status, "-"])
        out = " ".join(run(server.url, "--once")[1].split())
    said = "loaded but never used" if status == "unused" else "Is it switched on?"
    assert said in out


def test_nothing_generated_is_exit_code_3(run: Run) -> None:
    with served(metrics("vllm_after")) as server:
        code, out, _ = run(server.url, *QUICK)
    assert code == 3
    assert "nothing can be told" in " ".join(out.split())


@pytest.mark.parametrize(("rate", "verdict", "expected"), [(0.56, "as measured", 0), (0.9, "far below", 1)])
def test_compare(run: Run, report: Callable[..., str], rate: float, verdict: str, expected: int) -> None:
    with served(metrics("vllm_before"), metrics("vllm_after")) as server:
        code, out, _ = run(server.url, *QUICK, "--compare", report(rate))
    assert code == expected
    text = " ".join(out.split())
    assert f"Acceptance 56%; the check lets expect {rate - 0.02:.0%} to {rate + 0.02:.0%}: {verdict}." in text
    assert ("same quantisation" in text) == (verdict == "far below")
    assert all(len(line) <= 80 for line in out.splitlines())


def test_nothing_is_asked_before_the_report_is_read(run: Run, tmp_path: Path) -> None:
    with served(metrics("vllm_after")) as server:
        code, _, err = run(server.url, "--compare", str(tmp_path / "nothing.json"))
        assert server.asked == []
    assert code == 1
    assert "can't be read" in err


def test_ctrl_c_ends_with_the_verdict(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow.time, "sleep", interrupted)
    with served(metrics("vllm_after")) as server:
        code, out, _ = run(server.url)
    assert code == 0
    assert out.count("since it was started") == 2  # no interval was finished


def test_a_server_that_goes_away(run: Run) -> None:
    with served(metrics("vllm_before"), Reply("down", 503)) as server:
        code, out, err = run(server.url, *QUICK)
    assert code == 1
    assert ("HTTP 503" in err, err.count("\n")) == (True, 1)
    assert "since it was started" in out


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply("", 404), "has no metrics (HTTP 404)"),
        (Reply("", 401), "HF_SPECDEC_API_KEY"),
        (Reply("<html>"), "a web page"),
        (Reply("vllm:spec_decode_num_drafts_total 1", missing=3), "broke off"),
        (Reply("vllm:spec_decode_num_drafts_total x\n"), "Line 1"),
        (Reply("", delay=5), "didn't answer within 0.2 s"),
    ],
)
def test_errors_are_one_line(run: Run, reply: Reply, message: str) -> None:
    with served(reply) as server:
        code, out, err = run(server.url, "--once", "--timeout", "0.2")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_key_comes_from_the_environment_and_is_not_printed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_SPECDEC_API_KEY", "sk-secret")
    with served(metrics("vllm_after")) as server:
        results = [run(server.url, "--once", "--format", form) for form in ("human", "json")]
    assert server.keys == ["Bearer sk-secret"] * 2
    assert not any("sk-secret" in text for result in results for text in result[1:])


def test_one_answer(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"timings": {"predicted_n": 44, "draft_n": 60, "draft_n_accepted": 30}})
    path = tmp_path / "answer.json"
    path.write_text(answer)
    assert run("--response", str(path), "--format", "quiet")[:2] == (0, "active 0.500 3.308\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(answer.encode())))
    assert run("--response", "-", "--format", "quiet")[1] == "active 0.500 3.308\n"
    code, _, err = run("--response", str(tmp_path / "nothing.json"))
    assert code == 1
    assert "can't be read" in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["http://localhost:1", "--response", "a.json"],
        ["http://localhost:1", "--engine", "ollama"],
        ["http://localhost:1", "--once", "--for", "3"],
        ["http://localhost:1", "--interval", "0"],
    ],
)
def test_wrong_usage_is_exit_code_2(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage" in err


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd"])
def test_only_http(run: Run, url: str) -> None:
    code, _, err = run(url, "--once")
    assert code == 1
    assert "such as http://localhost:8000" in err
