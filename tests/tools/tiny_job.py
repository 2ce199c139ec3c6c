"""A tiny model whose every token is one readable character, and a file of prompts for it."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_specdec import SpecConfig, generate
from hf_specdec.tools.loading import LoadedModel, encode_prompt, load_model
from hf_specdec.tools.offline_records import JobSettings, read_records

from ..tiny import tiny_model


END = "<|end|>"
CHARACTERS = sorted({*string.ascii_letters, *string.digits, *" []"})


def save_job_model(folder: Path, *, chat: bool = True, layers: int = 2) -> str:
    """Save model and tokenizer to `folder` and return it. Other characters have no tokens."""
    vocabulary = {character: index for index, character in enumerate([*CHARACTERS, END])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)
    tokenizer.chat_template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}" if chat else None
    end = vocabulary[END]
    model = tiny_model(
        vocab_size=len(vocabulary), eos_token_id=end, pad_token_id=end, bos_token_id=None, num_hidden_layers=layers,
        max_position_embeddings=160,
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_prompts(path: Path, records: int) -> Path:
    """Write prompts of different lengths; every seventh comes twice."""
    with path.open("w", encoding="utf-8") as file:
        for index in range(records):
            known = index - 1 if index % 7 == 6 else index
            text = "".join(CHARACTERS[(known * 31 + place * place) % 62] for place in range(1 + known * 17 % 40))
            file.write(json.dumps({"id": f"r{index}", "prompt": text}) + "\n")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def one_by_one(settings: JobSettings, prompts: Path) -> list[str]:
    """The texts of a job's good records, each generated alone."""
    loaded = load_model(settings.model)
    return [_alone(loaded, settings, record) for record in read_records(prompts)]


def _alone(loaded: LoadedModel, settings: JobSettings, record: Any) -> str:
    inputs = encode_prompt(loaded, record.prompt, chat=settings.chat)
    options: dict[str, Any] = {"max_new_tokens": record.max_new_tokens or settings.max_new_tokens, "do_sample": False}
    if settings.temperature:
        options |= {"do_sample": True, "temperature": settings.temperature}
    config = SpecConfig(drafter="none", seed=settings.row_seed(record))
    output = generate(loaded.model, **inputs, **options, speculative=config)
    return str(loaded.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
