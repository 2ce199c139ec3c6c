"""Every difference between Transformers versions, and every question put to its private parts.

Supported: 5.18 to 5.x. 5.24 renamed the keyword and output field `past_key_values` to `cache`.
"""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch import distributed as dist
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.generation import GenerationMixin
from transformers.integrations import accelerate as placing
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


TRANSFORMERS = Version(transformers.__version__)
CACHE = "cache" if TRANSFORMERS >= Version("5.24.0.dev0") else "past_key_values"

# classes whose `prepare_inputs_for_generation` only reads the prompt again where the rotary frequencies change
ROTARY_PREPARERS = ("Phi3ForCausalLM", "PhimoeForCausalLM")
PLAIN_MODULES = {
    f"torch.nn.modules.{name}" for name in ("linear", "sparse", "container", "activation", "dropout", "normalization")
}
PLAIN_MODULES |= {"transformers.activations", "transformers.pytorch_utils"}
PACKAGES = tuple(str(Path(str(package.__file__)).parent) for package in (torch, transformers))


def model_class(model: Any) -> type[Any]:
    """The class that Transformers or the user gave a model, also where `enable(model)` has put a subclass over it."""
    kind: type[Any] = getattr(type(model), "_hf_specdec_base", type(model))
    return kind


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


def commit(model: Any) -> str | None:
    """The commit on the Hub that a model was loaded from, or `None`."""
    found = getattr(model.config, "_commit_hash", None)
    return found if isinstance(found, str) else None


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


def input_device(model: Any) -> torch.device:
    """Where a model takes its tokens: also where Accelerate keeps the embedding's weights elsewhere between forwards."""
    return _runs_on(model, model.get_input_embeddings())


def head_device(model: Any) -> torch.device:
    """Where a model's output layer runs, which is where its last layers are."""
    return _runs_on(model, model.get_output_embeddings())


def _runs_on(model: Any, module: Any) -> torch.device:
    """Where a module of a model computes: what its Accelerate hook says, else where its parameters are."""
    hook = getattr(module, "_hf_hook", None)
    hooks = [hook, *getattr(hook, "hooks", ())]  # one hook, or a sequence of them
    for place in [getattr(each, "execution_device", None) for each in hooks]:
        if place is not None:
            return torch.device(place)
    place = next((each.device for each in (module or model).parameters()), model.device)
    return torch.device("cpu") if place.type == "meta" else place


def infer_device_map(model: Any, memory: dict[int | str, int], strategy: str) -> dict[str, int | str]:
    """The device map that `from_pretrained(..., device_map=strategy)` would choose.

    Args:
        model: The model, on the meta device.
        memory: Bytes by device; an integer is an accelerator.
        strategy: `"auto"`, `"balanced"`, `"balanced_low_0"` or `"sequential"`.

    Returns:
        Device by module name. `"disk"` takes what fits nowhere else, whether or not it is in `memory`.
    """
    no_split, loud = model._no_split_modules, logging.getLogger("accelerate.utils.modeling")
    level = loud.level
    loud.setLevel(logging.ERROR)  # it warns of accelerators that are planned for and not there
    try:
        if strategy != "sequential":
            low_zero = strategy == "balanced_low_0"
            memory = placing.get_balanced_memory(model, dict(memory), no_split, low_zero=low_zero)
        return dict(placing.infer_auto_device_map(model, dict(memory), no_split, offload_buffers=True))
    finally:
        loud.setLevel(level)


def free_memory() -> dict[int | str, int]:
    """Free bytes of this machine's accelerators and of its CPU, as `from_pretrained` counts them."""
    return {device: int(size) for device, size in placing.get_max_memory().items()}


def decoding_loop_reason(model: Any) -> str | None:
    """Why a model's class must keep its own decoding loop, or `None` if it has the usual one."""
    kind = model_class(model)
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
    kind = model_class(model)
    prepares = kind.prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if prepares and kind.__name__ not in ROTARY_PREPARERS:
        return f"{kind.__name__} prepares its inputs in a way of its own"
    windowed = getattr(config, "sliding_window", None) is not None and not getattr(config, "layer_types", None)
    if windowed and not hasattr(sys.modules[base_class(model).__module__], "create_sliding_window_causal_mask"):
        return "its config has a `sliding_window` that its attention doesn't use"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention takes no prepared mask"
    if (implementation := attention_implementation(model)) not in ("sdpa", "eager"):
        return f"attention '{implementation}' takes no per-row mask (load it with attn_implementation='sdpa')"
    if not set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}:
        return f"it has layer types {sorted(set(config.layer_types))}"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked attention is not sped up yet"
    return None


def base_class(model: Any) -> type:
    """The class of the decoder without its head, below the one that FSDP may have put over it."""
    kinds = type(getattr(model, model.base_model_prefix, model)).__mro__
    return next(kind for kind in kinds if not kind.__module__.startswith("torch."))


def steady_positions(model: Any) -> int | None:
    """The longest text for which rotary frequencies don't depend on the text's length; `None`: any."""
    config = text_config(model)
    parameters = getattr(config, "rope_parameters", None) or {}
    limits = []
    for each in [parameters, *parameters.values()]:
        kind = str(each.get("rope_type")) if isinstance(each, dict) else ""
        original = each.get("original_max_position_embeddings") if kind else None
        if kind == "longrope" or "dynamic" in kind:
            limits.append(original or max_positions(model) or 0)
    return min(limits, default=None)


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


def fingerprint(home: str) -> tuple[object, ...]:
    """What a model's forward calls besides the forwards of its modules: equal fingerprints, equal results."""
    module = sys.modules[home]
    names = ("apply_rotary_pos_emb", "rotate_half", "repeat_kv")
    return (ALL_ATTENTION_FUNCTIONS["sdpa"], *(getattr(module, name, None) for name in names))


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
        kind = model_class(module)
        if kind not in known:
            if kind.__module__ != home and kind.__module__ not in PLAIN_MODULES:
                return f"it has a {kind.__module__}.{kind.__name__}"
            if kind is not torch.nn.ModuleList and not _is_original(kind):
                return f"the forward of {kind.__name__} was replaced"
            known.add(kind)
        own = vars(module)
        if _real_hooks(own["_forward_hooks"]) or own["_forward_pre_hooks"] or "forward" in own:
            return f"a {kind.__name__} has a hook or a forward of its own"
        if module._compiled_call_impl is not None:
            return f"a {kind.__name__} is compiled"
    kinds = {(type(each), each.dtype, each.device) for each in model.parameters()}
    if len(kinds) > 1 or not next(iter(kinds))[1].is_floating_point or next(iter(kinds))[0] is not torch.nn.Parameter:
        return "its parameters are of several kinds, types or devices"
    return None


def _is_original(kind: type[torch.nn.Module]) -> bool:
    """Whether a class's forward, and every decorator around it, comes with Transformers or torch."""
    function: Any = kind.forward
    if function.__module__ != kind.__module__:
        return False
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(PACKAGES):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _real_hooks(hooks: dict[int, Any]) -> bool:
    """Whether there are hooks besides those that Transformers leaves behind after `output_hidden_states=True`."""
    return any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks.values())


def all_token_logits(output: Any) -> Tensor:
    """Logits `[rows, n, vocabulary]` of a forward."""
    logits: Tensor = output.logits
    return logits


def several_processes() -> bool:
    """Whether this process belongs to a group of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def tensor_parallel_group(model: Any) -> Any:
    """The process group that holds each layer of a model between its ranks, or `None`."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) < 2:
        return None
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def is_synced(model: Any) -> bool:
    """Whether ranks must run the same number of forwards: what `generate` takes for `synced_gpus=None`."""
    if not several_processes():
        return False
    return bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def is_sharded(model: Any) -> bool:
    """Whether other processes hold parts of a model's parameters."""
    if not several_processes():
        return False
    kinds = (kind for module in model.modules() for kind in type(module).__mro__[:2])
    if any(kind.__module__.startswith("torch.distributed.") for kind in kinds):
        return True
    return any(type(each).__name__ == "DTensor" or hasattr(each, "ds_id") for each in model.parameters())


def sharding_reason(model: Any, synced_gpus: bool) -> str | None:
    """Why the processes that hold a model can't be kept together, or `None` if they can.

    Args:
        model: The target.
        synced_gpus: Whether they run in lock-step.
    """
    stages = getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1
    if stages > 1:
        return "pipeline-parallel models are not sped up yet"
    if not synced_gpus and tensor_parallel_group(model) is None and is_sharded(model):
        return (
            "its parameters are spread over processes in a way that says nothing of who decodes what (load it with "
            "`DistributedConfig(tp_plan='auto')`, or pass `synced_gpus=True` if every process has prompts of its own)"
        )
    return None
