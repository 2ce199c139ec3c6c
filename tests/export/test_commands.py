"""The commands of other engines, by version: golden texts, quoting, refusals."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.errors import SpecDecError
from hf_specdec.export import ENGINES, Setup, export, load_engine
from hf_specdec.export.engines import ExportRefused
from hf_specdec.export.render import DRAFTERS


STANDALONE = (
    "python -m sglang.launch_server --model-path T --speculative-algorithm STANDALONE --speculative-draft-model-path X "
    "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
)
VLLM_DRAFT = (
    'vllm serve T --speculative-config \'{"method": "draft_model", "model": "X", "num_speculative_tokens": 4}\''
)
VLLM_NGRAM = (
    'vllm serve T --speculative-config \'{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1, '
    '"num_speculative_tokens": 4}\''
)
LLAMA_NEW = "llama-server -m T.gguf -md X.gguf --spec-type draft-simple --spec-draft-n-max 4 --spec-draft-p-min 0.4"
LLAMA_NGRAM = (
    "llama-server -m T.gguf --spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 4"
)
GOLDEN = [
    ("vllm", "0.7.3", "draft_model", "vllm serve T --speculative-model X --num-speculative-tokens 4"),
    ("vllm", "0.6.0", "draft_model", "vllm serve T --speculative-model X --num-speculative-tokens 4"),
    ("vllm", "0.8.5", "draft_model", 'vllm serve T --speculative-config \'{"model": "X", "num_speculative_tokens": 4}\''),
    ("vllm", "0.8.1", "draft_model", "vllm serve T --speculative-model X --num-speculative-tokens 4"),
    ("vllm", "0.8.2", "draft_model", 'vllm serve T --speculative-config \'{"model": "X", "num_speculative_tokens": 4}\''),
    ("vllm", "0.9.2", "draft_model", 'vllm serve T --speculative-config \'{"model": "X", "num_speculative_tokens": 4}\''),
    ("vllm", "0.15.0", "draft_model", VLLM_DRAFT),
    ("vllm", "0.16.0", "draft_model", VLLM_DRAFT),
    ("vllm", "0.20.2", "draft_model", VLLM_DRAFT),
    ("vllm", "0.24.0", "draft_model", VLLM_DRAFT),
    ("vllm", "v0.33.0+cu130", "draft_model", VLLM_DRAFT),
    (
        "vllm", "0.7.3", "prompt_lookup",
        "vllm serve T --speculative-model '[ngram]' --num-speculative-tokens 4 --ngram-prompt-lookup-max 4 "
        "--ngram-prompt-lookup-min 1",
    ),
    ("vllm", "0.12.0", "prompt_lookup", VLLM_NGRAM),
    ("vllm", "0.33.0", "prompt_lookup", VLLM_NGRAM),
    ("llama-cpp", "b8953", "draft_model", "llama-server -m T.gguf -md X.gguf --draft-max 4 --draft-p-min 0.4"),
    ("llama-cpp", "b9134", "draft_model", LLAMA_NEW),
    ("llama-cpp", "11312", "draft_model", LLAMA_NEW),
    ("llama-cpp", "b11312-0c1e57098", "draft_model", LLAMA_NEW),
    ("llama-cpp", "b11312", "prompt_lookup", LLAMA_NGRAM),
    ("tgi", "3.3.7", "prompt_lookup", "text-generation-launcher --model-id T --speculate 4"),
    ("sglang", "0.5.2", "draft_model", STANDALONE),
    ("sglang", "0.5.23", "draft_model", STANDALONE),
    (
        "sglang", "0.5.23", "prompt_lookup",
        "python -m sglang.launch_server --model-path T --speculative-algorithm NGRAM --speculative-num-draft-tokens 5",
    ),
    ("mlx-lm", "0.32.2", "draft_model", "mlx_lm.server --model T --draft-model X --num-draft-tokens 4"),
]  # fmt: skip
REFUSED = [
    ("vllm", "0.10.0", "draft_model", "0.10 to 0.14 has no draft models", "Upgrade to 0.15"),
    ("vllm", "0.14.1", "draft_model", "0.10 to 0.14 has no draft models", "--method prompt_lookup"),
    ("llama-cpp", "b8954", "draft_model", "were being renamed", "9134 or newer"),
    ("llama-cpp", "b9133", "draft_model", "were being renamed", "9134 or newer"),
    ("tgi", "3.3.7", "draft_model", "never taken a draft model", "vllm, sglang or llama-cpp"),
    ("sglang", "0.5.1", "draft_model", "from 0.5.2 on", "Upgrade"),
    ("sglang", "0.5.2", "prompt_lookup", "from 0.5.3 on", "Upgrade"),
    ("mlx-lm", "0.24.0", "draft_model", "from 0.24.1 on", "Upgrade"),
    ("mlx-lm", "0.32.2", "prompt_lookup", "no n-gram drafts", "--draft"),
    ("custom-generate", "5.17.0", "hybrid", "5.18 or newer", "Upgrade"),
]
ODD = ["./my model", "it's; touch pwned && $HOME `id`", 'say "hi"', "back\\slash", "模型/草稿 ü", "{target}", "%s"]
SHELL = [engine for engine in ENGINES if engine not in ("openvino", "transformers", "custom-generate")]


def setup(method: str = "draft_model", **changes: Any) -> Setup:
    draft = None if method in ("prompt_lookup", "recycling") else "X"
    return Setup(**({"target": "T", "draft": draft, "method": method, "num_draft_tokens": 4} | changes))


@pytest.mark.parametrize(("engine", "version", "method", "command"), GOLDEN)
def test_golden(engine: str, version: str, method: str, command: str) -> None:
    assert export(engine, setup(method), version=version).command == command


@pytest.mark.parametrize(("version", "flag", "key"), [
    ("1.0.0", "--extra_llm_api_options", "speculative_model_dir"),
    ("1.2.1", "--extra_llm_api_options", "speculative_model_dir"),
    ("1.3.0rc4", "--config", "speculative_model"),
])  # fmt: skip
def test_tensorrt_llm_reads_a_file(version: str, flag: str, key: str) -> None:
    found = export("tensorrt-llm", setup(), version=version)
    assert found.argv == ("trtllm-serve", "T", flag, "speculative.yaml")
    assert json.loads(found.files["speculative.yaml"]) == {
        "disable_overlap_scheduler": True,
        "speculative_config": {"decoding_type": "Draft_Target", "max_draft_len": 4, key: "X"},
    }


@pytest.mark.parametrize(("engine", "version", "method", "reason", "instead"), REFUSED)
def test_refusals_say_why_and_what_to_do(engine: str, version: str, method: str, reason: str, instead: str) -> None:
    with pytest.raises(ExportRefused) as refusal:
        export(engine, setup(method), version=version)
    assert reason in str(refusal.value)
    assert instead in str(refusal.value)


def test_names_begin_as_they_are_written() -> None:
    assert str(ExportRefused("vLLM can't", "Upgrade")) == "vLLM can't. Upgrade."
    assert str(ExportRefused("before 1.0 it can't", "Upgrade")) == "Before 1.0 it can't. Upgrade."


@pytest.mark.parametrize(
    ("version", "added"),
    [
        ("0.16.0", {}),
        ("0.21.0", {}),  # the setting is there, and draft models don't heed it
        ("0.22.0", {"draft_sample_method": "probabilistic"}),
        ("0.33.0", {"draft_sample_method": "probabilistic"}),
    ],
)
def test_vllm_samples_drafts_above_temperature_0(version: str, added: dict[str, Any]) -> None:
    greedy, sampled = (
        json.loads(export("vllm", setup(temperature=each), version=version).argv[-1]) for each in (0.0, 0.7)
    )
    assert sampled == greedy | added


def test_other_vocabulary_sizes() -> None:
    found = export("vllm", setup(), version="0.25.0", other_sizes=True)
    assert json.loads(found.argv[-1])["use_heterogeneous_vocab"] is True
    assert any("use_heterogeneous_vocab" in note for note in found.notes)
    assert "assistant_tokenizer=assistant_tokenizer" in export("transformers", setup(), other_sizes=True).command
    with pytest.raises(ExportRefused, match="same size"):
        export("vllm", setup(), version="0.24.0", other_sizes=True)


class TestQuoting:
    @pytest.mark.parametrize("odd", ODD)
    @pytest.mark.parametrize("engine", SHELL)
    def test_a_shell_passes_on_what_was_meant(self, engine: str, odd: str, tmp_path: Path) -> None:
        method = "prompt_lookup" if engine == "tgi" else "draft_model"
        found = export(engine, setup(method, target=odd, draft=f"{odd}-draft" if method == "draft_model" else None))
        stand_in = f"{found.argv[0]}() {{ printf '%s\\0' \"$@\"; }}\n"
        done = subprocess.run(
            ["bash", "-c", stand_in + found.command], capture_output=True, cwd=tmp_path, check=True, timeout=20
        )
        assert done.stdout.decode().split("\0")[:-1] == list(found.argv[1:])
        assert {file.name for file in tmp_path.iterdir()} == set(found.files)
        for name, text in found.files.items():
            assert (tmp_path / name).read_text() == text

    @pytest.mark.parametrize("odd", ODD)
    def test_json_holds_the_path(self, odd: str) -> None:
        config = json.loads(shlex.split(export("vllm", setup(draft=odd)).command)[-1])
        assert config["model"] == odd
        text = export("tensorrt-llm", setup(draft=odd)).files["speculative.yaml"]
        assert json.loads(text)["speculative_config"]["speculative_model_dir"] == odd

    @pytest.mark.parametrize("odd", ODD)
    @pytest.mark.parametrize("engine", ["openvino", "transformers", "custom-generate"])
    def test_python_holds_the_path(self, engine: str, odd: str) -> None:
        found = export(engine, setup(target=odd, draft=odd, folder=odd))
        wanted = f"{odd.rpartition('/')[2]}-openvino" if engine == "openvino" else odd
        codes = [found.command, *(text for name, text in found.files.items() if name.endswith(".py"))]
        for code in codes:
            assert wanted in {each.value for each in ast.walk(ast.parse(code)) if isinstance(each, ast.Constant)}


def test_names_of_converted_models() -> None:
    argv = export("llama-cpp", setup(target="Qwen/Qwen3-8B", draft="/models/draft-Q8_0.gguf")).argv
    assert argv[2], argv[4] == ("Qwen3-8B.gguf", "/models/draft-Q8_0.gguf")


class TestVersions:
    def test_no_version_is_the_newest_known(self) -> None:
        found = export("llama-cpp", setup())
        assert found.version == "b11312"
        assert "no version was given" in str(found.doubt)
        assert "llama-server --version" in str(found.doubt)

    def test_a_newer_one_is_doubted(self) -> None:
        found = export("vllm", setup(), version="0.34.0")
        assert found.command == VLLM_DRAFT
        assert "0.34.0 is newer than vLLM 0.33.0" in str(found.doubt)
        assert export("vllm", setup(), version="0.33.0").doubt is None

    def test_a_pre_release_is_what_it_leads_to(self) -> None:
        assert "draft_sample_method" in export("vllm", setup(temperature=1.0), version="0.24.0rc2").command

    @pytest.mark.parametrize(
        ("engine", "version"), [("vllm", "newest"), ("llama-cpp", "0c1e57098"), ("llama-cpp", "1.2")]
    )
    def test_what_is_none_says_how_to_find_it(self, engine: str, version: str) -> None:
        with pytest.raises(SpecDecError, match="--version` prints it"):
            export(engine, setup(), version=version)


class TestDrafters:
    def test_hybrid_is_nearest_to_its_draft_model(self) -> None:
        found = export("vllm", setup("hybrid"))
        assert found.command == export("vllm", setup()).command
        assert found.method == "draft_model"
        assert "drafts alone" in found.notes[0]

    def test_recycling_has_nothing_like_it(self) -> None:
        with pytest.raises(ExportRefused, match="nearest is --method prompt_lookup"):
            export("vllm", setup("recycling"))

    def test_unknown(self) -> None:
        with pytest.raises(SpecDecError, match="crystal_ball"):
            export("custom-generate", setup("crystal_ball"))

    def test_the_names_are_those_of_the_drafters(self) -> None:
        from hf_specdec.drafters import DRAFTERS as known

        assert set(DRAFTERS) == set(known) - {"none"}

    def test_a_length_is_needed(self) -> None:
        with pytest.raises(SpecDecError, match="--num-draft-tokens"):
            export("vllm", setup(num_draft_tokens=None))
        assert "num_draft_tokens" not in export("custom-generate", setup(num_draft_tokens=None)).files["README.md"]


def test_unknown_engine() -> None:
    with pytest.raises(SpecDecError, match="vllm, llama-cpp"):
        load_engine("ollama")
