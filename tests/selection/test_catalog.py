"""The catalog: its data and the rules for names that it doesn't hold."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from hf_specdec.selection import catalog
from hf_specdec.selection.candidates import Repository
from hf_specdec.selection.catalog import DRAFT_KINDS, kind_of, load_catalog, stem
from hf_specdec.selection.facts import GATED, UNGATED, facts_of

from .fake_hub import CONFIGS, configs_by_id


ID = re.compile(r"[\w.-]+/[\w.-]+")
HEAD_KINDS = {"eagle3", "mtp", "dflash", "dspark", "pard"}
DATA = json.loads(catalog.FILE.read_text(encoding="utf-8"))


def test_schema() -> None:
    assert set(DATA) == {"version", "families", "pairs"}
    assert isinstance(DATA["version"], int)
    sizes = {
        "ids",
        "model_type",
        "parameters",
        "active_parameters",
        "layers",
        "vocabulary",
        "kv_numbers",
        "output_parameters",
    }
    for family in DATA["families"]:
        assert set(family) == {"name", "authors", "tokenizer", "members", "heads"}
        for member in family["members"]:
            assert sizes <= set(member) <= sizes | {"expert_parameters", "expert_fraction"}
            assert set(member["ids"]) <= set(DRAFT_KINDS)
            assert all(ID.fullmatch(id) for ids in member["ids"].values() for id in ids)
            assert all(member[name] > 0 for name in sizes - {"ids", "model_type"})
            assert member["active_parameters"] <= member["parameters"]
            assert 0 < member.get("expert_fraction", 1) <= 1
        for head in family["heads"]:
            assert set(head) == {"id", "kind", "targets"}
            assert head["kind"] in HEAD_KINDS
            assert ID.fullmatch(head["id"])
            assert head["targets"]
    for pair in DATA["pairs"]:
        assert 0 < pair["acceptance"] < 1
        assert len(pair["source"]) > 20


def test_names_are_unique_and_known() -> None:
    ids = [member.id for member in load_catalog().members()]
    assert len(ids) == len(set(map(str.lower, ids)))
    names = [family.name for family in load_catalog().families]
    assert len(names) == len(set(names))
    for family in load_catalog().families:
        for head in family.heads:
            for target in head.targets:
                found = load_catalog().member(target)
                assert found is not None, target
                assert found.family == family.name
            # a head is no member, unless it is part of the target itself
            assert load_catalog().member(head.id) is None or head.targets == (head.id,)
    for target, draft in load_catalog().acceptance:
        assert load_catalog().member(target), target
        assert load_catalog().member(draft), draft


def test_families_that_must_be_there() -> None:
    types = {member.facts.model_type for member in load_catalog().members()}
    assert types >= {
        "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_5_text", "gemma2", "gemma3_text", "gemma3n_text",
        "gemma4_text", "mistral", "mixtral", "ministral3", "phi", "phi3", "smollm3", "granite", "olmo2", "olmo3",
        "falcon", "gpt2", "opt", "gpt_neox", "starcoder2", "gpt_bigcode", "codegen",
    }  # fmt: skip


@pytest.mark.parametrize("family", load_catalog().families, ids=lambda family: family.name)
def test_sizes_are_those_of_the_configurations(family: catalog.Family) -> None:
    for member in family.members:
        if member.id in CONFIGS and member.facts.model_type in GATED | UNGATED:
            assert replace(facts_of(Repository(member.id, CONFIGS[member.id], "hub")), dtype=None) == member.facts


@pytest.mark.parametrize(
    "id", ["Qwen/Qwen3.5-9B-Base", "google/gemma-4-E2B", "google/gemma-3n-E2B", "openai/gpt-oss-20b"]
)
def test_sizes_are_those_of_the_built_models(id: str) -> None:
    member = load_catalog().member(id)
    assert member is not None
    # what Transformers builds may change by a norm or two
    found = facts_of(Repository(id, configs_by_id()[id], "hub"))
    assert found.active_parameters == pytest.approx(member.facts.active_parameters, rel=0.01)
    assert found.kv_numbers == member.facts.kv_numbers


@pytest.mark.parametrize(
    ("id", "same_as", "family"),
    [
        ("NousResearch/Hermes-3-Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "Llama 3"),
        ("someone/My-R1-Distill-Llama-8B-finetune", "meta-llama/Llama-3.1-8B", "DeepSeek R1 distilled from Llama 3"),
        ("/models/tuned", "Qwen/Qwen2.5-7B", "Qwen2.5"),
        ("someone/vicuna-7b-tuned", "meta-llama/Llama-2-7b-hf", "Vicuna"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct-16k", "HuggingFaceTB/SmolLM2-1.7B", "SmolLM2"),
    ],
)
def test_family_by_sizes(id: str, same_as: str, family: str) -> None:
    facts = facts_of(Repository(id, configs_by_id()[same_as], "hub"))
    found = load_catalog().family_of(id, facts)
    assert found is not None
    assert found.name == family


def test_added_tokens_do_not_leave_the_family() -> None:
    facts = facts_of(Repository("x/y", configs_by_id()["meta-llama/Llama-3.1-8B"] | {"vocab_size": 128264}, "hub"))
    assert load_catalog().family_of("x/y", facts) is not None
    assert load_catalog().family_of("x/y", replace(facts, layers=31)) is None
    assert load_catalog().family_of("x/y", replace(facts, vocabulary=200000)) is None


@pytest.mark.parametrize(
    ("id", "kind"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "instruct"), ("google/gemma-3-27b-it", "instruct"), ("google/gemma-3-27b-pt", "base"),
        ("meta-llama/Llama-2-7b-hf", "base"), ("Qwen/Qwen2.5-Coder-7B", "coder-base"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "coder"), ("codellama/CodeLlama-7b-Instruct-hf", "coder"),
        ("codellama/CodeLlama-7b-hf", "coder-base"), ("Qwen/Qwen2.5-Math-7B-Instruct", "math"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "thinking"), ("Qwen/Qwen3-4B-Thinking-2507", "thinking"),
        ("lmsys/vicuna-7b-v1.5", "instruct"), ("org/Thing-7B", None), ("/a/folder/of/Thing-7B-Chat/", "instruct"),
    ],
)  # fmt: skip
def test_kind_by_name(id: str, kind: str | None) -> None:
    assert kind_of(id) == kind


def test_kind_by_chat_template() -> None:
    assert kind_of("org/Thing-7B", chat=True) == "instruct"
    assert kind_of("org/Thing-7B", chat=False) == "base"
    assert kind_of("org/Thing-7B-Base", chat=True) == "base"
    assert kind_of("org/Thing-Coder-7B", chat=True) == "coder"


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen3"), ("acme/Foo-Next-7B-Instruct", "Foo-Next"), ("x/Mixtral-8x7B-v0.1", "Mixtral"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2"), ("google/gemma-3n-E4B-it", "gemma-3n"), ("x/7B", ""),
    ],
)  # fmt: skip
def test_stem(id: str, name: str) -> None:
    assert stem(id) == name
