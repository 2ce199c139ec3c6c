"""What is exported as Python runs: assisted generation, and the `custom_generate` folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

import hf_specdec
from hf_specdec.errors import SpecDecError
from hf_specdec.export import Setup, export
from hf_specdec.export.folder import write_folder

from ..tiny import exact_pair
from ..vocabularies import byte_level


ALPHABET = ["<s>", "</s>", *(bytes([byte]) for byte in range(0x20, 0x7F))]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Folders of a tiny target and of a draft that mostly agrees with it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    target, draft = exact_pair(noise=0.05)
    tokenizer = byte_level(ALPHABET, bos_token="<s>", eos_token="</s>")
    for name, model in (("target", target), ("draft", draft)):
        model.generation_config.max_new_tokens = 24
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return str(tmp_path / "target"), str(tmp_path / "draft")


def prompt() -> dict[str, Any]:
    ids = torch.tensor([[1, *([7, 8, 9, 10] * 4)]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def plain(folder: str) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).eval().generate(**prompt(), do_sample=False)


@pytest.mark.parametrize("method", ["draft_model", "prompt_lookup"])
def test_assisted_generation(method: str, pair: tuple[str, str]) -> None:
    setup = Setup(
        target=pair[0], draft=pair[1] if method == "draft_model" else None, method=method, num_draft_tokens=3,
        confidence=0.0,
    )  # fmt: skip
    namespace: dict[str, Any] = {}
    exec(export("transformers", setup, version="5.24.0").command.replace('"..."', '"abcabcabc"'), namespace)
    model = namespace["model"]
    assert torch.equal(namespace["output"], model.generate(**namespace["inputs"]))
    if method == "draft_model":
        assert namespace["assistant"].generation_config.num_assistant_tokens == 3


class TestFolder:
    def written(self, pair: tuple[str, str], folder: Path, method: str = "hybrid") -> str:
        draft = pair[1] if method in ("hybrid", "draft_model") else None
        setup = Setup(target=pair[0], draft=draft, method=method, num_draft_tokens=4, folder=str(folder))
        found = export("custom-generate", setup)
        write_folder(folder, found.files)
        return found.command

    @pytest.mark.parametrize("method", ["hybrid", "draft_model", "prompt_lookup", "recycling"])
    def test_it_runs(self, method: str, pair: tuple[str, str], tmp_path: Path) -> None:
        command = self.written(pair, tmp_path / "speculative folder", method)
        model = AutoModelForCausalLM.from_pretrained(pair[0]).eval()
        namespace: dict[str, Any] = {"model": model, "inputs": prompt()}
        exec(command.replace("**inputs", "**inputs, do_sample=False"), namespace)
        assert torch.equal(namespace["output"], plain(pair[0]))
        stats = hf_specdec.last_stats(model)
        assert stats.drafter == method
        assert stats.num_draft_tokens > 0

    def test_switched_off(self, pair: tuple[str, str], tmp_path: Path) -> None:
        self.written(pair, tmp_path / "folder")
        model = AutoModelForCausalLM.from_pretrained(pair[0]).eval()
        output = model.generate(
            **prompt(), do_sample=False, custom_generate=str(tmp_path / "folder"), trust_remote_code=True,
            speculative=False,
        )  # fmt: skip
        assert torch.equal(output, plain(pair[0]))
        assert hf_specdec.last_stats(model) is None

    def test_options_of_generate_are_passed_on(self, pair: tuple[str, str], tmp_path: Path) -> None:
        self.written(pair, tmp_path / "folder")
        model = AutoModelForCausalLM.from_pretrained(pair[0]).eval()
        options = {"custom_generate": str(tmp_path / "folder"), "trust_remote_code": True}
        found = model.generate(
            prompt()["input_ids"],
            do_sample=True,
            temperature=0.8,
            max_new_tokens=5,
            return_dict_in_generate=True,
            **options,
        )
        assert isinstance(found, hf_specdec.SpecOutput)
        assert found.sequences.shape[1] == prompt()["input_ids"].shape[1] + 5

    def test_a_model_loaded_from_the_folder(self, pair: tuple[str, str], tmp_path: Path) -> None:
        """There `generate` itself is replaced, so that the loop's own call of it would come back to itself."""
        folder = tmp_path / "repository"
        AutoModelForCausalLM.from_pretrained(pair[0]).save_pretrained(folder)
        AutoTokenizer.from_pretrained(pair[0]).save_pretrained(folder)
        self.written(pair, folder)
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        assert torch.equal(model.generate(**prompt(), do_sample=False), plain(pair[0]))
        assert hf_specdec.last_stats(model).num_draft_tokens > 0

    def test_without_trust_nothing_runs(self, pair: tuple[str, str], tmp_path: Path) -> None:
        self.written(pair, tmp_path / "folder")
        model = AutoModelForCausalLM.from_pretrained(pair[0]).eval()
        with pytest.raises(ValueError, match="trust_remote_code"):
            model.generate(**prompt(), custom_generate=str(tmp_path / "folder"), trust_remote_code=False)

    def test_writing_again_and_over_others(self, pair: tuple[str, str], tmp_path: Path) -> None:
        self.written(pair, tmp_path / "folder")
        self.written(pair, tmp_path / "folder")
        (tmp_path / "folder" / "README.md").write_text("mine")
        with pytest.raises(SpecDecError, match="Pass another --out"):
            self.written(pair, tmp_path / "folder")
        assert (tmp_path / "folder" / "README.md").read_text() == "mine"

    def test_the_card_is_valid(self, pair: tuple[str, str], tmp_path: Path) -> None:
        from huggingface_hub import ModelCard

        self.written(pair, tmp_path / "folder")
        card = ModelCard.load(tmp_path / "folder" / "README.md")
        assert card.data.tags == ["custom_generate"]
        assert "num_draft_tokens" in card.text
