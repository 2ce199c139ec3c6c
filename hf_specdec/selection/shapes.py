"""A model as it will lie in memory, without its weights: what each part of it takes, and on which layer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ..errors import PlacementError
from .quantised import Rule, rule_of, settings_of, shrink


CACHE = "hf_specdec_cache"  # name of the buffers that stand for keys and values


@dataclass(frozen=True, slots=True)
class Load:
    """What a model will be asked to do.

    Attributes:
        batch: Rows.
        context: Tokens of a row, prompt and output together.
        num_draft_tokens: Most tokens drafted a round.
    """

    batch: int
    context: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("context", 1), ("num_draft_tokens", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PlacementError(f"`{name}` must be an integer of at least {least}, got {value!r}.")


@dataclass(frozen=True, slots=True)
class Shape:
    """A causal language model on the meta device, with the sizes that it will have.

    Its quantised weights are packed already, and each decoder layer has a buffer as large as its keys and values, so
    that whatever adds up a module's tensors counts weights and cache together.

    Attributes:
        name: Hub id, path or class.
        model: The model.
        dtype: Of its activations and its cache.
        layers: Names of its decoder layers.
        embedding: Name of the module that reads tokens.
        head: Name of the output layer.
        activations: Bytes that the forward of a whole context has at once on a device, an allowance.
        logits: Bytes of one float32 copy of a round's logits, `[batch, num_draft_tokens + 1, vocabulary]`.
        rule: How its weights are quantised, or `None`.
        quantization: The fields of its `quantization_config`, or `None`.
        tensors: Module, identity (tied weights share it), bytes, and whether it is cache, of every tensor.
    """

    name: str
    model: Any
    dtype: torch.dtype
    layers: tuple[str, ...]
    embedding: str
    head: str
    activations: int
    logits: int
    rule: Rule | None
    quantization: dict[str, Any] | None

    tensors: tuple[tuple[str, int, int, bool], ...] = field(repr=False)

    @property
    def weights(self) -> int:
        """Bytes of all weights; tied ones count once."""
        return sum({identity: size for _, identity, size, is_cache in self.tensors if not is_cache}.values())

    @property
    def caches(self) -> list[int]:
        """Bytes of each decoder layer's keys and values."""
        return [size for _, _, size, is_cache in self.tensors if is_cache]


def shape_of(model: Any, load: Load, dtype: Any = None, quantization: Any = None, **hub: Any) -> Shape:
    """The shape of a model.

    Args:
        model: A model, its configuration (an object, or the dict of a `config.json`), its Hub id or its local path.
        load: What it will be asked to do.
        dtype: As in `from_pretrained`; `None` and `"auto"` mean the saved one.
        quantization: A `quantization_config`; `None` means the saved one, if there is one.
        **hub: Passed to `AutoConfig.from_pretrained`, such as `revision`.

    Raises:
        PlacementError: If there is no causal language model of that configuration.
    """
    config = config_of(model, **hub)
    text = config.get_text_config(decoder=True)
    dtype = _dtype(dtype, model, text.dtype or config.dtype)
    saved = getattr(config, "quantization_config", None)
    settings = None if (saved or quantization) is None else settings_of(saved or quantization)
    name = str(model if isinstance(model, (str, os.PathLike)) else config.name_or_path or config.model_type)
    remote = {"trust_remote_code": True} if hub.get("trust_remote_code") else {}
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager", **remote)
    except (ValueError, ImportError, AttributeError, TypeError, RuntimeError) as error:
        raise PlacementError(
            f"No causal language model can be made from the configuration of {name!r}: {error} "
            "Pass the id, path or configuration of one."
        ) from error
    names = {id(module): place for place, module in empty.named_modules()}
    layers = _decoder_layers(empty, text.num_hidden_layers)
    slots = load.context + load.num_draft_tokens + 1
    for index, layer in enumerate(layers):
        room = torch.empty(load.batch, slots, _cached_numbers(layer, text, index), dtype=dtype, device="meta")
        layer.register_buffer(CACHE, room, persistent=False)
    rule = None if settings is None else rule_of(settings, saved is not None)
    if rule is not None:
        shrink(empty, rule)
    return Shape(
        name, empty, dtype, tuple(names[id(layer)] for layer in layers),
        names[id(empty.get_input_embeddings())], names[id(empty.get_output_embeddings() or layers[-1])],
        load.batch * load.context * _live_numbers(text) * dtype.itemsize,
        load.batch * (load.num_draft_tokens + 1) * text.vocab_size * 4, rule, settings, _tensors(empty),
    )  # fmt: skip


def config_of(model: Any, **hub: Any) -> Any:
    """The configuration of a model, a configuration, a `config.json`, a Hub id or a local path."""
    if isinstance(model, Mapping):
        return AutoConfig.for_model(**model)
    if isinstance(model, (str, os.PathLike)):
        return AutoConfig.from_pretrained(os.fspath(model), **({"trust_remote_code": False} | hub))
    return getattr(model, "config", model)


def _dtype(asked: Any, model: Any, saved: Any) -> torch.dtype:
    if isinstance(asked, str) and asked != "auto":
        asked = getattr(torch, asked.removeprefix("torch."), asked)
    found = (model.dtype if isinstance(model, nn.Module) else saved) if asked in (None, "auto") else asked
    found = torch.float32 if found is None else found
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise PlacementError(f"`dtype` must be a floating-point dtype, its name or 'auto', got {found!r}.")
    return found


def _tensors(model: nn.Module) -> tuple[tuple[str, int, int, bool], ...]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return tuple(
        (name.rpartition(".")[0], id(each), each.numel() * each.element_size(), name.endswith(CACHE))
        for name, each in named
    )


def _decoder_layers(model: nn.Module, number: int) -> list[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return list(module)
    raise PlacementError(f"{type(model).__name__} has no list of {number} decoder layers, so it can't be planned.")


def _cached_numbers(layer: nn.Module, config: Any, index: int) -> int:
    """Keys and values of one token in one layer. Sliding-window layers keep all tokens, as the loop can't drop any."""
    kinds = getattr(config, "layer_types", None)
    if kinds and "attention" not in kinds[index].replace("linear_attention", ""):
        return 0  # a recurrent state, whose size doesn't grow
    if index >= config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0):
        return 0  # it reads the cache of an earlier layer
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention is cached as it is computed with
        return int(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    ends = (".k_proj", ".v_proj")
    found = [each for name, each in layer.named_modules() if name.endswith(ends) and isinstance(each, nn.Linear)]
    if found:
        return 2 * max(each.out_features for each in found)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "new_decoder_architecture", False):
        key_heads = heads  # Falcon repeats keys for all heads before it caches them
    elif getattr(config, "multi_query", False):
        key_heads = 1
    return int(2 * key_heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))


def _live_numbers(config: Any) -> int:
    """Numbers a token that one layer has at once: three of the width of its MLP, four of the model's."""
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None) or 1
    return int(3 * max(wide, experts * (getattr(config, "moe_intermediate_size", None) or 0)) + 4 * config.hidden_size)
