"""A family of tiny checkpoints as files, for the stand-in of the Hub."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ..tiny import tiny_model
from .hub_server import HubServer


TEXT = [
    "The quick brown fox jumps over the lazy dog and runs away from the old house.",
    "Speculative decoding drafts a few tokens with a small model and verifies them with the large one.",
    "def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
]
CHAT = "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
INSTRUCT = "acme/Tiny-8B-Instruct"
DRAFT = "acme/Tiny-0.6B-Instruct"
TOKEN = "hf_of_the_tests"


@cache
def tokenizer(text: int = 3, reverse: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of about 320 tokens; reversed text gives it other ids."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([line[::-1] if reverse else line for line in TEXT[:text]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", bos_token="<|end|>")


@cache
def checkpoint(
    hidden: int, layers: int, vocabulary: int = 320, chat: bool = True, reverse: bool = False, shard: str = "5GB"
) -> dict[str, bytes]:
    """The files of a tiny Llama with its tokenizer."""
    model = tiny_model(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
    )
    words = tokenizer(reverse=reverse)
    words.chat_template = CHAT if chat else None
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=shard)
        words.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def changed(files: dict[str, bytes], without: tuple[str, ...] = (), **config: Any) -> dict[str, bytes]:
    """Other files beside a checkpoint's own, and another configuration."""
    kept = {name: data for name, data in files.items() if not name.endswith(without or ("none",))}
    return kept | {"config.json": json.dumps(json.loads(files["config.json"]) | config).encode()}


def fill(hub: HubServer) -> None:
    """Put the family on the stand-in."""
    chat = ("text-generation", "transformers", "conversational")
    large = checkpoint(128, 8, vocabulary=384, shard="2MB")
    small = checkpoint(32, 2)
    hub.push(INSTRUCT, large, tags=chat, downloads=900)
    hub.push("acme/Tiny-8B", checkpoint(128, 8, vocabulary=384, chat=False), tags=chat[:2], downloads=800)
    hub.push("acme/Tiny-1.7B-Instruct", checkpoint(64, 4), tags=chat, downloads=700)
    hub.push(
        DRAFT, small | {"README.md": b"# Tiny", "modeling_extra.py": b"raise SystemExit"}, tags=chat, downloads=600
    )
    hub.push("acme/Tiny-0.6B", checkpoint(32, 2, chat=False), tags=chat[:2], downloads=500)
    hub.push("acme/Tiny-0.5B-Instruct", checkpoint(32, 1, reverse=True), tags=chat, downloads=450)  # other token ids
    hub.push(f"{DRAFT}-GGUF", {"tiny-q4_0.gguf": b"GGUF" * 8, "README.md": b""}, tags=chat, downloads=400)
    quantization = {"quant_method": "awq", "bits": 4}
    hub.push(f"{DRAFT}-AWQ", changed(small, quantization_config=quantization), tags=(*chat, "awq"), downloads=390)
    hub.push(f"{DRAFT}-FP8", small, tags=chat, downloads=380)
    hub.push("acme/Tiny-0.6B-LoRA", {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, downloads=370)
    pickled = changed(small, without=(".safetensors",)) | {"pytorch_model.bin": b"\x80\x04." * 8}
    hub.push("acme/Tiny-0.4B-Instruct", pickled, tags=chat, downloads=360)
    code = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    custom = changed(small, auto_map=code, architectures=["TinyForCausalLM"], model_type="tiny_custom")
    hub.push("acme/Tiny-0.3B-Instruct", custom | {"modeling_tiny.py": b"raise SystemExit"}, tags=chat, downloads=350)
    hub.push("acme/Tiny-Encoder", changed(small, architectures=["LlamaForSequenceClassification"]), downloads=340)
    hub.push("vast/Large-8B-Instruct", checkpoint(128, 8), tags=chat, downloads=90)
    hub.push("vast/Large-7B-Instruct", checkpoint(128, 7), tags=chat, downloads=80)
