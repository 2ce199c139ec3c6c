"""Plans from configurations and made-up memory. Sizes are worked out again here, from the papers' formulas."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hf_specdec import IncompatibleDraftError, PlacementError
from hf_specdec.selection import placement, shapes
from hf_specdec.selection.placement import plan
from hf_specdec.selection.plans import Plan


GIB = 2**30
LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 131072, "dtype": "bfloat16",
}  # fmt: skip
LLAMA_8B = LLAMA_70B | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
LLAMA_1B = LLAMA_70B | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
QWEN3_600M = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
BNB_4BIT = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SIZES = ("target_weights", "target_cache", "draft_weights", "draft_cache")
SLOTS = 4096 + 16 + 1  # the default context and draft, and the token that the draft follows


def parameters(config: dict[str, Any]) -> int:
    """Weights of a Llama or Qwen3: embedding, attention, MLP or experts with their router, norms, head."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    layer = 2 * hidden * head_dim * (heads + config["num_key_value_heads"]) + 2 * hidden
    if "num_experts" in config:
        layer += config["num_experts"] * (3 * hidden * config["moe_intermediate_size"] + hidden)
    else:
        layer += 3 * hidden * config["intermediate_size"]
    if config["model_type"].startswith("qwen3"):
        layer += 2 * head_dim
    tables = (1 if config["tie_word_embeddings"] else 2) * config["vocab_size"] * hidden
    return tables + config["num_hidden_layers"] * layer + hidden


def rotary(config: dict[str, Any]) -> int:
    """Bytes of the two float32 tables of rotary frequencies."""
    return 2 * 4 * config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]) // 2


def kept(config: dict[str, Any], layers: int, slots: int = SLOTS) -> int:
    """Bytes of keys and values in bfloat16."""
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return layers * 2 * config["num_key_value_heads"] * head_dim * 2 * slots


def gpus(*sizes: float, **others: Any) -> dict[Any, Any]:
    return {index: int(size * GIB) for index, size in enumerate(sizes)} | others


def layers_of(found: Plan) -> dict[Any, range]:
    """Layers by device; a plan never interleaves them."""
    ranges = {each.device: range(each.layers[0], each.layers[-1] + 1) for each in found.devices if each.layers}
    assert all(tuple(ranges[each.device]) == each.layers for each in found.devices if each.layers)
    return ranges


def whole(found: Plan, target: dict[str, Any], draft: dict[str, Any] | None, slots: int = SLOTS) -> None:
    """Nothing is lost or counted twice, everything fits, and the map that is loaded says the same."""
    total = {name: sum(getattr(each, name) for each in found.devices) for name in SIZES}
    assert total["target_weights"] == 2 * parameters(target) + rotary(target)
    assert total["target_cache"] == kept(target, target["num_hidden_layers"], slots)
    assert total["draft_weights"] == (2 * parameters(draft) + rotary(draft) if draft else 0)
    assert total["draft_cache"] == (kept(draft, draft["num_hidden_layers"], slots) if draft else 0)
    assert all(each.free == each.memory - each.used >= 0 for each in found.devices)
    assert sorted(index for each in found.devices for index in each.layers) == list(range(target["num_hidden_layers"]))
    for device, layers in layers_of(found).items():
        assert all(placement._place_of(f"model.layers.{index}", found.device_map) == device for index in layers)


def test_the_formulas_of_this_file() -> None:
    """The published parameter counts."""
    assert parameters(LLAMA_70B) == 70_553_706_496
    assert parameters(LLAMA_8B) == 8_030_261_248
    assert parameters(LLAMA_1B) == 1_235_814_400
    assert parameters(QWEN3_30B_A3B) == 30_532_122_624
    assert parameters(QWEN3_600M) == 596_049_920


def test_one_gpu_tight() -> None:
    """18.5 GiB hold both; with a little less the refusal says how much is missing, and the target alone still fits."""
    found = plan(LLAMA_8B, LLAMA_1B, max_memory=gpus(18.5))
    whole(found, LLAMA_8B, LLAMA_1B)
    assert found.device_map == {"": 0}
    assert found.draft_device == 0
    assert found.offloaded == 0
    use = found.on(0)
    activations = 4096 * (3 * 14336 + 4 * 4096) * 2
    logits = 17 * 128256 * 4
    assert use.working == activations + 5 * logits
    with pytest.raises(PlacementError, match=r"18\.38 GiB are needed .* GPU 0 18\.20 GiB"):
        plan(LLAMA_8B, LLAMA_1B, max_memory=gpus(18.2))
    assert plan(LLAMA_8B, max_memory=gpus(18.2)).draft_device is None


def test_room_for_the_draft_moves_layers_away() -> None:
    """Balanced as if there were no draft, the second GPU would have no room for it."""
    memory = gpus(14, 9)
    alone = plan(LLAMA_8B, max_memory=memory)
    assert layers_of(alone) == {0: range(0, 16), 1: range(16, 32)}
    with pytest.raises(PlacementError, match=r"GPU 1 would be 1\.\d\d GiB short"):
        plan(LLAMA_8B, LLAMA_1B, max_memory=memory, device_map=alone.device_map)
    both = plan(LLAMA_8B, LLAMA_1B, max_memory=memory)
    whole(both, LLAMA_8B, LLAMA_1B)
    assert both.draft_device == 1
    assert layers_of(both) == {0: range(0, 28), 1: range(28, 32)}


def test_one_gpu_refused() -> None:
    with pytest.raises(PlacementError) as caught:
        plan(LLAMA_8B, LLAMA_1B, max_memory=gpus(12))
    text = str(caught.value)
    for part in ("14.96 weights and 0.50 cache", "2.30 and 0.13 of the draft", "GPU 0 12.00 GiB", "batch 1", "4,096"):
        assert part in text
    for advice in ("smaller `context`", "quantised", "another draft", "CPU offload"):
        assert advice in text


def test_two_equal() -> None:
    found = plan(LLAMA_8B, LLAMA_1B, max_memory=gpus(24, 24))
    whole(found, LLAMA_8B, LLAMA_1B)
    assert layers_of(found) == {0: range(0, 16), 1: range(16, 32)}
    assert found.device_map["model.embed_tokens"] == 0
    assert found.device_map["lm_head"] == 1
    assert found.draft_device == 1
    assert found.on(0).draft_weights == 0
    assert found.on(1).target_cache == kept(LLAMA_8B, 16)


def test_two_unequal() -> None:
    """The small second GPU has the head, so the draft goes there and fewer layers do."""
    found = plan(LLAMA_8B, LLAMA_1B, max_memory=gpus(14, 6))
    whole(found, LLAMA_8B, LLAMA_1B)
    assert found.draft_device == 1
    assert layers_of(found) == {0: range(0, 28), 1: range(28, 32)}


def test_cpu_offload() -> None:
    """Layers whose weights are on the CPU run on the GPU, and their keys and values are there."""
    found = plan(LLAMA_8B, LLAMA_1B, max_memory=gpus(12, cpu="32GiB"))
    whole(found, LLAMA_8B, LLAMA_1B)
    gpu, cpu = found.on(0), found.on("cpu")
    assert found.draft_device == 0
    assert cpu.draft_weights == 0
    assert gpu.target_cache == kept(LLAMA_8B, 32)
    assert cpu.target_cache == 0
    assert found.offloaded == cpu.target_weights > 0
    head = 2 * 128256 * 4096  # the largest weight that is fetched needs its place
    assert gpu.working == 4096 * (3 * 14336 + 4 * 4096) * 2 + 5 * 17 * 128256 * 4 + head
    assert layers_of(found) == {0: range(0, 14), "cpu": range(14, 32)}


def test_disk_only_when_asked() -> None:
    memory = gpus(8, cpu="4GiB")
    with pytest.raises(PlacementError, match="GiB of weights would be left over"):
        plan(LLAMA_8B, LLAMA_1B, max_memory=memory)
    found = plan(LLAMA_8B, LLAMA_1B, max_memory=memory | {"disk": "100GB"})
    whole(found, LLAMA_8B, LLAMA_1B)
    assert list(layers_of(found)) == [0, "cpu", "disk"]
    assert found.on(0).target_cache == kept(LLAMA_8B, 32)
    assert found.offloaded == found.on("cpu").target_weights + found.on("disk").target_weights


def test_70b_on_four() -> None:
    with pytest.raises(PlacementError, match=r"131\.42 weights.*GPU 3 24\.00 GiB.*left over"):
        plan(LLAMA_70B, LLAMA_1B, max_memory=gpus(24, 24, 24, 24))
    found = plan(LLAMA_70B, LLAMA_1B, max_memory=gpus(48, 48, 48, 48))
    whole(found, LLAMA_70B, LLAMA_1B)
    assert layers_of(found) == {0: range(0, 19), 1: range(19, 41), 2: range(41, 63), 3: range(63, 80)}
    assert found.draft_device == 3 == found.device_map["lm_head"]
    assert max(map(len, str(found).splitlines())) <= 80
    assert "GPU 3   63–79        29.05    0.27    2.30    0.13" in str(found)


def test_70b_in_four_bits() -> None:
    """Linear layers but the head's have 4 bits and a float32 scale for 64 weights; a tenth of every GPU stays free."""
    found = plan(LLAMA_70B, LLAMA_1B, max_memory=gpus(24, 24, 24, 24), quantization_config=BNB_4BIT)
    tables = 2 * 128256 * 8192
    norms = (2 * 80 + 1) * 8192
    linear = parameters(LLAMA_70B) - tables - norms
    weights = sum(each.target_weights for each in found.devices)
    assert weights == 2 * (tables + norms) + linear * 4.5 / 8 + rotary(LLAMA_70B)
    assert {each.memory for each in found.devices} == {int(24 * GIB * 0.9)}
    assert found.draft_device == 3
    assert layers_of(found)[3] == range(72, 80)
    with pytest.raises(PlacementError, match="left over"):  # the CPU doesn't help: these weights can't be there
        plan(LLAMA_8B, LLAMA_1B, max_memory=gpus(8, cpu="256GiB"), quantization_config=BNB_4BIT)
    offload = BNB_4BIT | {"llm_int8_enable_fp32_cpu_offload": True}
    assert plan(LLAMA_8B, LLAMA_1B, max_memory=gpus(8, cpu="256GiB"), quantization_config=offload).offloaded > 0


@pytest.mark.parametrize(
    ("saved", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4 + 8 / 64 + 32 / 16384),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, 4.25),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, 8),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8DynamicActivationInt4WeightConfig", "_data": {"group_size": 32}}}}, 5),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 16384),
        ({"quant_method": "compressed-tensors", "ignore": ["lm_head"], "format": "pack-quantized"}, 16),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*head"], "use_optimized_inference": True}, 8),
        ({"quant_method": "no such method"}, 16),
    ],
)  # fmt: skip
def test_saved_quantisations(saved: dict[str, Any], bits: float) -> None:
    shape = shapes.shape_of(LLAMA_1B | {"quantization_config": saved}, shapes.Load(1, 64, 4))
    table, norms = 128256 * 2048, (2 * 16 + 1) * 2048
    linear = parameters(LLAMA_1B) - table - norms
    assert shape.weights == pytest.approx(2 * (table + norms) + linear * bits / 8 + rotary(LLAMA_1B), rel=1e-6)


def test_mixture_of_experts() -> None:
    """All experts are weights; what a token reads at once are eight of them."""
    found = plan(QWEN3_30B_A3B, QWEN3_600M, max_memory=gpus(24, 24, 24))
    whole(found, QWEN3_30B_A3B, QWEN3_600M)
    assert layers_of(found) == {0: range(0, 16), 1: range(16, 33), 2: range(33, 48)}
    assert found.draft_device == 2
    assert found.on(1).working == 4096 * (3 * 8 * 768 + 4 * 2048) * 2
    with pytest.raises(PlacementError, match=r"56\.87 weights"):
        plan(QWEN3_30B_A3B, QWEN3_600M, max_memory=gpus(24, 24))


def test_tied_embeddings_count_once() -> None:
    """A tied head is where the embedding is, so the draft goes there."""
    found = plan(LLAMA_1B, QWEN3_600M, max_memory=gpus(3, 3))
    whole(found, LLAMA_1B, QWEN3_600M)
    assert found.device_map["model.embed_tokens"] == found.device_map["lm_head"] == found.draft_device == 0
    assert found.on(1).layers
    assert not found.on(1).draft_weights


def test_draft_elsewhere() -> None:
    memory = gpus(24, 24, cpu="64GiB")
    on_cpu = plan(LLAMA_8B, LLAMA_1B, max_memory=memory, draft_device="cpu")
    whole(on_cpu, LLAMA_8B, LLAMA_1B)
    assert on_cpu.draft_device == "cpu"
    assert on_cpu.on("cpu").draft_weights == 2 * parameters(LLAMA_1B) + rotary(LLAMA_1B)
    assert on_cpu.on(0).draft_weights == on_cpu.on(1).draft_weights == 0 == on_cpu.offloaded
    first = plan(LLAMA_8B, LLAMA_1B, max_memory=memory, draft_device="cuda:0")
    assert first.draft_device == 0
    assert first.device_map["lm_head"] == 1
    for nowhere in ("cuda:2", "disk"):
        with pytest.raises(PlacementError, match=rf"`draft_device` is '{nowhere}', and the memory there is: GPU 0 24"):
            plan(LLAMA_8B, LLAMA_1B, max_memory=memory | {"disk": "9GB"}, draft_device=nowhere)
    quantised = plan(
        LLAMA_8B, LLAMA_1B, max_memory=memory, draft_device="cpu", quantization_config=BNB_4BIT
    )  # fmt: skip
    assert quantised.on("cpu").draft_weights
    assert not quantised.on("cpu").target_weights


def test_map_given() -> None:
    names = {"model.embed_tokens": "cuda:1", "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0}
    given = names | {f"model.layers.{index}": 1 if index < 8 else 0 for index in range(32)}
    found = plan(LLAMA_8B, LLAMA_1B, max_memory=gpus(24, 24), device_map=given)
    whole(found, LLAMA_8B, LLAMA_1B)
    assert found.draft_device == 0
    assert found.device_map["model.embed_tokens"] == 1
    assert layers_of(found) == {1: range(0, 8), 0: range(8, 32)}
    one = plan(LLAMA_8B, LLAMA_1B, max_memory=gpus(24, 24), device_map="cuda:1")
    assert one.device_map == {"": 1}
    assert one.on(0).used == 0
    with pytest.raises(PlacementError, match="GPU 0 would be"):
        plan(LLAMA_8B, LLAMA_1B, max_memory=gpus(12, 24), device_map=given)
    del given["lm_head"]
    with pytest.raises(PlacementError, match="says nothing of 'lm_head'"):
        plan(LLAMA_8B, LLAMA_1B, max_memory=gpus(24, 24), device_map=given)


def test_long_context_pushes_layers_on() -> None:
    """8 rows of 8,192 tokens: the caches take 10 GiB, each on its layer's GPU, and reading the prompts 7 GiB."""
    memory = gpus(24, 24, 24)
    short = plan(LLAMA_8B, LLAMA_1B, max_memory=memory, device_map="sequential")
    assert list(layers_of(short)) == [0]
    long = plan(LLAMA_8B, LLAMA_1B, max_memory=memory, device_map="sequential", batch=8, context=8192)
    whole(long, LLAMA_8B, LLAMA_1B, 8 * (8192 + 17))
    assert layers_of(long) == {0: range(0, 15), 1: range(15, 32)}
    for each in long.devices[:2]:
        assert each.target_cache == kept(LLAMA_8B, len(each.layers), 8 * (8192 + 17))
        assert each.working >= 8 * 8192 * (3 * 14336 + 4 * 4096) * 2
    with pytest.raises(PlacementError, match=r"batch 64 and context 8,192"):
        plan(LLAMA_8B, LLAMA_1B, max_memory=memory, batch=64, context=8192)


def test_no_accelerator() -> None:
    found = plan(LLAMA_8B, LLAMA_1B, max_memory={"cpu": "32GiB"})
    whole(found, LLAMA_8B, LLAMA_1B)
    assert found.device_map == {"": "cpu"}
    assert found.draft_device == "cpu"
    assert found.offloaded == 0
    disk = plan(LLAMA_8B, LLAMA_1B, max_memory={"cpu": "8GiB", "disk": "100GB"})
    assert disk.draft_device == "cpu"
    assert disk.offloaded == disk.on("disk").target_weights > 0


def test_half_the_memory_is_enough_in_half_the_precision() -> None:
    single = plan(LLAMA_1B, max_memory={"cpu": "16GiB"}, dtype="float32")
    assert single.on("cpu").target_weights == 4 * parameters(LLAMA_1B) + rotary(LLAMA_1B)
    assert single.on("cpu").target_cache == 2 * kept(LLAMA_1B, 16)


def test_page_prints_what_the_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/place-models.md").read_text(encoding="utf-8")
    shown = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    code = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "placement" in block]
    assert len(shown) == len(code) == 2
    namespace: dict[str, Any] = {}
    for text, block in zip(shown, code, strict=True):
        exec(block, namespace)
        assert capsys.readouterr().out.split() == text.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "`batch` must be an integer of at least 1, got 0"),
        ({"context": 1.5}, "`context` must be an integer of at least 1, got 1.5"),
        ({"max_memory": {}}, "no memory to run on"),
        ({"max_memory": {"disk": "1GB"}}, "no memory to run on"),
        ({"max_memory": {0: "much"}}, "must be sizes by device"),
        ({"max_memory": {0: 1.5}}, "must be sizes by device"),
        ({"max_memory": {"gpu": "1GB"}}, "A device must be"),
        ({"device_map": "everywhere"}, "A device must be"),
        ({"dtype": "int8"}, "`dtype` must be a floating-point dtype"),
        ({"dtype": "half-float"}, "`dtype` must be a floating-point dtype"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        plan(LLAMA_1B, **({"max_memory": gpus(24)} | arguments))


def test_what_is_no_causal_language_model() -> None:
    with pytest.raises(PlacementError, match="No causal language model can be made"):
        plan({"model_type": "t5"}, max_memory=gpus(24))
    with pytest.raises(IncompatibleDraftError, match="can't be planned"):
        plan(LLAMA_1B, {"model_type": "t5"}, max_memory=gpus(24))
