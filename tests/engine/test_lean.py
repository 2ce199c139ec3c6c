"""The lean forward: the model's own results, and only where that is certain."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import hf_specdec
from hf_specdec.engine import lean
from hf_specdec.engine.forward import RowModel
from hf_specdec.engine.lean import LeanForward, unsupported_reason
from tests.tiny import ARCHITECTURES, WINDOW, tiny_model


LEAN = ("llama", "mistral", "qwen2", "qwen3")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in LEAN},
    "one head for each key": ("llama", {"num_key_value_heads": 4}),
    "with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "another activation": ("llama", {"hidden_act": "gelu"}),
    "wide heads": ("llama", {"head_dim": 32}),
    "tied head": ("llama", {"tie_word_embeddings": True}),
    "scaled positions": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "windows in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def pair_of_runners(model: Any, rows: int) -> tuple[RowModel, RowModel]:
    """A lean runner, and one through the model's own forward."""
    fast, slow = RowModel(model, rows, 32), RowModel(model, rows, 32)
    assert fast.lean is not None
    slow.lean = None
    return fast, slow


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lengths", [[20], [20, 20, 20], [3, 20, 11]])
def test_blocks_of_every_shape_give_the_models_own_logits(variant: str, lengths: list[int]) -> None:
    name, changes = VARIANTS[variant]
    model = tiny_model(name, **changes)
    runners = pair_of_runners(model, len(lengths))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 97, (length,), generator=generator).tolist() for length in lengths]
    # the norm weights of a fresh model are all one, which hides mistakes
    for each in model.modules():
        if type(each).__name__.endswith("RMSNorm"):
            each.weight.uniform_(0.5, 1.5, generator=generator)
    fast, slow = (runner.prefill(prompts).logits for runner in runners)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)
    for width in (1, 2, 5, 1, 9):
        block = torch.randint(2, 97, (len(lengths), width), generator=generator)
        counts = [max(1, width - index) for index in range(len(lengths))]
        fast, slow = (runner.forward(block, counts).logits for runner in runners)
        for row, count in enumerate(counts):
            torch.testing.assert_close(fast[row, :count], slow[row, :count], rtol=1e-4, atol=1e-4)
        for runner in runners:
            runner.cache.commit(counts)
    for mine, own in zip(runners[0].cache.layers, runners[1].cache.layers, strict=True):
        for row, length in enumerate(runners[0].cache.lengths):
            torch.testing.assert_close(mine.keys[row, :, :length], own.keys[row, :, :length], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.values[row, :, :length], own.values[row, :, :length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_only_the_wanted_logits(keep: int) -> None:
    fast, slow = pair_of_runners(tiny_model(), 1)
    block = torch.arange(5, 12)[None]
    for wanted in (keep, torch.tensor([1, 4])):
        got, own = (runner.forward(block, [7], wanted).logits for runner in (fast, slow))
        assert got.shape == own.shape
        torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-4)


def test_in_bfloat16_the_operations_round_where_transformers_rounds() -> None:
    model = tiny_model().to(torch.bfloat16)
    fast, slow = pair_of_runners(model, 1)
    prompt = [list(range(5, 25))]
    assert torch.equal(fast.prefill(prompt).logits, slow.prefill(prompt).logits)
    block = torch.arange(5, 11)[None]
    ours, own = fast.forward(block, [6]).logits, slow.forward(block, [6]).logits
    assert (ours - own).float().norm() < 0.02 * own.float().norm()


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(LEAN)))
def test_other_families_run_their_own_forward(name: str) -> None:
    assert "is not one of" in str(unsupported_reason(tiny_model(name)))
    assert LeanForward.of(tiny_model(name)) is None


class Adapter(nn.Linear):
    """What PEFT does to a projection."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class Child(LlamaForCausalLM):
    """A user's own model."""


def altered(what: str) -> Any:
    model = tiny_model()
    layer = model.model.layers[1]
    if what == "training":
        model.train()
    elif what == "hook":
        layer.mlp.register_forward_hook(lambda *_: None)
    elif what == "pre-hook":
        model.model.norm.register_forward_pre_hook(lambda *_: None)
    elif what == "own forward":
        layer.self_attn.forward = layer.self_attn.forward
    elif what == "adapter":
        layer.mlp.up_proj = Adapter(64, 128, bias=False)
    elif what == "other norm":
        layer.input_layernorm = nn.LayerNorm(64)
    elif what == "more parts":
        layer.self_attn.extra = nn.Linear(4, 4)
    elif what == "mixed types":
        model.model.norm.to(torch.float64)
    elif what == "eager":
        model.set_attn_implementation("eager")
    elif what == "subclass":
        model.__class__ = Child
    elif what == "compiled":
        layer.compile()
    elif what == "two factors":
        layer.mlp.up_proj = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(8, 128, bias=False))
    elif what == "head in a sequence":
        model.lm_head = nn.Sequential(model.lm_head)
    elif what == "no norm":
        model.model.norm = nn.Identity()
    elif what == "layer dropped":
        model.model.layers = model.model.layers[:1]
    elif what == "fewer layers wanted":
        model.config.num_hidden_layers = 1
    return model


@pytest.mark.parametrize(
    "what",
    [
        "training", "hook", "pre-hook", "own forward", "adapter", "other norm", "more parts", "mixed types", "eager",
        "subclass", "compiled", "two factors", "head in a sequence", "no norm", "layer dropped", "fewer layers wanted",
    ],
)  # fmt: skip
def test_an_altered_model_runs_its_own_forward(what: str) -> None:
    model = altered(what)
    assert unsupported_reason(model) is not None
    assert LeanForward.of(model) is None


def test_a_patched_class_runs_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    model = tiny_model()
    assert LeanForward.of(model) is not None
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    assert "was replaced" in str(unsupported_reason(model))


def test_a_global_hook_is_respected() -> None:
    model = tiny_model()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert LeanForward.of(model) is None
    finally:
        handle.remove()
    assert LeanForward.of(model) is not None


def test_a_hook_set_between_two_generations_is_called() -> None:
    model, seen = tiny_model(), []
    ids = torch.arange(5, 15)[None]
    before = hf_specdec.generate(model, ids, max_new_tokens=8, do_sample=False)
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(hf_specdec.generate(model, ids, max_new_tokens=8, do_sample=False), before)
    assert seen


def test_new_weights_are_used() -> None:
    model = tiny_model()
    ids = torch.arange(5, 15)[None]
    hf_specdec.generate(model, ids, max_new_tokens=4, do_sample=False)
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight)
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(hf_specdec.generate(model, ids, max_new_tokens=8, do_sample=False), wanted)


def test_a_model_whose_results_differ_runs_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Transformers that computes something else under the same names is found out before first use."""

    def doubled(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any) -> Any:
        return (q * cos + modeling_llama.rotate_half(q) * sin) * 2, k * cos + modeling_llama.rotate_half(k) * sin

    model = tiny_model()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", doubled)
    assert unsupported_reason(model) is None
    assert LeanForward.of(model) is None
    assert lean._agrees[model][0] is False


def test_hidden_states_come_from_the_models_own_forward() -> None:
    runner = RowModel(tiny_model(), 1, 32)
    assert runner.lean is not None
    assert runner.forward(torch.arange(5, 9)[None], [4], output_hidden_states=True).hidden_states is not None


@pytest.mark.parametrize("lean_forward", [True, False])
def test_the_user_can_switch_it_off(lean_forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(), torch.arange(5, 15)[None]
    monkeypatch.setenv("HF_SPECDEC_LEAN", "1" if lean_forward else "0")
    text = hf_specdec.generate(model, ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(text, model.generate(ids, max_new_tokens=8, do_sample=False))
    stats = hf_specdec.last_stats(model)
    assert stats is not None
    assert stats.lean_forward is lean_forward


def test_fewer_layers_after_the_first_use() -> None:
    model, ids = tiny_model("qwen3"), torch.arange(5, 15)[None]
    hf_specdec.generate(model, ids, max_new_tokens=4, do_sample=False)
    model.config.num_hidden_layers = 1
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(hf_specdec.generate(model, ids, max_new_tokens=8, do_sample=False), wanted)


@pytest.mark.parametrize("what", ["wrapped forward", "attention", "rotation"])
def test_a_patch_after_the_first_use_is_respected(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(), torch.arange(5, 15)[None]
    before = hf_specdec.generate(model, ids, max_new_tokens=8, do_sample=False)
    assert hf_specdec.last_stats(model).lean_forward  # type: ignore[union-attr]
    if what == "wrapped forward":
        original = modeling_llama.LlamaMLP.forward

        @functools.wraps(original)
        def patched(self: Any, x: torch.Tensor) -> torch.Tensor:
            return -3 * original(self, x)

        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", patched)
    elif what == "attention":
        shipped = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def attention(*args: Any, **kwargs: Any) -> Any:
            out, weights = shipped(*args, **kwargs)
            return -3 * out, weights

        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attention)
    else:
        monkeypatch.setattr(
            modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, *_: (q + cos[:, None], k - sin[:, None])
        )
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert not torch.equal(wanted, before)
    assert torch.equal(hf_specdec.generate(model, ids, max_new_tokens=8, do_sample=False), wanted)
    assert not hf_specdec.last_stats(model).lean_forward  # type: ignore[union-attr]


def test_recording_hidden_states_once_does_not_switch_it_off() -> None:
    model, ids = tiny_model(), torch.arange(5, 15)[None]
    model.generate(ids, max_new_tokens=4, do_sample=False, output_hidden_states=True, return_dict_in_generate=True)
    assert LeanForward.of(model) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_type_does_not_matter(dtype: torch.dtype) -> None:
    model, ids = tiny_model().to(torch.bfloat16), torch.arange(5, 45)[None]
    wanted = hf_specdec.generate(model, ids, max_new_tokens=8, do_sample=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(hf_specdec.generate(model, ids, max_new_tokens=8, do_sample=False), wanted)
        assert LeanForward.of(model) is not None
    finally:
        torch.set_default_dtype(before)
