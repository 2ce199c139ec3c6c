"""The forward of Llama-shaped decoders without the module calls around it.

Small models spend up to half of a decoding step between their matrix products: module calls, keyword passing, mask
preparation, copies of keys and values for grouped heads. `LeanForward` runs the same operations in the same order on
the same weights, one flat loop over the layers; only grouped attention is laid out differently (query heads that share
keys become extra query rows, where Transformers copies the keys).

It is used where it is certain to mean the same: known classes of Transformers, nothing hooked, patched, quantised or
spread over devices, and one comparison with the model's own forward before first use. Everything else runs through the
model's own forward.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import compat
from .cache import RowCache
from .products import Products, Way, apply, widened


logger = logging.getLogger(__name__)

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
WIDE_ATTENTION = 64  # tokens from which attention over 16-bit numbers is widened where products are
# whether a model passed the comparison, and what it called then
_agrees: WeakKeyDictionary[nn.Module, tuple[bool, tuple[object, ...]]] = WeakKeyDictionary()


class Linear(NamedTuple):
    """Weights of a projection."""

    weight: Tensor
    bias: Tensor | None


class Norm(NamedTuple):
    """Weight and epsilon of an RMS norm."""

    weight: Tensor
    eps: float


class Layer(NamedTuple):
    """What a decoder layer computes with."""

    kind: str | None
    before: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    scale: float
    after: Norm
    gate: Linear
    up: Linear
    down: Linear
    act: Any


class LeanForward:
    """A decoder's weights, gathered for one generation.

    Attributes:
        groups: Query heads for each key head.
    """

    def __init__(self, model: Any) -> None:
        inner, config = model.model, compat.text_config(model)
        attention = inner.layers[0].self_attn
        kinds = getattr(config, "layer_types", None)
        self.embedding: Tensor = inner.embed_tokens.weight
        self.rotary = inner.rotary_emb
        self.layers = [
            _layer(layer, kind) for layer, kind in zip(inner.layers, kinds or [None] * len(inner.layers), strict=True)
        ]
        self.norm = _norm(inner.norm)
        self.head = _linear(model.lm_head)
        self.head_dim = int(attention.head_dim)
        self.groups = int(attention.num_key_value_groups)
        self.products = Products([layer.up.weight for layer in self.layers])

    @classmethod
    def of(cls, model: Any) -> LeanForward | None:
        """The lean forward of a model, or `None` if its own forward has to run (always with `HF_SPECDEC_LEAN=0`)."""
        try:
            reason = "HF_SPECDEC_LEAN=0" if os.environ.get("HF_SPECDEC_LEAN") == "0" else unsupported_reason(model)
            if reason is None:
                lean, called = cls(model), compat.fingerprint(_home(model))
                if model not in _agrees or _agrees[model][1] != called:
                    _agrees[model] = lean._agrees_with(model), called
                if _agrees[model][0]:
                    return lean
                reason = "its results differ from the model's own"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        logger.debug("no lean forward for %s: %s", type(model).__name__, reason)
        return None

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | Mapping[Any, Tensor | None] | None, cache: RowCache,
        keep: Tensor | int = 0, way: Way | None = None,
    ) -> Tensor:  # fmt: skip
        """Run one block of new tokens.

        Args:
            tokens: New tokens, int64 `[rows, n]`.
            positions: Their positions, int64 `[rows, n]`.
            mask: What `RowModel` prepared: additive `[rows, 1, n, slots]`, `None`, or one of these by layer type.
            cache: Where keys and values go; its `begin` has been called.
            keep: Positions whose logits are wanted: an index, or how many of the last; 0 for all of them.
            way: How to multiply; `None` for what is fastest for that many tokens.

        Returns:
            Logits `[rows, m or n, vocabulary]`.
        """
        way = way or self.products.way(tokens.numel())
        hidden = F.embedding(tokens, self.embedding)
        cos, sin = self.rotary(hidden, positions)
        half = cos.shape[-1] // 2
        # x·cos + rotate_half(x)·sin, with the sign moved from x to sin: exact, and one copy less
        turn = (cos[:, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, None], half)
        masks = mask if isinstance(mask, Mapping) else {None: mask}
        packed = {kind: self._packed(each) for kind, each in masks.items()}
        for index, layer in enumerate(self.layers):
            inside = _normed(hidden, layer.before)
            attended = self._attend(layer, inside, turn, packed[layer.kind], cache.layers[index], way)
            hidden = hidden + apply(way, attended, *layer.o)
            inside = _normed(hidden, layer.after)
            gated = layer.act(apply(way, inside, *layer.gate)) * apply(way, inside, *layer.up)
            hidden = hidden + apply(way, gated, *layer.down)
        hidden = _normed(hidden, self.norm)
        if isinstance(keep, Tensor) or keep:
            hidden = hidden[:, keep if isinstance(keep, Tensor) else slice(-keep, None)]
            way = self.products.way(hidden.shape[0] * hidden.shape[1])
        return apply(way, hidden, *self.head)

    def _attend(
        self, layer: Layer, hidden: Tensor, turn: tuple[Tensor, Tensor, int], mask: Tensor | None, cache: Any, way: Way
    ) -> Tensor:
        rows, width, _ = hidden.shape
        shape = (rows, width, -1, self.head_dim)
        q, k = apply(way, hidden, *layer.q).view(shape), apply(way, hidden, *layer.k).view(shape)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = _normed(q, layer.q_norm), _normed(k, layer.k_norm)
        value = apply(way, hidden, *layer.v).view(shape).transpose(1, 2)
        query, key = _turned(q.transpose(1, 2), turn), _turned(k.transpose(1, 2), turn)
        keys, values = cache.update(key, value)
        if way is widened and width >= WIDE_ATTENTION:
            query, keys, values = query.float(), keys.float(), values.float()
            mask = None if mask is None else mask.float()
        if mask is None and width > 1:
            out = F.scaled_dot_product_attention(
                query, keys, values, is_causal=True, scale=layer.scale, enable_gqa=self.groups > 1
            )
        else:
            packed = query.reshape(rows, -1, self.groups * width, self.head_dim)
            out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=layer.scale)
            out = out.reshape(rows, -1, width, self.head_dim)
        return out.transpose(1, 2).reshape(rows, width, -1).to(hidden.dtype)

    def _packed(self, mask: Tensor | None) -> Tensor | None:
        """A mask for queries whose heads stand below each other."""
        return mask if mask is None or self.groups == 1 else mask.repeat(1, 1, self.groups, 1)

    def _agrees_with(self, model: Any) -> bool:
        """Compare with the model's own forward on a few tokens: a prompt, a block behind it, a single token."""
        device, widths = model.device, (3, 2, 1)
        count = sum(widths)
        tokens = torch.arange(count, device=device)[None] % len(self.embedding)
        expected = compat.all_token_logits(model(input_ids=tokens, use_cache=False)).float()
        ladder = torch.arange(count, device=device)
        cache = RowCache(len(self.layers), 1, count)
        found: list[Tensor] = []
        for width in widths:
            slots = cache.begin(ladder, width)
            hidden = (ladder[: cache.stop] > slots[..., None])[:, None]
            mask = torch.zeros(hidden.shape, dtype=self.embedding.dtype, device=device)
            mask.masked_fill_(hidden, float("-inf"))
            block = tokens[:, cache.stop - width : cache.stop]
            found.append(self(block, slots, {layer.kind: mask if found else None for layer in self.layers}, cache))
            cache.commit([width])
        logits = torch.cat(found, 1).float()
        allowed = 0.1 if self.embedding.dtype in (torch.bfloat16, torch.float16) else 1e-3
        return bool((logits - expected).norm() <= allowed * expected.norm())


def unsupported_reason(model: Any) -> str | None:
    """Why a model's own forward has to run, or `None`."""
    kind = compat.model_class(model)
    family = kind.__name__.removesuffix("ForCausalLM")
    home = _home(model)
    if family not in FAMILIES or kind.__module__ != home:
        return f"{kind.__name__} is not one of {', '.join(FAMILIES)}"
    if model.training or compat.attention_implementation(model) != "sdpa":
        return "it is in training mode or doesn't use sdpa attention"
    if reason := compat.altered_reason(model, home):
        return reason
    inner = model.model
    if len(inner.layers) != model.config.num_hidden_layers:
        return "it doesn't run all of its layers, or has lost some"
    names = {type(each).__name__ for layer in inner.layers for each in (layer, layer.self_attn, layer.mlp)}
    if names != {f"{family}{part}" for part in ("DecoderLayer", "Attention", "MLP")}:
        return f"its layers are made of {sorted(names)}"
    parts = [(inner.norm, f"{family}RMSNorm"), (inner.embed_tokens, "Embedding"), (model.lm_head, "Linear")]
    for layer in inner.layers:
        attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.pop(name) for name in ("q_norm", "k_norm") if name in attention]
        mlp.pop("act_fn", None)
        if set(attention) != ATTENTION or set(mlp) != MLP:
            return "its layers have other parts"
        parts += [(norm, f"{family}RMSNorm") for norm in norms]
        parts += [(linear, "Linear") for linear in (*attention.values(), *mlp.values())]
    for part, name in parts:
        if type(part).__name__ != name:
            return f"it has a {type(part).__name__} in the place of a {name}"
    return None


def _home(model: Any) -> str:
    """The Transformers module that would define a model of this family."""
    family = compat.model_class(model).__name__.removesuffix("ForCausalLM").lower()
    return f"transformers.models.{family}.modeling_{family}"


def _layer(layer: Any, kind: str | None) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = hasattr(attention, "q_norm")
    return Layer(
        kind=kind,
        before=_norm(layer.input_layernorm),
        q=_linear(attention.q_proj),
        k=_linear(attention.k_proj),
        v=_linear(attention.v_proj),
        o=_linear(attention.o_proj),
        q_norm=_norm(attention.q_norm) if head_norms else None,
        k_norm=_norm(attention.k_norm) if head_norms else None,
        scale=float(attention.scaling),
        after=_norm(layer.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        act=F.silu if type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation") else mlp.act_fn,
    )


def _linear(module: Any) -> Linear:
    return Linear(module.weight, module.bias)


def _norm(module: Any) -> Norm:
    return Norm(module.weight, float(module.variance_epsilon))


def _normed(hidden: Tensor, norm: Norm) -> Tensor:
    """RMS norm, rounded where Transformers rounds."""
    exact = hidden.to(torch.float32)
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.weight * exact.to(hidden.dtype)


def _turned(states: Tensor, turn: tuple[Tensor, Tensor, int]) -> Tensor:
    """Rotary position embedding of `[rows, heads, n, head_dim]`."""
    cos, sin, half = turn
    return states * cos + states.roll(half, -1) * sin
