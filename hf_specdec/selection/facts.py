"""How large a model is, from its configuration alone.

A closed formula for the usual decoders, which takes no time and no torch; for the others the model is built without
memory (on torch's meta device) and counted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from ..errors import SpecDecError
from .candidates import ModelFacts, Repository


logger = logging.getLogger(__name__)

# types whose weights the formula counts to within a percent; tests/selection/test_facts.py builds one of each
GATED = {
    "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite", "granitemoe",
    "llama", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "phimoe",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm",
}  # fmt: skip
UNGATED = {"codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "starcoder2"}
LEARNED_POSITIONS = {"gpt2", "gpt_bigcode", "gpt_neo", "opt"}
NESTED = ("text_config", "llm_config", "language_config")  # where multimodal configurations keep the decoder's
OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions",),
}
BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}


def facts_of(repository: Repository) -> ModelFacts:
    """Sizes of a checkpoint's text decoder.

    `active_parameters` are the weights that one step reads: of a mixture of experts the chosen ones, and of tables
    that are only looked up (an input embedding of its own, per-layer embeddings) none.

    Args:
        repository: The checkpoint; only `id` and `config` are looked at.

    Raises:
        SpecDecError: If the configuration isn't a decoder's.
    """
    try:
        return replace(_facts(json.dumps(dict(repository.config), sort_keys=True, default=str)), id=repository.id)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        kind = repository.config.get("model_type", "unknown")
        raise SpecDecError(
            f"The configuration of {repository.id!r} (model type {kind!r}) doesn't say how large the model is. "
            "Pass a causal language model that Transformers knows."
        ) from error


@lru_cache(maxsize=256)
def _facts(text: str) -> ModelFacts:
    """Sizes from the text of a `config.json`."""
    raw = json.loads(text)
    config = decoder_config(raw)
    kind = str(getattr(config, "model_type", ""))
    if kind in GATED | UNGATED or (counted := _count_on_meta(config)) is None:
        counted = _count_by_formula(config, kind not in UNGATED)
    vocabulary = int(_read(config, "vocab_size"))
    dtype = raw.get("dtype") or raw.get("torch_dtype") or getattr(config, "dtype", None)
    return ModelFacts(
        id="",
        model_type=kind,
        layers=int(_read(config, "num_hidden_layers")),
        vocabulary=vocabulary,
        kv_numbers=_kv_numbers(config),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        output_parameters=vocabulary * int(_read(config, "hidden_size")),
        bits=quantised_bits(raw.get("quantization_config")),
        **counted,
    )


def quantised_bits(quantization: Any) -> float | None:
    """Bits a weight takes under a `quantization_config` (a dict or an object), or `None` where it keeps its dtype."""
    if not quantization:
        return None
    from .quantised import rule_of, settings_of

    if getattr(quantization, "dequantize", False):
        return None
    try:
        return rule_of(settings_of(quantization), saved=True).bits
    except (TypeError, ValueError, ArithmeticError, AttributeError):  # settings that nobody has seen yet
        return None


def bytes_of(dtype: str | None) -> int:
    """Bytes of one number of a dtype; 2 where it isn't known."""
    return BYTES.get(str(dtype).removeprefix("torch."), 2)


def decoder_config(raw: Mapping[str, Any]) -> Any:
    """The text decoder's configuration, with the defaults of its class where Transformers knows it."""
    name = next((name for name in NESTED if isinstance(raw.get(name), Mapping)), None)
    fields = dict(raw) if name is None else dict(raw[name])
    if "tie_word_embeddings" not in fields and "tie_word_embeddings" in raw:
        fields["tie_word_embeddings"] = raw["tie_word_embeddings"]
    kind = str(fields.pop("model_type", None) or raw.get("model_type", ""))
    for unused in ("quantization_config", "auto_map"):
        fields.pop(unused, None)
    try:
        from transformers import AutoConfig

        return AutoConfig.for_model(kind, **fields).get_text_config(decoder=True)
    except Exception as error:  # a type or a field that this version doesn't know; the fields themselves may do
        logger.debug("reading a configuration of type %r as it is: %s", kind, error)
        return SimpleNamespace(
            model_type=kind, **{name: value for name, value in fields.items() if name.isidentifier()}
        )


def _read(config: Any, name: str, default: Any = None) -> Any:
    """A field under its usual name or one of its other names."""
    for each in (name, *OTHER_NAMES.get(name, ())):
        if (value := getattr(config, each, None)) is not None:
            return value
    return default


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads, and numbers a head."""
    heads = int(_read(config, "num_attention_heads"))
    shared = _read(config, "num_key_value_heads", heads)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        shared = 1
    elif getattr(config, "new_decoder_architecture", False):
        shared = _read(config, "num_kv_heads", heads)
    return heads, int(shared), int(_read(config, "head_dim") or _read(config, "hidden_size") // heads)


def _count_by_formula(config: Any, gated: bool) -> dict[str, Any]:
    """Parameters, as `ModelFacts` names them. Biases and norms, well under a percent, aren't counted."""
    hidden, layers = int(_read(config, "hidden_size")), int(_read(config, "num_hidden_layers"))
    heads, shared, size = _heads(config)
    inner = int(_read(config, "intermediate_size") or 4 * hidden)
    table = int(_read(config, "vocab_size")) * hidden
    matrices = 3 if gated else 2
    attention = hidden * size * (2 * heads + 2 * shared)
    experts = int(_read(config, "num_experts") or _read(config, "num_local_experts") or 0)
    fixed, routed, fraction = layers * (attention + matrices * hidden * inner), 0, 1.0
    if experts > 1:
        fraction = int(_read(config, "num_experts_per_tok", 1)) / experts
        each = matrices * hidden * int(_read(config, "moe_intermediate_size") or inner)
        step = int(_read(config, "decoder_sparse_step") or 1)
        dense = set(_read(config, "mlp_only_layers") or ())
        sparse = sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
        always = hidden * experts + matrices * hidden * int(_read(config, "shared_expert_intermediate_size") or 0)
        fixed = layers * attention + (layers - sparse) * matrices * hidden * inner + sparse * always
        routed = sparse * each * experts
    positions = 0
    if config.model_type in LEARNED_POSITIONS:
        positions = hidden * int(_read(config, "max_position_embeddings", 0))
    copies = 1 if getattr(config, "tie_word_embeddings", False) else 2
    return {
        "parameters": fixed + routed + copies * table + positions,
        "active_parameters": fixed + int(routed * fraction) + table,
        "expert_parameters": routed,
        "expert_fraction": fraction,
    }


def _count_on_meta(config: Any) -> dict[str, Any] | None:
    """The same, of the model built without memory; `None` where Transformers can't build it."""
    try:
        import torch
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return None
        # accelerate's `init_empty_weights` would reach models that other threads build meanwhile
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a model's constructor raises
        logger.debug("a model of type %r isn't built to be counted: %s", config.model_type, error)
        return None
    if getattr(config, "tie_word_embeddings", False):
        model.tie_weights()
    output = model.get_output_embeddings()
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    looked_up -= {id(output.weight)} if output is not None else set()
    read = routed = 0
    fraction = 1.0
    used = _read(config, "num_experts_per_tok") or getattr(config, "top_k_experts", None)
    for name, parameter in model.named_parameters():
        if used and ".experts." in name and parameter.dim() == 3:  # [experts, rows, columns]
            routed += parameter.numel()
            fraction = min(int(used) / parameter.shape[0], 1.0)
        elif id(parameter) not in looked_up:
            read += parameter.numel()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "active_parameters": read + int(routed * fraction),
        "expert_parameters": routed,
        "expert_fraction": fraction,
    }


def _kv_numbers(config: Any) -> int:
    """Numbers that one token adds to Transformers' cache."""
    layers = int(_read(config, "num_hidden_layers"))
    kinds = getattr(config, "layer_types", None)
    if not isinstance(kinds, list):
        kinds = ["full_attention"] * layers
    # recurrent layers keep a state that doesn't grow, and the last layers of some models have no cache of their own
    kept = [index for index, kind in enumerate(kinds) if "attention" in str(kind) and "linear" not in str(kind)]
    kept = [index for index in kept if index < layers - int(getattr(config, "num_kv_shared_layers", None) or 0)]
    if getattr(config, "kv_lora_rank", None):  # latent attention, which Transformers caches expanded
        size = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        return len(kept) * int(config.num_attention_heads) * int(size)
    own = getattr(config, "per_layer_config", None) or [config] * layers  # layers of different sizes
    repeated = getattr(config, "new_decoder_architecture", False)  # Falcon caches a key for every query head
    sizes = (_heads(own[index]) for index in kept)
    return sum(2 * (heads if repeated else shared) * size for heads, shared, size in sizes)
