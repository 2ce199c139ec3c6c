"""A tiny random model with a byte-level tokenizer, saved as a folder that `from_pretrained` reads."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..tiny import tiny_model


END = "<|end|>"
CHAT_TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"


def byte_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte, then the end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate([*alphabet, END])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def save_tiny_chat_model(folder: Path, *, chat: bool = True) -> Path:
    """Save model and tokenizer to `folder` and return it."""
    tokenizer = byte_tokenizer(chat=chat)
    end = tokenizer.eos_token_id
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=end, pad_token_id=end, bos_token_id=None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
