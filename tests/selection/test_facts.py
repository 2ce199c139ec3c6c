"""Sizes from configurations: the formula against models built without memory, and against published numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from hf_specdec import SpecDecError
from hf_specdec.selection import facts
from hf_specdec.selection.candidates import Repository

from ..tiny import ARCHITECTURES, COMMON, tiny_model
from .fake_hub import CONFIGS, configs_by_id


def read(config: dict[str, Any]) -> Any:
    return facts.facts_of(Repository("org/name", config, "hub"))


@pytest.mark.parametrize("kind", sorted(facts.GATED | facts.UNGATED))
def test_formula_counts_what_is_built(kind: str) -> None:
    """At the real width of the type's default configuration, with few layers."""
    config = CONFIG_MAPPING[kind]().to_dict()
    config |= {name: 3 for name in ("num_hidden_layers", "n_layer", "num_layers") if name in config}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:3]
    if kind == "gpt_neo":
        config |= {
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "attention_layers": ["global", "local"],
        }
    read_config = facts.decoder_config(config)
    built = facts._count_on_meta(read_config)
    counted = facts._count_by_formula(read_config, kind in facts.GATED)
    assert built is not None
    for name in ("parameters", "active_parameters", "expert_parameters"):
        assert counted[name] == pytest.approx(built[name], rel=0.005), name
    assert counted["expert_fraction"] == built["expert_fraction"]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe"])
def test_tiny_models(name: str) -> None:
    model = tiny_model(name)
    config_class = getattr(__import__("transformers"), ARCHITECTURES[name][1])
    found = read(config_class(**(COMMON | ARCHITECTURES[name][2])).to_dict())
    # a few thousand norm weights and biases count for more here
    assert found.parameters == pytest.approx(model.num_parameters(), rel=0.02)
    assert found.vocabulary == 97
    assert found.layers == 2


# what the models' cards and papers say, in millions
PUBLISHED = {
    "meta-llama/Llama-3.2-1B": 1236, "meta-llama/Llama-3.1-8B": 8030, "meta-llama/Llama-3.1-70B": 70554,
    "Qwen/Qwen2.5-0.5B": 494, "Qwen/Qwen2.5-7B": 7616, "Qwen/Qwen2.5-72B": 72706, "Qwen/Qwen3-0.6B": 596,
    "Qwen/Qwen3-8B": 8191, "Qwen/Qwen3-30B-A3B": 30532, "Qwen/Qwen3-235B-A22B": 235094, "google/gemma-2-9b": 9241,
    "google/gemma-3-270m": 268, "google/gemma-3-1b-pt": 1000, "mistralai/Mistral-7B-v0.3": 7248,
    "mistralai/Mixtral-8x7B-v0.1": 46703, "microsoft/phi-2": 2780, "microsoft/Phi-3-mini-4k-instruct": 3821,
    "HuggingFaceTB/SmolLM2-135M": 135, "HuggingFaceTB/SmolLM2-360M": 362, "HuggingFaceTB/SmolLM3-3B-Base": 3075,
    "openai-community/gpt2": 124, "distilbert/distilgpt2": 82, "facebook/opt-1.3b": 1316,
    "EleutherAI/pythia-160m": 162, "bigcode/starcoder2-3b": 3030, "allenai/OLMo-2-0425-1B": 1485,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1777, "openai/gpt-oss-20b": 20915,
}  # fmt: skip


@pytest.mark.parametrize("id", PUBLISHED)
def test_published_sizes(id: str) -> None:
    assert read(configs_by_id()[id]).parameters / 1e6 == pytest.approx(PUBLISHED[id], rel=0.006)


def test_what_a_step_reads() -> None:
    moe = read(CONFIGS["Qwen/Qwen3-30B-A3B"])
    assert moe.active_parameters / 1e9 == pytest.approx(3.04, rel=0.01)  # 3.3 B less the input embedding
    assert moe.expert_fraction == 8 / 128
    tied, untied = read(CONFIGS["Qwen/Qwen3-0.6B"]), read(CONFIGS["Qwen/Qwen3-8B"])
    assert tied.active_parameters == tied.parameters
    assert untied.parameters - untied.active_parameters == 151936 * 4096 == untied.output_parameters
    effective = read(CONFIGS["google/gemma-3n-E2B"])  # its per-layer embeddings are looked up
    assert effective.active_parameters < 0.6 * effective.parameters


@pytest.mark.parametrize(
    ("id", "numbers"),
    [
        ("meta-llama/Llama-3.1-8B", 2 * 32 * 8 * 128),
        ("tiiuae/falcon-7b", 2 * 32 * 64),
        ("bigcode/starcoderbase-1b", 2 * 24 * 128),
        ("openai-community/gpt2", 2 * 12 * 768),
        ("Qwen/Qwen3.5-0.8B-Base", 2 * 6 * 2 * 256),  # a quarter of its layers has a cache
        ("google/gemma-3-4b-pt", 2 * 34 * 4 * 256),  # heads only in the class's defaults
    ],
)
def test_cache_numbers(id: str, numbers: int) -> None:
    assert read(configs_by_id()[id]).kv_numbers == numbers


def test_nothing_of_the_repository_is_run() -> None:
    config = CONFIGS["Qwen/Qwen3-0.6B"] | {
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    }
    assert read(config).parameters == read(CONFIGS["Qwen/Qwen3-0.6B"]).parameters


def test_a_type_that_transformers_does_not_know() -> None:
    config = copy.deepcopy(CONFIGS["meta-llama/Llama-3.2-1B"]) | {"model_type": "brand_new"}
    assert read(config).parameters == pytest.approx(1.236e9, rel=0.01)


def test_dtype_is_read_under_both_names() -> None:
    assert read(CONFIGS["Qwen/Qwen3-0.6B"]).dtype == "bfloat16"
    config = CONFIGS["Qwen/Qwen3-0.6B"] | {"dtype": "float16"}
    assert read(config).dtype == "float16"
    assert facts.bytes_of("torch.float32") == 4


@pytest.mark.parametrize("config", [{}, {"model_type": "brand_new"}, {"model_type": "llama", "hidden_size": "wide"}])
def test_no_decoder(config: dict[str, Any]) -> None:
    with pytest.raises(SpecDecError, match="doesn't say how large"):
        read(config)
