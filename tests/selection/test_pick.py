"""Which draft is picked for a target, from configurations and tokenizers that a Hub in memory has."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hf_specdec import SpecDecError
from hf_specdec.selection import catalog, pick, remembered
from hf_specdec.selection.asking import HubProblem
from hf_specdec.selection.candidates import Choice

from .fake_hub import CONFIGS, FILES, FakeHub, configs_by_id


# target → the draft that should be found with everything reachable; `None` is prompt lookup
EXPECTED: dict[str, str | None] = {
    "Qwen/Qwen3-4B": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-8B": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-14B": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-4B-Instruct-2507": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-8B-Base": "Qwen/Qwen3-0.6B-Base",
    "Qwen/Qwen3-14B-Base": "Qwen/Qwen3-0.6B-Base",
    "Qwen/Qwen3-235B-A22B": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B": None,
    "Qwen/Qwen3-0.6B": None,
    "Qwen/Qwen2.5-3B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-14B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-32B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-72B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-7B": "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-Coder-7B-Instruct": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "Qwen/Qwen2.5-Coder-32B-Instruct": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "Qwen/Qwen2.5-Coder-32B": "Qwen/Qwen2.5-Coder-0.5B",
    "Qwen/Qwen2.5-Math-72B-Instruct": "Qwen/Qwen2.5-Math-1.5B-Instruct",
    "Qwen/QwQ-32B": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2-72B-Instruct": "Qwen/Qwen2-0.5B-Instruct",
    "Qwen/Qwen3.5-9B": None,
    "Qwen/Qwen3.5-27B": None,
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.1-405B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.1-8B": "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-1B-Instruct": None,
    "meta-llama/Llama-2-70b-chat-hf": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "lmsys/vicuna-7b-v1.3": "double7/vicuna-68m",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": None,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "deepseek-ai/deepseek-coder-33b-instruct": "deepseek-ai/deepseek-coder-1.3b-instruct",
    "google/gemma-2-9b-it": "google/gemma-2-2b-it",
    "google/gemma-2-27b-it": "google/gemma-2-2b-it",
    "google/gemma-2-2b-it": None,
    "google/gemma-3-4b-it": "google/gemma-3-270m-it",
    "google/gemma-3-27b-it": "google/gemma-3-270m-it",
    "google/gemma-3-12b-pt": "google/gemma-3-270m",
    "google/gemma-3n-E4B-it": None,
    "google/gemma-4-31B-it": "google/gemma-4-E2B-it",
    "mistralai/Mistral-7B-Instruct-v0.3": None,
    "mistralai/Mistral-Large-Instruct-2407": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": None,
    "mistralai/Ministral-3-14B-Instruct-2512-BF16": None,
    "microsoft/phi-2": None,
    "microsoft/phi-4": None,
    "microsoft/Phi-3-medium-128k-instruct": "microsoft/Phi-3-mini-128k-instruct",
    "HuggingFaceTB/SmolLM2-360M-Instruct": None,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM3-3B": None,
    "ibm-granite/granite-3.3-8b-instruct": "ibm-granite/granite-3.3-2b-instruct",
    "ibm-granite/granite-34b-code-instruct-8k": "ibm-granite/granite-3b-code-instruct-2k",
    "allenai/OLMo-2-1124-13B-Instruct": "allenai/OLMo-2-0425-1B-Instruct",
    "allenai/Olmo-3-32B-Think": "allenai/Olmo-3-7B-Think",
    "tiiuae/Falcon3-10B-Instruct": "tiiuae/Falcon3-1B-Instruct",
    "tiiuae/falcon-40b": "tiiuae/falcon-7b",
    "codellama/CodeLlama-70b-hf": "codellama/CodeLlama-7b-hf",
    "openai-community/gpt2-xl": "distilbert/distilgpt2",
    "openai-community/gpt2": None,
    "facebook/opt-66b": "facebook/opt-125m",
    "EleutherAI/pythia-12b-deduped": "EleutherAI/pythia-160m-deduped",
    "bigcode/starcoder2-15b": "bigcode/starcoder2-3b",
    "bigcode/starcoder": "bigcode/starcoderbase-1b",
    "Salesforce/codegen-16B-mono": "Salesforce/codegen-350M-mono",
    "01-ai/Yi-1.5-34B-Chat": "01-ai/Yi-1.5-6B-Chat",
    "LGAI-EXAONE/EXAONE-4.0-32B": "LGAI-EXAONE/EXAONE-4.0-1.2B",
    "openai/gpt-oss-120b": None,
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Picks are kept in a folder of the test."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def hub(tmp_path: Path) -> FakeHub:
    return FakeHub(tmp_path)


def chosen(choice: Choice) -> str | None:
    return None if choice.chosen is None else choice.chosen.id


def verdicts(choice: Choice) -> dict[str, str]:
    return {each.id: each.verdict for each in choice.candidates}


def reasons(choice: Choice, id: str) -> str:
    return " | ".join(next(each.reasons for each in choice.candidates if each.id == id))


@pytest.mark.parametrize("target", EXPECTED)
def test_real_names(target: str, hub: FakeHub) -> None:
    choice = pick.pick(target, hub=hub)
    assert chosen(choice) == EXPECTED[target]
    for each in choice.candidates:
        assert each.reasons, each
        assert each.verdict in pick.RANKS
    if choice.chosen is not None:
        assert choice.chosen.verified
        assert choice.chosen.verdict in ("fits", "fits with padding")
        assert choice.chosen.predicted_speedup is not None
        assert choice.chosen.predicted_speedup >= 1.05
        assert choice.candidates[0] == choice.chosen


@pytest.mark.parametrize("target", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-70B-Instruct", "openai/gpt-oss-120b"])
def test_offline_answers_from_the_catalog(target: str, tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, offline=True)
    choice = pick.pick(target, hub=hub)
    assert chosen(choice) == EXPECTED[target]
    assert any("unverified" in note for note in choice.notes)
    if choice.chosen is not None:
        assert choice.chosen.verdict == "unverified"
        assert not choice.chosen.verified
        assert choice.chosen.download_bytes
    assert not remembered.file().exists()


@pytest.mark.parametrize("kind", ["network", "server", "gated"])
def test_a_hub_that_does_not_answer_is_offline(kind: str, hub: FakeHub) -> None:
    hub.problems["Qwen/Qwen3-8B"] = kind
    choice = pick.pick("Qwen/Qwen3-8B", hub=hub)
    assert chosen(choice) == "Qwen/Qwen3-0.6B"
    assert choice.chosen is not None
    assert not choice.chosen.verified


def test_nothing_known_and_nothing_reachable(hub: FakeHub) -> None:
    hub.problems["acme/Unknown-8B"] = "network"
    choice = pick.pick("acme/Unknown-8B", hub=hub)
    assert choice == Choice("acme/Unknown-8B", None, (), choice.notes)
    assert "network" in choice.notes[0]
    assert choice.notes[1] == "the catalog doesn't know acme/Unknown-8B"


def test_a_misspelt_name_and_nothing_reachable(hub: FakeHub) -> None:
    hub.problems["Qwen/Qwen3-8"] = "network"
    assert pick.pick("Qwen/Qwen3-8", hub=hub).notes[-1].endswith("; did you mean Qwen/Qwen3-8B?")


def test_a_misspelt_name_that_the_hub_does_not_have(hub: FakeHub) -> None:
    hub.problems["Qwen/Qwen3-8"] = "missing"
    with pytest.raises(HubProblem, match=r"Did you mean Qwen/Qwen3-8B\?$") as caught:
        pick.pick("Qwen/Qwen3-8", hub=hub)
    assert caught.value.kind == "missing"


def test_a_name_without_an_owner(hub: FakeHub) -> None:
    hub.problems["gpt2-xl"] = "network"
    assert chosen(pick.pick("gpt2-xl", hub=hub)) == "distilbert/distilgpt2"


def test_no_such_target(hub: FakeHub) -> None:
    with pytest.raises(SpecDecError, match="not on the Hub"):
        pick.pick("acme/Nowhere", hub=hub)
    hub.add("acme/Encoder", {"model_type": "bert"})
    hub.add("acme/Nothing", {"hidden_size": 3})
    with pytest.raises(SpecDecError, match="doesn't say how large"):
        pick.pick("acme/Nothing", hub=hub)


class TestOrder:
    def test_given_comes_first(self, hub: FakeHub) -> None:
        choice = pick.pick("Qwen/Qwen3-8B", given="Qwen/Qwen3-1.7B", hub=hub)
        assert chosen(choice) == "Qwen/Qwen3-1.7B"
        assert choice.chosen is not None
        assert choice.chosen.source == "given"
        assert not remembered.file().exists()

    def test_given_may_be_slow(self, hub: FakeHub) -> None:
        assert chosen(pick.pick("Qwen/Qwen3-1.7B", given="Qwen/Qwen3-0.6B", hub=hub)) == "Qwen/Qwen3-0.6B"

    def test_given_that_does_not_fit(self, hub: FakeHub) -> None:
        choice = pick.pick("Qwen/Qwen3-8B", given="meta-llama/Llama-3.2-1B", hub=hub)
        assert chosen(choice) == "Qwen/Qwen3-0.6B"
        assert verdicts(choice)["meta-llama/Llama-3.2-1B"] == "other vocabulary"
        alone = pick.pick("Qwen/Qwen3-0.6B", given="HuggingFaceTB/SmolLM2-135M", hub=hub)
        assert chosen(alone) == "HuggingFaceTB/SmolLM2-135M"

    def test_saved_in_the_configuration(self, hub: FakeHub) -> None:
        hub.add("acme/Tuned-8B", CONFIGS["Qwen/Qwen3-8B"] | {"assistant_model": "Qwen/Qwen3-1.7B"})
        hub.tokenizers["acme/Tuned-8B"] = "qwen-3"
        assert chosen(pick.pick("acme/Tuned-8B", hub=hub)) == "Qwen/Qwen3-1.7B"

    def test_saved_in_the_generation_configuration(self, hub: FakeHub, tmp_path: Path) -> None:
        folder = tmp_path / "target"
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps({"assistant_model": "Qwen/Qwen3-1.7B"}))
        hub.repositories["Qwen/Qwen3-8B"] = replace(hub.repositories["Qwen/Qwen3-8B"], folder=folder)
        assert chosen(pick.pick("Qwen/Qwen3-8B", hub=hub)) == "Qwen/Qwen3-1.7B"

    def test_cache_before_the_hub(self, tmp_path: Path) -> None:
        hub = FakeHub(tmp_path, complete=["Qwen/Qwen3-8B", "Qwen/Qwen3-1.7B"])
        choice = pick.pick("Qwen/Qwen3-8B", hub=hub)
        assert chosen(choice) == "Qwen/Qwen3-1.7B"
        assert choice.chosen is not None
        assert choice.chosen.source == "cache"
        assert choice.chosen.download_bytes == 0
        assert any("Qwen/Qwen3-0.6B" in note and "1.47×" in note for note in choice.notes)
        assert verdicts(choice)["Qwen/Qwen3-0.6B"] == "unverified"

    def test_only_the_cache(self, tmp_path: Path) -> None:
        hub = FakeHub(tmp_path, complete=["Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"])
        choice = pick.pick("Qwen/Qwen3-8B", local_files_only=True, hub=hub)
        assert chosen(choice) == "Qwen/Qwen3-0.6B"
        assert choice.chosen is not None
        assert choice.chosen.verified
        assert not any(name.startswith("search") for name in hub.asked)
        # a download stays a proposal
        hub = FakeHub(tmp_path, complete=["Qwen/Qwen3-14B"])
        choice = pick.pick("Qwen/Qwen3-14B", local_files_only=True, hub=hub)
        assert choice.chosen is not None
        assert (choice.chosen.verdict, choice.chosen.verified) == ("unverified", False)

    def test_heads_are_shown_and_not_chosen(self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        choice = pick.pick("Qwen/Qwen3-8B", hub=hub)
        head = next(each for each in choice.candidates if each.id == "AngelSlim/Qwen3-8B_eagle3")
        assert (head.kind, head.verdict) == ("eagle3", "rejected")
        assert "not yet runnable here" in head.reasons[0]
        assert {each.kind for each in choice.candidates} >= {"eagle3", "dflash", "dspark", "pard"}
        assert pick.pick("Qwen/Qwen3.5-9B", hub=hub).candidates[-1].kind == "mtp"


class TestUnknownFamily:
    """The catalog is silent: the author's other models are searched."""

    @pytest.fixture
    def acme(self, hub: FakeHub) -> FakeHub:
        for id, like in (
            ("acme/Anvil-9B-Instruct", "google/gemma-2-9b"),
            ("acme/Anvil-1B-Instruct", "meta-llama/Llama-3.2-1B"),
            ("acme/Anvil-1B", "meta-llama/Llama-3.2-1B"),
            ("acme/Anvil-8B-Instruct", "meta-llama/Llama-3.1-8B"),
            ("acme/Other-0.5B-Instruct", "Qwen/Qwen2.5-0.5B"),
        ):
            hub.add(id, configs_by_id()[like] | {"vocab_size": 77000})
        return hub

    def test_found_by_author_and_name(self, acme: FakeHub) -> None:
        choice = pick.pick("acme/Anvil-9B-Instruct", hub=acme)
        assert chosen(choice) == "acme/Anvil-1B-Instruct"
        assert choice.chosen is not None
        assert choice.chosen.source == "hub"
        assert "search acme Anvil" in acme.asked
        assert "acme/Anvil-1B" in verdicts(choice)
        assert "too large" in reasons(choice, "acme/Anvil-8B-Instruct")
        assert "acme/Other-0.5B-Instruct" not in verdicts(choice)

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"files": ("config.json", "model.gguf")}, "GGUF"),
            ({"files": (*FILES, "adapter_config.json")}, "adapter"),
            ({"config": {"quantization_config": {"quant_method": "awq"}}}, "quantised"),
            ({"tags": ("gptq",)}, "quantised"),
            ({"tags": ("mlx",)}, "quantised or converted"),
            ({"files": ("config.json", "pytorch_model.bin")}, "no safetensors"),
            ({"config": {"auto_map": {"AutoModelForCausalLM": "m.M"}}}, "code from its repository"),
            ({"words": ["other", "words"]}, None),
            ({"problem": "acme asks for consent"}, "consent"),
        ],
    )
    def test_what_no_draft_comes_from(self, acme: FakeHub, fields: dict[str, Any], reason: str | None) -> None:
        config = configs_by_id()["meta-llama/Llama-3.2-1B"] | {"vocab_size": 77000} | fields.pop("config", {})
        acme.add("acme/Anvil-1B-Instruct", config, **fields)
        choice = pick.pick("acme/Anvil-9B-Instruct", hub=acme)
        assert chosen(choice) is None
        assert "of another kind: base" in reasons(choice, "acme/Anvil-1B")
        if reason is None:
            assert verdicts(choice)["acme/Anvil-1B-Instruct"] == "other vocabulary"
        else:
            assert verdicts(choice)["acme/Anvil-1B-Instruct"] == "rejected"
            assert reason in reasons(choice, "acme/Anvil-1B-Instruct")

    def test_base_with_base(self, acme: FakeHub) -> None:
        acme.add("acme/Anvil-9B", configs_by_id()["google/gemma-2-9b"] | {"vocab_size": 77000})
        assert chosen(pick.pick("acme/Anvil-9B", hub=acme)) == "acme/Anvil-1B"

    def test_only_too_large_siblings(self, acme: FakeHub) -> None:
        for small in ("acme/Anvil-1B-Instruct", "acme/Anvil-1B"):
            del acme.repositories[small]
        choice = pick.pick("acme/Anvil-9B-Instruct", hub=acme)
        assert chosen(choice) is None
        assert verdicts(choice) == {"acme/Anvil-8B-Instruct": "rejected"}

    def test_a_hub_that_cannot_be_searched(self, acme: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        def search(*arguments: Any, **fields: Any) -> Any:
            raise pick.HubProblem("server", "429: too many requests")

        monkeypatch.setattr(acme, "search", search)
        choice = pick.pick("acme/Anvil-9B-Instruct", hub=acme)
        assert chosen(choice) is None
        assert "429" in choice.notes[0]


class TestCandidates:
    def test_gated_draft_is_named_and_passed_over(self, hub: FakeHub) -> None:
        hub.problems["meta-llama/Llama-3.2-1B-Instruct"] = "gated"
        choice = pick.pick("meta-llama/Llama-3.1-70B-Instruct", hub=hub)
        assert chosen(choice) == "meta-llama/Llama-3.2-3B-Instruct"
        assert verdicts(choice)["meta-llama/Llama-3.2-1B-Instruct"] == "rejected"
        assert "gated" in reasons(choice, "meta-llama/Llama-3.2-1B-Instruct")

    def test_wrong_tokenizer_is_passed_over(self, hub: FakeHub) -> None:
        hub.words["Qwen/Qwen3-0.6B"] = [f"qwen-3-{index}" for index in reversed(range(50))]
        choice = pick.pick("Qwen/Qwen3-8B", hub=hub)
        assert chosen(choice) == "Qwen/Qwen3-1.7B"
        assert verdicts(choice)["Qwen/Qwen3-0.6B"] == "other vocabulary"
        assert "stand for another token" in reasons(choice, "Qwen/Qwen3-0.6B")

    def test_padded_vocabulary_fits(self, hub: FakeHub) -> None:
        choice = pick.pick("Qwen/Qwen2.5-7B-Instruct", hub=hub)
        assert choice.chosen is not None
        assert choice.chosen.verdict == "fits with padding"
        assert "152064 and 151936 rows" in " ".join(choice.chosen.reasons)

    def test_memory_is_counted(self, hub: FakeHub) -> None:
        choice = pick.pick("Qwen/Qwen3-8B", free_bytes=1_000_000_000, hub=hub)
        assert chosen(choice) is None
        assert "needs 1.66 GB with its cache, 1.00 GB are free" in reasons(choice, "Qwen/Qwen3-0.6B")
        assert chosen(pick.pick("Qwen/Qwen3-8B", free_bytes=2_000_000_000, hub=hub)) == "Qwen/Qwen3-0.6B"

    def test_quantised_while_loading(self, hub: FakeHub) -> None:
        """A draft of two bytes a weight doesn't pay for a small target of half a byte, and still does for a large one."""
        packed = {"load_in_4bit": True, "quant_method": "bitsandbytes"}
        choices = [pick.pick(f"Qwen/Qwen3-{size}B", quantization_config=packed, hub=hub) for size in (4, 32)]
        assert list(map(chosen, choices)) == [None, "Qwen/Qwen3-0.6B"]
        assert "of 4.5 bits" in reasons(choices[0], "Qwen/Qwen3-0.6B")
        assert chosen(pick.pick("Qwen/Qwen3-4B", hub=hub)) == "Qwen/Qwen3-0.6B"  # remembered apart

    def test_no_tokenizer_is_unverified(self, hub: FakeHub) -> None:
        hub.repositories["Qwen/Qwen3-8B"] = replace(hub.repositories["Qwen/Qwen3-8B"], files=FILES[:2])
        choice = pick.pick("Qwen/Qwen3-8B", hub=hub)
        assert choice.chosen is not None
        assert not choice.chosen.verified
        assert "no tokenizer" in " ".join(choice.chosen.reasons)

    @pytest.mark.parametrize("whose", ["Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"])
    def test_broken_tokenizers(self, hub: FakeHub, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original = hub.tokenizer_folder

        def broken(repository: Any, **asking: Any) -> Any:
            folder = original(repository, **asking)
            if repository.id == whose:
                assert folder is not None
                (folder / "tokenizer.json").write_text("{")
            return folder

        monkeypatch.setattr(hub, "tokenizer_folder", broken)
        choice = pick.pick("Qwen/Qwen3-8B", hub=hub)
        assert f"the tokenizer of {whose} can't be read" in reasons(choice, "Qwen/Qwen3-0.6B")
        assert choice.chosen is not None
        if whose == "Qwen/Qwen3-8B":
            assert (choice.chosen.id, choice.chosen.verified) == ("Qwen/Qwen3-0.6B", False)
        else:
            assert (choice.chosen.id, choice.chosen.verified) == ("Qwen/Qwen3-1.7B", True)

    def test_instruct_with_instruct(self, tmp_path: Path) -> None:
        hub = FakeHub(tmp_path, complete=["Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B"])
        choice = pick.pick("Qwen/Qwen2.5-7B-Instruct", local_files_only=True, hub=hub)
        assert verdicts(choice)["Qwen/Qwen2.5-0.5B"] == "rejected"
        assert "of another kind: base" in reasons(choice, "Qwen/Qwen2.5-0.5B")

    def test_fine_tuned_target_has_its_base_models_family(self, hub: FakeHub) -> None:
        hub.add("NousResearch/Hermes-3-Llama-3.1-8B", configs_by_id()["meta-llama/Llama-3.1-8B"])
        hub.tokenizers["NousResearch/Hermes-3-Llama-3.1-8B"] = "llama-3"
        choice = pick.pick("NousResearch/Hermes-3-Llama-3.1-8B", hub=hub)
        assert chosen(choice) == "meta-llama/Llama-3.2-1B-Instruct"

    def test_few_files_are_looked_at(self, hub: FakeHub) -> None:
        pick.pick("Qwen/Qwen2.5-72B-Instruct", hub=hub)
        assert hub.asked == ["Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"]

    def test_recurrent_targets_have_no_draft(self, hub: FakeHub) -> None:
        choice = pick.pick("Qwen/Qwen3.5-9B", hub=hub)
        assert choice.chosen is None
        assert "recurrent" in choice.why_not

    def test_a_draft_that_the_target_names_must_pay_too(self, hub: FakeHub) -> None:
        hub.add("acme/Tuned-8B", CONFIGS["Qwen/Qwen3-8B"] | {"assistant_model": "Qwen/Qwen3-14B"})
        hub.tokenizers["acme/Tuned-8B"] = "qwen-3"
        assert verdicts(pick.pick("acme/Tuned-8B", hub=hub))["Qwen/Qwen3-14B"] == "rejected"


class TestRemembered:
    def test_second_time_asks_for_the_target_alone(self, hub: FakeHub) -> None:
        first = pick.pick("Qwen/Qwen3-8B", hub=hub)
        asked = len(hub.asked)
        assert pick.pick("Qwen/Qwen3-8B", hub=hub) == first
        assert hub.asked[asked:] == ["Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"]

    def test_refresh_looks_again(self, hub: FakeHub) -> None:
        pick.pick("Qwen/Qwen3-8B", hub=hub)
        hub.words["Qwen/Qwen3-0.6B"] = ["other"]
        assert chosen(pick.pick("Qwen/Qwen3-8B", hub=hub)) == "Qwen/Qwen3-0.6B"
        assert chosen(pick.pick("Qwen/Qwen3-8B", refresh=True, hub=hub)) == "Qwen/Qwen3-1.7B"

    def test_another_revision_is_another_target(self, hub: FakeHub) -> None:
        pick.pick("Qwen/Qwen3-8B", hub=hub)
        hub.repositories["Qwen/Qwen3-8B"] = replace(hub.repositories["Qwen/Qwen3-8B"], revision="89ab")
        hub.words["Qwen/Qwen3-0.6B"] = ["other"]
        assert chosen(pick.pick("Qwen/Qwen3-8B", hub=hub)) == "Qwen/Qwen3-1.7B"

    def test_a_draft_that_is_gone(self, tmp_path: Path) -> None:
        hub = FakeHub(tmp_path, complete=["Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"])
        assert chosen(pick.pick("Qwen/Qwen3-8B", hub=hub)) == "Qwen/Qwen3-0.6B"
        hub.repositories["Qwen/Qwen3-0.6B"] = replace(hub.repositories["Qwen/Qwen3-0.6B"], complete=False)
        choice = pick.pick("Qwen/Qwen3-8B", hub=hub)
        assert choice.chosen is not None
        assert choice.chosen.source == "catalog"

    def test_memory_is_asked_again(self, hub: FakeHub) -> None:
        assert pick.pick("Qwen/Qwen3-8B", hub=hub).chosen is not None
        assert pick.pick("Qwen/Qwen3-8B", free_bytes=10**9, hub=hub).chosen is None

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "null", '{"version": "0", "picks": {}}', '{"picks": 3}', '{"version": 1, "picks": []}']
    )
    def test_a_broken_file_is_empty(self, hub: FakeHub, text: str) -> None:
        remembered.file().parent.mkdir(parents=True)
        remembered.file().write_text(text)
        assert chosen(pick.pick("Qwen/Qwen3-8B", hub=hub)) == "Qwen/Qwen3-0.6B"
        assert json.loads(remembered.file().read_text())["picks"]

    def test_a_broken_entry_is_none(self, hub: FakeHub) -> None:
        pick.pick("Qwen/Qwen3-8B", hub=hub)
        data = json.loads(remembered.file().read_text())
        for entry in data["picks"].values():
            entry["chosen"] = {"id": 3}
        remembered.file().write_text(json.dumps(data))
        assert chosen(pick.pick("Qwen/Qwen3-8B", hub=hub)) == "Qwen/Qwen3-0.6B"

    def test_another_version_forgets(self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        pick.pick("Qwen/Qwen3-8B", hub=hub)
        known = catalog.load_catalog()
        monkeypatch.setattr(remembered, "load_catalog", lambda: replace(known, version=known.version + 1))
        assert remembered._read() == {}

    def test_a_place_that_cannot_be_written(
        self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "file"))
        assert chosen(pick.pick("Qwen/Qwen3-8B", hub=hub)) == "Qwen/Qwen3-0.6B"

    def test_round_trip(self, hub: FakeHub) -> None:
        choice = pick.pick("Qwen/Qwen3-8B", hub=hub)
        remembered.remember("entry", choice)
        assert remembered.recall("entry") == choice
        assert remembered.recall("nothing") is None
        assert list(remembered.file().parent.iterdir()) == [remembered.file()]
        assert asdict(choice)["chosen"]["id"] == "Qwen/Qwen3-0.6B"

    def test_the_oldest_goes_first(self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remembered, "MOST", 2)
        choice = pick.pick("Qwen/Qwen3-8B", hub=hub)
        for entry in ("a", "b", "c"):
            remembered.remember(entry, choice)
        assert remembered.recall("a") is None
        assert remembered.recall("c") is not None
