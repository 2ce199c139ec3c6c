"""Tiny models from configs and seeds, and drafts whose quality is known."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from hf_specdec import Draft, Drafter
from hf_specdec.engine.rows import Rows


COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = 16
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "opt": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "phi": ("PhiForCausalLM", "PhiConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}


def tiny_model(name: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random model of a family. Its head is redrawn at unit scale, so that the text isn't one repeated token."""
    model_name, config_name, extra = ARCHITECTURES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**(COMMON | extra | changes))
    model = getattr(transformers, model_name)(config).eval()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    return model


def exact_pair(layers: int = 4, noise: float = 0.0, **changes: Any) -> tuple[Any, Any]:
    """A target and a one-layer draft that always agree; seeded noise on the draft's head makes them disagree."""
    target = tiny_model(num_hidden_layers=layers, **changes)
    draft = tiny_model(num_hidden_layers=1, **changes)
    with torch.no_grad():
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        draft.load_state_dict(
            {name: value for name, value in target.state_dict().items() if name in draft.state_dict()}
        )
        torch.manual_seed(1)
        draft.lm_head.weight.add_(noise * torch.randn_like(draft.lm_head.weight))
    return target, draft


def ragged_prompts(rows: int, longest: int = 24, vocabulary: int = 97, pad: int = 0) -> dict[str, Tensor]:
    """Left-padded random prompts of different lengths, as a tokenizer would give them."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(2, vocabulary, (rows, longest), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : (row * 7) % (longest - 2)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}


class Oracle(Drafter):
    """Drafts from known texts: right with the given chance, else off by one. A chance of 0 is adversarial."""

    name = "oracle"

    def __init__(self, texts: list[list[int]], chance: float, vocabulary: int = 97, length: int = 5) -> None:
        self.texts, self.chance, self.vocabulary, self.length = texts, chance, vocabulary, length

    def start(self, context: Any) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, rows: Rows, length: int) -> Draft:
        drafts = []
        for row in rows.live:
            known = self.texts[row][rows.num_new(row) :][:length]
            right = (torch.rand(len(known), generator=self.generator) < self.chance).tolist()
            drafts.append(
                [token if good else (token + 1) % self.vocabulary for token, good in zip(known, right, strict=True)]
            )
        return Draft.from_lists(drafts)
