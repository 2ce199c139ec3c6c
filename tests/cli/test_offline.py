"""`hf-specdec generate --prompts`: options and output, and jobs in real processes that are killed for real."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_specdec import cli
from hf_specdec.tools.offline import run_job
from hf_specdec.tools.offline_records import JobSettings
from hf_specdec.tools.progress import show_job

from ..tools.tiny_job import read, save_job_model, write_prompts


ROOT = Path(__file__).parent.parent.parent
RECORDS, TOKENS = 100, 32
COMMAND = ("-m", "hf_specdec.cli", "generate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    save_job_model(folder / "model")
    write_prompts(folder / "in.jsonl", RECORDS)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    """What the job writes if nothing happens to it."""
    run_job(settings(folder, batch_size=40), folder / "in.jsonl", folder / "whole.jsonl")
    return (folder / "whole.jsonl").read_bytes()


def settings(folder: Path, batch_size: int = 2) -> JobSettings:
    model = str(folder / "model")
    return JobSettings(model, temperature=1.0, seed=7, max_new_tokens=TOKENS, batch_size=batch_size)


def arguments(folder: Path, out: Path) -> list[str]:
    """The same settings on the command line."""
    return [
        str(folder / "model"), "--prompts", str(folder / "in.jsonl"), "--out", str(out), "--temperature", "1", "--seed",
        "7", "--max-new-tokens", str(TOKENS), "--batch-size", "2", "--json",
    ]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def launch(*command: str, **more: str) -> subprocess.Popen[str]:
    """Start Python; what it prints is kept."""
    return subprocess.Popen(
        [sys.executable, *command], env=environment(**more), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finished(out: Path) -> list[int]:
    """Batches in the part files, complete lines only."""
    lines = [
        line for path in sorted(Path(f"{out}.parts").glob("part-*")) for line in path.read_bytes().split(b"\n")[:-1]
    ]
    return [json.loads(line)["batch"] for line in lines]


def kill_after(process: subprocess.Popen[str], out: Path, batches: int) -> int:
    """Kill a job, and all of its processes, when it has finished some batches; returns how many it had."""
    deadline = time.monotonic() + 300
    while len(finished(out)) < batches:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing is written"
        time.sleep(0.02)
    family = psutil.Process(process.pid)
    for each in [family, *family.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()
    done = finished(out)
    assert not out.exists(), "it was over before it was killed"
    assert len(done) == len(set(done)) < RECORDS // 2
    return len(done)


class TestOptions:
    @pytest.fixture
    def run(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[int, str, str]]:
        def run(*given: str) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "argv", ["hf-specdec", "generate", *given])
            with pytest.raises(SystemExit) as exit_info:
                cli.main()
            out, err = capsys.readouterr()
            return int(exit_info.value.code or 0), out, err

        return run

    @pytest.mark.parametrize(
        "given",
        [
            ["--prompts", "in"],
            ["--out", "out"],
            ["--prompt", "a", "--prompts", "in", "--out", "out"],
            ["--prompt", "a", "--restart"],
            ["--prompt", "a", "--batch-size", "2"],
            ["--prompt", "a", "--engine", "ray"],
            ["--prompts", "in", "--out", "out", "--engine", "cloud"],
            ["--prompts", "in", "--out", "out", "--workers", "2"],
            ["--prompts", "in", "--out", "out", "--batch-size", "0"],
        ],
    )
    def test_wrong_usage_is_exit_code_2(self, run: Any, given: list[str]) -> None:
        code, out, err = run("model", *given)
        assert (code, out) == (2, "")
        assert "Usage" in err

    def test_summary_warnings_and_exit_codes(self, run: Any, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "abc"}\nnonsense\n')
        given = [
            str(folder / "model"),
            "--prompts",
            str(tmp_path / "in.jsonl"),
            "--out",
            str(tmp_path / "new" / "out.jsonl"),
        ]
        given += ["--max-new-tokens", "4"]
        code, out, err = run(*given, "--json")
        summary = json.loads(out)
        assert code == 0
        assert (summary["schema_version"], summary["records"], summary["errors"], summary["tokens"]) == (1, 2, 1, 4)
        assert "record 1 is skipped: line 2: not a line of JSON" in err
        assert "2/2 " in err
        assert "tokens/s" in err
        code, out, err = run(*given, "--strict")
        assert (code, out) == (1, "")
        assert "nothing left to do" in err
        assert "1 of 2 records skipped" in err
        code, _, err = run(*given, "--seed", "1")
        assert code == 1
        assert err.startswith("error: ")
        assert "seed was 0 and is 1" in err
        assert run(*given, "--seed", "1", "--restart")[0] == 0

    @pytest.mark.parametrize("given", [(), ("--off",), ("--json",)])
    @pytest.mark.parametrize(
        "saved", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}, {"penalty_alpha": 0.6}]
    )
    def test_one_answer_whatever_the_model_has_saved(
        self, run: Any, tmp_path: Path, saved: dict[str, Any], given: tuple[str, ...]
    ) -> None:
        model, config = save_job_model(tmp_path), tmp_path / "generation_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | saved | {"top_k": 4}))
        temperature = "1" if "num_return_sequences" in saved else "0"
        code, out, err = run(model, "--prompt", "abc", "--max-new-tokens", "4", "--temperature", temperature, *given)
        assert code == 0, err
        assert (json.loads(out)["text"] if given == ("--json",) else out).strip("\n")

    def test_ray_is_missing(self, run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        code, _, err = run(*arguments(folder, tmp_path / "out.jsonl"), "--engine", "ray")
        assert code == 1
        assert "pip install 'hf-specdec[ray]'" in err


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    clock = iter((0.0, 10.0, 20.0))
    monkeypatch.setattr("hf_specdec.tools.progress.time.monotonic", lambda: next(clock, 20.0))
    with show_job() as (tell, warn):
        tell(100, 1000, 50)  # 100 of them were there before
        tell(200, 1000, 100)
        warn("record 3 is skipped: [why]")
    err = capsys.readouterr().err
    assert "200/1000 5.0 tokens/s, 0:01:20 left" in err.replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert "record 3 is skipped: [why]\n" in err.replace("\r", "")


@pytest.mark.slow
class TestKilled:
    def test_one_process_then_two_ranks(self, folder: Path, whole: bytes, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        done = kill_after(launch(*COMMAND, *arguments(folder, out)), out, batches=3)
        accelerate = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
        accelerate += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
        process = launch(*accelerate, *COMMAND, *arguments(folder, out), ACCELERATE_USE_CPU="true")
        printed = process.communicate(timeout=300)[0]
        assert process.returncode == 0, printed
        assert f'"generated_records": {RECORDS - 2 * done},' in printed
        assert printed.count("schema_version") == 1  # the first rank alone speaks
        assert out.read_bytes() == whole
        assert not Path(f"{out}.parts").exists()

    def test_two_ranks_then_one_process(self, folder: Path, whole: bytes, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        done = kill_after(launch(*torchrun, *COMMAND, *arguments(folder, out)), out, batches=4)
        summary = run_job(settings(folder), folder / "in.jsonl", out)
        assert summary is not None
        assert summary["generated_records"] == RECORDS - 2 * done
        assert out.read_bytes() == whole


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A small Ray cluster on this machine."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray isn't installed")
    import ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(RAY_USAGE_STATS_ENABLED="0").items():
            patch.setenv(name, value)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # Ray keeps a token there
        context = ray.init(
            "local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False
        )
        yield context.address_info["address"]
        ray.shutdown()


@pytest.mark.slow
def test_ray_driver_is_killed(folder: Path, whole: bytes, tmp_path: Path, cluster: str) -> None:
    out = tmp_path / "out.jsonl"
    process = launch(*COMMAND, *arguments(folder, out), "--engine", "ray", "--workers", "2", RAY_ADDRESS=cluster)
    done = kill_after(process, out, batches=3)
    summary = run_job(settings(folder), folder / "in.jsonl", out, engine="ray", workers=1)
    assert summary is not None
    assert summary["generated_records"] == RECORDS - 2 * done
    assert out.read_bytes() == whole
    assert [record["index"] for record in read(out)] == list(range(RECORDS))
