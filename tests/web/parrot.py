"""A model whose answer is the prompt, so that tests choose what the page has to show; slow only where a test asks for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.tools.bench import WARM_UP_PROMPT
from hf_specdec.tools.loading import LoadedModel
from hf_specdec.web.models import Family, own_family

from ..tiny import tiny_model
from ..tools.tiny_chat import END, byte_tokenizer


SURE = 12.0  # how far the right token's logit is above the others; at temperature 2 sampling strays now and then
HELD_TOKENS = 15
WARM_UP_IDS = byte_tokenizer()(WARM_UP_PROMPT)["input_ids"]
SMALL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 4096,
}  # fmt: skip


class Parrot:
    """A forward hook that makes a model say its prompt again, then end.

    Attributes:
        delay: Seconds that every forward takes longer.
        leader: Whose prompt it says; a draft's is known to the target alone.
        wrong_every: Every so many tokens it says something else; 0 is never.
        error: What the next forwards raise, if anything.
        hold_at: The token of the answer, not a warm-up's, whose forward waits for `go`; `None` is none.
        place: Which token the last forward was for.
    """

    def __init__(self, model: Any, leader: Parrot | None = None, wrong_every: int = 0) -> None:
        self.delay, self.leader, self.wrong_every = 0.0, leader or self, wrong_every
        self.error: Exception | None = None
        self.hold_at: int | None = None
        self.go, self.place = threading.Event(), 0
        self.prompt: list[int] = []
        model.register_forward_hook(self, with_kwargs=True)

    def hold(self) -> None:
        """Have the next run wait when it has some tokens."""
        self.go.clear()
        self.hold_at, self.place = HELD_TOKENS, 0

    def release(self, delay: float = 0.0) -> None:
        """Let it go on, each forward longer by the delay."""
        self.delay, self.hold_at = delay, None
        self.go.set()

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Write other logits."""
        if self.error is not None:
            raise self.error
        time.sleep(self.delay)
        ids = (args[0] if args else kwargs["input_ids"])[0].tolist()
        positions = kwargs["position_ids"][0].tolist() if "position_ids" in kwargs else list(range(len(ids)))
        is_start = positions[0] == 0
        if is_start:
            self.prompt = ids
        self.place = positions[-1] + 1 - len(self.prompt)
        if self.hold_at is not None and self.place >= self.hold_at and self.prompt != WARM_UP_IDS:
            assert self.go.wait(60), "nobody let it go on"
        logits = torch.zeros_like(output.logits)
        kept = logits.shape[1]
        for place, index in enumerate(range(len(ids) - kept, len(ids))):
            known = is_start and index + 1 < len(ids)
            right = ids[index + 1] if known else self._answer(positions[index] + 1, model)
            logits[:, place, right] = SURE
        output.logits = logits
        return output

    def _answer(self, position: int, model: Any) -> int:
        prompt = self.leader.prompt
        place = position - len(prompt)
        if self.wrong_every and place % self.wrong_every == self.wrong_every - 1:
            return 33
        return prompt[place] if 0 <= place < len(prompt) else model.config.eos_token_id


def save_parrot(folder: Path) -> Path:
    """Save its weights, which decide nothing, and a tokenizer of bytes whose chat template leaves the prompt as it is."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    end = tokenizer.convert_tokens_to_ids(END)
    changes = {"vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": end, "bos_token_id": None}
    tiny_model(**(SMALL | changes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def parrot_family(folder: Path, *, with_draft: bool = False) -> tuple[Family, Parrot]:
    """A family of parrots, and the target's hook; the draft is wrong now and then."""
    target, draft = AutoModelForCausalLM.from_pretrained(folder).eval(), None
    parrot = Parrot(target)
    if with_draft:
        draft = AutoModelForCausalLM.from_pretrained(folder).eval()
        Parrot(draft, parrot, wrong_every=7)
    family = own_family(str(folder), str(folder) if with_draft else None, "float32")
    family._loaded = LoadedModel(str(folder), target, AutoTokenizer.from_pretrained(folder)), draft
    return family, parrot
