"""Whether an engine would take a pair, by its own rule, from tokenizer files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.export import vocabularies

from ..vocabularies import ASCII, byte_level


PIECES = ["<s>", "</s>", "<unk>", *ASCII]


@pytest.fixture
def save(tmp_path: Path) -> Any:
    """Saves a tokenizer with a configuration, and no weights."""

    def save(name: str, tokenizer: Any, size: int | None = None) -> str:
        folder = tmp_path / name
        tokenizer.save_pretrained(folder)
        config = {
            "model_type": "llama",
            "vocab_size": size or len(tokenizer),
            "hidden_size": 8,
            "num_hidden_layers": 1,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return save


def tokenizer(pieces: Any = PIECES, added: Any = ()) -> Any:
    return byte_level(pieces, added=added, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp", "sglang", "mlx-lm", "sizes", "ids"])
def test_equal_ones_fit(engine: str, save: Any) -> None:
    target, draft = save("target", tokenizer()), save("draft", tokenizer())
    assert vocabularies.check(engine, target, draft) == vocabularies.VocabularyCheck("fits")


@pytest.mark.parametrize(
    ("engine", "verdict"),
    [
        ("vllm", "other sizes"), ("sizes", "other sizes"), ("sglang", "refused"), ("llama.cpp", "refused"),
        ("mlx-lm", "fits"), ("ids", "fits"),
    ],
)  # fmt: skip
def test_padding(engine: str, verdict: str, save: Any) -> None:
    """The same tokens with output layers of different sizes, 200 rows apart."""
    target, draft = save("target", tokenizer(), size=300), save("draft", tokenizer())
    found = vocabularies.check(engine, target, draft)
    assert found.verdict == verdict
    assert bool(found.warnings) == (verdict != "fits")


@pytest.mark.parametrize(
    ("engine", "verdict"),
    [
        ("vllm", "warnings"), ("sizes", "refused"), ("sglang", "refused"), ("llama.cpp", "refused"),
        ("mlx-lm", "refused"), ("ids", "refused"),
    ],
)  # fmt: skip
def test_other_ids(engine: str, verdict: str, save: Any) -> None:
    """As many tokens in another order: vLLM takes them, and accepts hardly a draft."""
    target, draft = save("target", tokenizer()), save("draft", tokenizer(PIECES[:3] + PIECES[:2:-1]))
    found = vocabularies.check(engine, target, draft)
    assert found.verdict == verdict
    assert found.warnings


def test_mlx_counts_without_added_tokens(save: Any) -> None:
    target, draft = save("target", tokenizer()), save("draft", tokenizer(PIECES[:-1]))
    assert vocabularies.check("mlx-lm", target, draft).verdict == "refused"


def test_unreachable_is_unverified(save: Any) -> None:
    found = vocabularies.check("vllm", save("target", tokenizer()), "nobody/nothing", local_files_only=True)
    assert found.verdict == "unverified"
    assert "nobody/nothing" in found.warnings[0]


@pytest.mark.parametrize("broken", ["{", '{"model": 3}'])
def test_broken_files_are_unverified(broken: str, save: Any) -> None:
    target, draft = save("target", tokenizer()), save("draft", tokenizer())
    (Path(draft) / "tokenizer.json").write_text(broken)
    assert vocabularies.check("ids", target, draft).verdict == "unverified"


def test_without_a_tokenizer_is_unverified(save: Any) -> None:
    target, draft = save("target", tokenizer()), save("draft", tokenizer())
    for file in Path(draft).glob("tokenizer*"):
        file.unlink()
    assert vocabularies.check("ids", target, draft).verdict == "unverified"
