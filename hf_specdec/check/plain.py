"""What the target says of a text that is there already: one forward of its own over it, then `generate`'s processors.

Nothing here goes through the loop, its cache or its forwards: these are what is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import SpecConfig
from ..engine import compat
from ..errors import SpecDecError
from ..tools.loading import LoadedModel, encode_prompt
from ..tools.suites import BenchPrompt


FIXED_LENGTH = 5  # draft tokens where the length must not hang on what pays


def encoded(loaded: LoadedModel, prompts: Sequence[BenchPrompt]) -> list[Tensor]:
    """The prompts' ids, int64 `[length]` each, on the model's device.

    Raises:
        SpecDecError: If there are none.
    """
    if not prompts:
        raise SpecDecError("There are no prompts to check with. Give at least one.")
    return [encode_prompt(loaded, prompt.text)["input_ids"][0] for prompt in prompts]


def variants(config: SpecConfig) -> tuple[SpecConfig, ...]:
    """The settings to check, in turns: the user's own, and with an adaptive length also a fixed one.

    Where drafts don't pay an adaptive length drafts nothing, and nothing would be checked.
    """
    if config.draft_length == "fixed" or config.num_draft_tokens == 0:
        return (config,)
    length = min(config.max_draft_tokens, FIXED_LENGTH)
    return config, replace(config, draft_length="fixed", num_draft_tokens=length)


def processors_of(model: Any, prompt: Tensor, **options: Any) -> list[Any]:
    """The logits processors that `generate` uses behind a prompt with these options.

    Args:
        model: The target.
        prompt: Its ids, int64 `[length]`.
        **options: Arguments of `generate`.
    """
    found: list[Any] = []

    def look(
        model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        found.extend(logits_processor)
        return input_ids

    ids = prompt[None]
    model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=look, stop_strings=None, **options)
    return found


def logits_behind(model: Any, prompt: Tensor, text: Sequence[int]) -> Tensor:
    """Logits from which each token of a text was chosen, or would have been: float32 `[tokens, vocabulary]`.

    Args:
        model: The target, or a draft model; an id that it hasn't is read as 0.
        prompt: Ids of the prompt, int64 `[length]`.
        text: The tokens behind it.
    """
    ids = torch.cat([prompt, prompt.new_tensor(list(text[:-1]))])[None].to(compat.input_device(model))
    known = model.get_input_embeddings().weight.shape[0]
    options = {"logits_to_keep": len(text)} if "logits_to_keep" in compat.forward_parameters(model) else {}
    with torch.inference_mode():
        output = model(input_ids=ids.where(ids < known, 0), use_cache=False, **options)
        return compat.all_token_logits(output)[0, -len(text) :].float()


def processed(logits: Tensor, prompt: Tensor, text: Sequence[int], processors: Sequence[Any]) -> Tensor:
    """Scores as plain decoding has them, each with the prefix of its own position.

    Args:
        logits: As `logits_behind` gives them.
        prompt: Ids of the prompt.
        text: The tokens behind it.
        processors: As `processors_of` gives them.
    """
    if not processors:
        return logits
    ids = torch.cat([prompt, prompt.new_tensor(list(text))])[None].to(logits.device)
    scores = []
    with torch.inference_mode():
        for index in range(len(text)):
            score = logits[index : index + 1].clone()
            for processor in processors:
                score = processor(ids[:, : len(prompt) + index], score)
            scores.append(score.float())
    return torch.cat(scores)
