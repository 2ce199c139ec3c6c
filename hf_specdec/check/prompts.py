"""Which of a user's prompts a check measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from ..errors import SpecDecError
from ..tools.loading import LoadedModel, encode_prompt
from ..tools.prompt_files import BadRecord, Reading, read_prompts
from ..tools.suites import BenchPrompt, Suite


__all__ = ["BadRecord", "Reading", "choose_prompts", "read_prompts"]
GOLDEN = (5**0.5 - 1) / 2


def choose_prompts(loaded: LoadedModel, reading: Reading, most: int, longest: int) -> Reading:
    """The prompts to measure: as many of each category as can be, from all over the file.

    Args:
        loaded: The model that will answer.
        reading: All prompts.
        most: How many to keep.
        longest: Most tokens of one; longer ones are left out and counted.

    Raises:
        SpecDecError: If none is left.
    """
    queues = {name: _spread(reading.suite, name) for name in reading.suite.categories}
    kept: list[BenchPrompt] = []
    bad, too_long = list(reading.bad), 0
    while queues and len(kept) < most:
        for name in list(queues):
            prompt = next(queues[name], None)
            if prompt is None:
                del queues[name]
                continue
            try:
                size = encode_prompt(loaded, prompt.text)["input_ids"].shape[1]
            except Exception as error:  # a chat template raises what its author wrote
                bad.append(BadRecord(_line_of(prompt), f"{prompt.id} can't be encoded: {error}"))
                continue
            if size > longest:
                too_long += 1
            elif len(kept) < most:
                kept.append(prompt)
    if not kept:
        last = f" {bad[-1]}" if bad else ""
        raise SpecDecError(
            f"None of the {len(reading.suite.prompts)} prompts can be measured: {too_long} have more than {longest} tokens "
            f"(--max-prompt-tokens), {len(bad)} can't be used.{last}"
        )
    order = {prompt.id: place for place, prompt in enumerate(reading.suite.prompts)}
    kept.sort(key=lambda prompt: order[prompt.id])
    return replace(reading, suite=replace(reading.suite, prompts=tuple(kept)), bad=tuple(bad), too_long=too_long)


def _spread(suite: Suite, category: str) -> Iterator[BenchPrompt]:
    """The prompts of a category, so that the first of them lie evenly over the file, which may be a log."""
    own = [prompt for prompt in suite.prompts if prompt.category == category]
    seen: set[int] = set()
    # multiples of the golden ratio, modulo 1, fill every gap in turn
    for place in chain((int(number * GOLDEN % 1 * len(own)) for number in range(4 * len(own))), range(len(own))):
        if place not in seen:
            seen.add(place)
            yield own[place]


def _line_of(prompt: BenchPrompt) -> int:
    number = prompt.source.removeprefix("line ")
    return int(number) if number.isdecimal() else 0
