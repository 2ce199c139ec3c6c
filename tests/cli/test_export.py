"""`hf-specdec export`: the command line around the rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.cli import export
from hf_specdec.export import ENGINES, vocabularies

from .test_cli import run


__all__ = ["run"]

Run = Callable[..., tuple[int, str, str]]
VLLM = 'vllm serve T --speculative-config \'{"method": "draft_model", "model": "X", "num_speculative_tokens": 4}\'\n'
PAIR = ("T", "--draft", "X", "--num-draft-tokens", "4")


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., str]:
    """Writes the report of a check."""

    def write(acceptance: dict[str, Any] | None = None, **recommended: Any) -> str:
        record = {
            "schema_version": 1,
            "kind": "check",
            "target": {"name": "T"},
            "draft": "X",
            "drafter": "auto",
            "acceptance": {
                "drafter": "draft_model",
                "num_draft_tokens": 5,
                "per_position": [0.8, 0.5],
                "sampled": {"temperature": 1.0},
                "families": {"A1": 0.6, "A2": 0.7, "B1": 0.6, "B2": 0.4},
            }
            | (acceptance or {}),
            "recommendation": {
                "verdict": "on", "drafter": "auto", "draft_model": "X", "num_draft_tokens": 2, "reasons": [],
            } | recommended,
            "passed": True,
        }  # fmt: skip
        (tmp_path / "check.json").write_text(json.dumps(record))
        return str(tmp_path / "check.json")

    return write


def test_quiet_is_the_bare_command(run: Run) -> None:
    for flag in (("-q",), ("--format", "quiet")):
        code, out, err = run("export", "vllm", *PAIR, "--engine-version", "0.33.0", *flag)
        assert code == 0
        assert out == VLLM
        assert "vocabularies are unverified" in err


def test_human_says_what_is_known(run: Run) -> None:
    code, out, err = run("export", "vllm", *PAIR)
    assert code == 0
    assert out.startswith(VLLM)
    told = out.removeprefix(VLLM)
    assert all(len(line) <= 80 for line in told.splitlines())
    for expected in (
        "vLLM 0.33.0, draft_model, 4 draft tokens a step",
        "unverified",
        "no prediction: not measured",
        "hf-specdec watch http://localhost:8000",
        "vllm/config/speculative.py",
        "vllm-project/vllm#24322",
    ):
        assert expected in told
    assert "warning: no version was given" in err


def test_json(run: Run, report: Any) -> None:
    code, out, err = run("export", "llama-cpp", "--from", report(), "--engine-version", "b11312", "--format", "json")
    data = json.loads(out)
    assert code == 0
    assert err == ""
    assert set(data) == {
        "schema_version", "kind", "engine", "engine_version", "checked_version", "target", "draft", "method",
        "num_draft_tokens", "command", "language", "argv", "files", "vocabulary", "acceptance", "after_launch", "notes",
        "warnings", "sources", "checked", "refused",
    }  # fmt: skip
    assert data["schema_version"] == export.SCHEMA_VERSION
    assert data["kind"] == "export"
    assert (data["engine_version"], data["checked_version"]) == ("b11312", "b11312")
    assert data["argv"][:5] == ["llama-server", "-m", "T.gguf", "-md", "X.gguf"]
    assert data["vocabulary"]["verdict"] == "unverified"
    assert data["acceptance"]["mean_acceptance_length"] == pytest.approx(2.2)
    assert data["after_launch"][0].startswith("hf-specdec watch http://localhost:8080 --compare ")
    assert data["refused"] is None


class TestRefusals:
    def test_reason_and_way_out_on_stderr(self, run: Run) -> None:
        for flags in ((), ("-q",)):
            code, out, err = run("export", "tgi", *PAIR, *flags)
            assert code == 1
            assert out == ""
            assert "never taken a draft model" in err
            assert "Export to vllm, sglang or llama-cpp" in err

    def test_json(self, run: Run) -> None:
        code, out, err = run("export", "vllm", *PAIR, "--engine-version", "0.12.0", "--json")
        data = json.loads(out)
        assert code == 1
        assert data["schema_version"] == export.SCHEMA_VERSION
        assert "0.10 to 0.14" in data["refused"]["reason"]
        assert "0.15" in data["refused"]["instead"]
        assert "0.10 to 0.14" in err

    @pytest.mark.parametrize("verdict", ["refused", "other sizes"])
    def test_vocabularies(self, run: Run, monkeypatch: pytest.MonkeyPatch, verdict: str) -> None:
        found = vocabularies.VocabularyCheck(verdict, ("the sizes are 10 and 20",))
        monkeypatch.setattr(vocabularies, "check", lambda *names, **options: found)
        code, out, err = run("export", "vllm", *PAIR, "--engine-version", "0.24.0", "-q")
        assert (code, out) == (1, "")
        assert "Take another draft model" in err
        code, out, err = run("export", "vllm", *PAIR, "--engine-version", "0.33.0", "-q")
        if verdict == "other sizes":
            assert code == 0
            assert '"use_heterogeneous_vocab": true' in out
            assert "10 and 20" in err
        else:
            assert code == 1


class TestFrom:
    def test_all_comes_from_the_check(self, run: Run, report: Any) -> None:
        code, out, _ = run("export", "vllm", "--from", report())
        assert code == 0
        assert out.startswith(VLLM.replace("4}", "2}"))
        assert "60% of the draft tokens accepted, 2.20 tokens a step" in " ".join(out.split())

    def test_options_come_first(self, run: Run, report: Any) -> None:
        out = run("export", "vllm", "other", "--from", report(), "--draft", "Y", "--num-draft-tokens", "7", "-q")[1]
        assert out.startswith("vllm serve other ")
        assert '"model": "Y", "num_speculative_tokens": 7' in out

    def test_other_models_were_not_measured(self, run: Run, report: Any) -> None:
        for other in (("T", "--draft", "Y"), ("other",)):
            assert "not measured" in run("export", "vllm", *other, "--from", report())[1]

    def test_sampling(self, run: Run, report: Any) -> None:
        out = " ".join(run("export", "mlx-lm", "--from", report(), "--temperature", "1")[1].split())
        assert "family B2" in out
        assert "28% of the draft tokens accepted, 1.56 tokens a step" in out

    def test_drafts_are_sampled_where_that_is_accepted_more_often(self, run: Run, report: Any) -> None:
        arguments = ("--engine-version", "0.33.0", "--temperature", "1")
        assert "probabilistic" in run("export", "vllm", "--from", report(), *arguments)[1]
        other = report({"families": {"A1": 0.7, "A2": 0.6, "B1": 0.7, "B2": 0.4}})
        out = run("export", "vllm", "--from", other, *arguments)[1]
        assert "probabilistic" not in out
        assert "family A1" in out

    def test_hybrid_becomes_its_draft_model(self, run: Run, report: Any) -> None:
        code, out, _ = run("export", "vllm", "--from", report({"drafter": "hybrid"}))
        assert code == 0
        assert '"method": "draft_model"' in out
        assert "measured with hybrid here" in " ".join(out.split())

    def test_recycling_is_refused_with_the_nearest(self, run: Run, report: Any) -> None:
        path = report({"drafter": "recycling"}, draft_model=None, drafter="recycling")
        code, _, err = run("export", "vllm", "--from", path)
        assert code == 1
        assert "nearest is --method prompt_lookup" in err

    def test_off_is_refused_unless_asked_for(self, run: Run, report: Any) -> None:
        path = report(verdict="off", reasons=["Batch 1: 0.90 × plain decoding."], num_draft_tokens=0)
        code, out, err = run("export", "vllm", "--from", path)
        assert (code, out) == (1, "")
        assert "0.90 × plain decoding" in err
        code, out, _ = run(
            "export", "vllm", "--from", path, "--method", "draft_model", "--num-draft-tokens", "3", "-q"
        )
        assert code == 0
        assert '"num_speculative_tokens": 3' in out

    def test_the_largest_batch_is_told(self, run: Run, report: Any) -> None:
        out = " ".join(run("export", "tgi", "--from", report(max_batch=8), "--method", "prompt_lookup")[1].split())
        assert "gain up to batch 8: serve larger ones without it" in out
        out = run("export", "tensorrt-llm", "--from", report(max_batch=8), "--json")[1]
        assert any('"max_concurrency": 8' in note for note in json.loads(out)["notes"])

    @pytest.mark.parametrize(
        ("text", "wrong"),
        [
            (None, "can't be read"),
            ("{", "isn't JSON"),
            ('{"kind": "bench", "schema_version": 1}', "is a benchmark"),
            ('{"kind": "check", "schema_version": 1}', "lacks what it should have"),
            ('{"kind": "check", "schema_version": 9}', "schema version 9"),
        ],
    )
    def test_other_files(self, run: Run, tmp_path: Path, text: str | None, wrong: str) -> None:
        file = tmp_path / "record.json"
        if text is not None:
            file.write_text(text)
        code, out, err = run("export", "vllm", "--from", str(file))
        assert (code, out) == (1, "")
        assert wrong in err
        assert err.count("\n") == 1


def test_custom_generate_writes_its_folder(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code, out, err = run("export", "custom-generate", "T", "--method", "recycling", "--out", str(folder), "-q")
    assert code == 0
    assert out == f'output = model.generate(**inputs, custom_generate="{folder}", trust_remote_code=True)\n'
    assert "Written: " in err
    assert '"drafter": "recycling"' in (folder / "custom_generate" / "generate.py").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ("vllm",),
        ("vllm", "T"),
        ("vllm", "T", "--method", "prompt_lookup"),
        ("vllm", "T", "--method", "draft_model", "--num-draft-tokens", "4"),
        ("vllm", *PAIR, "-q", "--json"),
        ("vllm", *PAIR, "--num-draft-tokens", "0"),
        ("vllm", *PAIR, "--confidence-threshold", "2"),
        (),
    ],
)
def test_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run("export", *arguments)
    assert code == 2
    assert out == ""
    assert "Usage" in err


def test_unknown_engine(run: Run) -> None:
    code, _, err = run("export", "ollama", *PAIR)
    assert code == 2
    assert "ollama" in err
    assert "llama-cpp" in err


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_answers(run: Run, engine: str, tmp_path: Path) -> None:
    method = ("--draft", "X") if engine != "tgi" else ("--method", "prompt_lookup")
    arguments = ("T", *method, "--num-draft-tokens", "4", "--out", str(tmp_path / "out"), "--temperature", "0.7")
    code, out, _ = run("export", engine, *arguments)
    assert code == 0
    assert "after launch" in out
