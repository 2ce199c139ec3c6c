"""How many bytes a quantised model has and where they may lie: the rules of the quantisers, without their packages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer, HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module


OFFLOADED = frozenset({"cpu", "disk"})
SPARE = 0.9  # of each device's memory, where a quantiser's package isn't there to tell: what most of them leave free
BLOCK, NESTED = 64, 256  # weights a scale, and scales a scale of scales, in bitsandbytes' 4-bit types


@dataclass(frozen=True, slots=True)
class Rule:
    """What a quantisation does to weights.

    Attributes:
        method: Name of the method, as in `quantization_config`.
        bits: Bits a quantised weight, its share of the scales included; `None`: all weights keep their dtype.
        kept: Modules that aren't quantised, or `None` for the quantisers' own choice (the output layer).
        experts: Whether stacked expert weights are quantised as well as linear layers.
        linear: Whether linear layers are.
        offload: Which of `"cpu"` and `"disk"` the weights of a model on accelerators may be left on.
    """

    method: str
    bits: float | None
    kept: tuple[str, ...] | None = None
    experts: bool = False
    linear: bool = True
    offload: frozenset[str] = OFFLOADED


def settings_of(quantization: Any) -> dict[str, Any]:
    """A `quantization_config` as a dict: of a checkpoint, or an object such as `BitsAndBytesConfig`."""
    return dict(quantization if isinstance(quantization, Mapping) else quantization.to_dict())


def rule_of(settings: Mapping[str, Any], saved: bool) -> Rule:
    """The rule of a `quantization_config`.

    Args:
        settings: Its fields.
        saved: Whether the checkpoint has quantised weights; else they are quantised while they are loaded.
    """
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        method = "bitsandbytes"
    found = _RULES.get(method, _packed)(settings, saved)
    kept = found.pop("kept", settings.get("modules_to_not_convert"))
    return Rule(method, kept=None if kept is None else tuple(kept), **found)


def shrink(model: nn.Module, rule: Rule) -> None:
    """Give a model on the meta device weights of the size that they will have."""
    if rule.bits is None:
        return
    kept = HfQuantizer.get_modules_to_not_convert(model, None if rule.kept is None else list(rule.kept))
    for name, module in model.named_modules():
        if not should_convert_module(name, kept):
            continue
        stacked = rule.experts and "experts" in name
        for part, weight in list(module.named_parameters(recurse=False)):
            is_linear = isinstance(module, (nn.Linear, Conv1D)) and part == "weight"
            if (rule.linear and is_linear) or (stacked and weight.ndim == 3):
                packed = torch.empty(math.ceil(weight.numel() * rule.bits / 8), dtype=torch.uint8, device="meta")
                setattr(module, part, nn.Parameter(packed, requires_grad=False))


def spared(settings: Mapping[str, Any], memory: dict[int | str, int]) -> dict[int | str, int]:
    """Memory less what the quantiser wants left free while it works; the disk isn't memory."""
    devices: dict[int | str, Any] = {device: size for device, size in memory.items() if device != "disk"}
    try:
        adjusted = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True).adjust_max_memory(devices)
    except (ImportError, ValueError, TypeError, AttributeError, AssertionError):
        adjusted = {device: size * SPARE for device, size in devices.items()}
    return memory | {device: int(size) for device, size in adjusted.items()}


def _bitsandbytes(settings: Mapping[str, Any], saved: bool) -> dict[str, Any]:
    scales = 8 / BLOCK + 32 / (BLOCK * NESTED) if settings.get("bnb_4bit_use_double_quant") else 32 / BLOCK
    return {
        "bits": 4 + scales if settings.get("load_in_4bit") else 8.0,
        "kept": settings.get("llm_int8_skip_modules"),
        "offload": OFFLOADED if settings.get("llm_int8_enable_fp32_cpu_offload") else frozenset(),
    }


def _torchao(settings: Mapping[str, Any], saved: bool) -> dict[str, Any]:
    kind = settings.get("quant_type")
    text = kind if isinstance(kind, str) else f"{type(kind).__name__} {kind}"
    size = re.search(r"(\d)_?weight", text, re.IGNORECASE)
    group = re.search(r"group_size\D{1,4}(\d+)", f"{text} {settings.get('quant_type_kwargs')}")
    bits = 4 + 32 / int(group[1] if group else 128) if size and size[1] == "4" else 8.0
    return {"bits": bits, "offload": frozenset({"cpu"}) if saved else OFFLOADED}


def _compressed_tensors(settings: Mapping[str, Any], saved: bool) -> dict[str, Any]:
    """Its weights are unpacked for good in the first forward, except where FP8 kernels were asked for."""
    ignored = [re.escape(name).join(("^", "$")) for name in settings.get("ignore") or () if not name.startswith("re:")]
    ignored += [name.removeprefix("re:") for name in settings.get("ignore") or () if name.startswith("re:")]
    return {"bits": 8.0 if settings.get("use_optimized_inference") else None, "kept": ignored}


def _quanto(settings: Mapping[str, Any], saved: bool) -> dict[str, Any]:
    bits = {"int4": 4.0, "int2": 2.0}.get(str(settings.get("weights")), 8.0)
    return {"bits": bits, "offload": frozenset()}


def _fp8(settings: Mapping[str, Any], saved: bool) -> dict[str, Any]:
    block = settings.get("weight_block_size") or (128, 128)
    bits = None if settings.get("dequantize") else 8 + 32 / math.prod(block)
    return {"bits": bits, "experts": True, "offload": OFFLOADED if saved else frozenset()}


def _mxfp4(settings: Mapping[str, Any], saved: bool) -> dict[str, Any]:
    bits = None if settings.get("dequantize") else 4 + 8 / 32
    return {"bits": bits, "experts": True, "linear": False, "offload": OFFLOADED if saved else frozenset({"cpu"})}


def _packed(settings: Mapping[str, Any], saved: bool) -> dict[str, Any]:
    """GPTQ, AWQ and others that tell their bits: a scale and a zero point a group. Unknown ones: no smaller."""
    bits = next((settings[name] for name in ("bits", "nbits", "w_bit", "num_bits") if settings.get(name)), None)
    group = max(int(settings.get("group_size") or 128), 32)
    return {"bits": None if bits is None else bits + (16 + bits) / group}


_RULES: dict[str, Callable[[Mapping[str, Any], bool], dict[str, Any]]] = {
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "quanto": _quanto,
    "torchao": _torchao,
    "hqq": lambda settings, saved: _packed(settings, saved) | {"offload": frozenset()},
}
