"""Every difference between Transformers versions, and every question put to its private parts.

Supported: 5.18 to 5.x. 5.24 renamed the keyword and output field `past_key_values` to `cache`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers.generation import GenerationMixin


TRANSFORMERS = Version(transformers.__version__)
CACHE = "cache" if TRANSFORMERS >= Version("5.24.0.dev0") else "past_key_values"

PLAIN_MODULES = {f"torch.nn.modules.{name}" for name in ("linear", "sparse", "container", "activation")}
PLAIN_MODULES |= {"transformers.activations"}


def seq_length(cache: Any) -> int:
    """Tokens a row in a Transformers cache."""
    return int(cache.get_seq_length()) if len(cache.layers) else 0


def is_users_cache(cache: Any) -> bool:
    """Whether the user passed this cache to `generate` and will look at it afterwards."""
    return cache is not None and (bool(getattr(cache, "_is_user_defined", False)) or seq_length(cache) > 0)


def new_cache(model: Any) -> Any:
    """An empty cache of Transformers' default kind."""
    return transformers.DynamicCache(config=text_config(model))


def pop_cache(model_kwargs: dict[str, Any]) -> Any:
    """Take the cache out of `generate`'s model arguments."""
    return model_kwargs.pop(CACHE, None)


def text_config(model: Any) -> Any:
    """The config of the decoder inside `model`."""
    return model.config.get_text_config(decoder=True)


def attention_implementation(model: Any) -> str:
    """`"sdpa"`, `"eager"`, `"flash_attention_2"` …"""
    return str(text_config(model)._attn_implementation)


def forward_parameters(model: Any) -> set[str]:
    """Names of the arguments of the model's forward."""
    return set(inspect.signature(type(model).forward).parameters)


def max_positions(model: Any) -> int | None:
    """The longest text the model has positions for, or `None` where it doesn't say."""
    config = text_config(model)
    for name in ("max_position_embeddings", "n_positions"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    return None


def decoding_loop_reason(model: Any) -> str | None:
    """Why a model's class must keep its own decoding loop, or `None` if it has the usual one."""
    kind = getattr(type(model), "_hf_specdec_base", type(model))
    return None if kind._sample is GenerationMixin._sample else f"{kind.__name__} has a decoding loop of its own"


def row_forward_reason(model: Any) -> str | None:
    """Why a model can't run on rows with their own positions and a four-dimensional mask, or `None`."""
    config = text_config(model)
    if model.config.is_encoder_decoder:
        return "encoder-decoder models are not sped up yet"
    if getattr(model, "_is_stateful", False):
        return "its recurrent state can't be rolled back"
    if config is not model.config:
        return "multimodal models are not sped up yet"
    if "position_ids" not in forward_parameters(model):
        return "its forward takes no `position_ids`"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention takes no prepared mask"
    if (implementation := attention_implementation(model)) not in ("sdpa", "eager"):
        return f"attention '{implementation}' takes no per-row mask (load it with attn_implementation='sdpa')"
    if not set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}:
        return f"it has layer types {sorted(set(config.layer_types))}"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked attention is not sped up yet"
    return None


def mask_windows(model: Any) -> dict[str | None, int | None]:
    """Which masks the decoder wants: layer type (or `None` for one mask for all) → window, `None` for full attention."""
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    if types := getattr(config, "layer_types", None):
        return {kind: window if kind == "sliding_attention" else None for kind in set(types)}
    return {None: window}


def layer_windows(model: Any) -> list[int | None]:
    """The window of every decoder layer, `None` for full attention."""
    windows = mask_windows(model)
    config = text_config(model)
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    return [windows[kind] for kind in types]


def altered_reason(model: Any, home: str) -> str | None:
    """Why a model isn't exactly what Transformers' module `home` defines (hooks, patches, quantisation, several devices).

    Args:
        model: The model.
        home: Name of the Transformers module that defines its classes.
    """
    hooks = torch.nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return "a global forward hook is set"
    known = set()
    for module in model.modules():
        kind = getattr(type(module), "_hf_specdec_base", type(module))
        if kind not in known:
            if kind.__module__ != home and kind.__module__ not in PLAIN_MODULES:
                return f"it has a {kind.__module__}.{kind.__name__}"
            if kind is not torch.nn.ModuleList and kind.forward.__module__ != kind.__module__:
                return f"the forward of {kind.__name__} was replaced"
            known.add(kind)
        own = vars(module)
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            return f"a {kind.__name__} has a hook or a forward of its own"
        if module._compiled_call_impl is not None:
            return f"a {kind.__name__} is compiled"
    kinds = {(type(each), each.dtype, each.device) for each in model.parameters()}
    if len(kinds) > 1 or not next(iter(kinds))[1].is_floating_point or next(iter(kinds))[0] is not torch.nn.Parameter:
        return "its parameters are of several kinds, types or devices"
    return None


def all_token_logits(output: Any) -> Tensor:
    """Logits `[rows, n, vocabulary]` of a forward."""
    logits: Tensor = output.logits
    return logits
