"""The forwards of a generation once more, with nothing around them: the least time that its rounds could have taken.

Seconds of a generation's own rounds over seconds of the same forwards alone are what the loop costs: Python, verification,
copies to the host, proposing. Replaying them in their order, at their widths and lengths, meets the same caches and the
same machine as the generation did; forwards measured one by one over and over are faster than any loop can have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..drafters import DraftModel
from ..engine.cache import upload
from ..engine.forward import RowModel
from ..stats import StepEvent
from .timing import now


def replay(
    model: Any, draft: Any, prompts: Sequence[Sequence[int]], events: Sequence[StepEvent], compile: bool = False
) -> float:
    """Seconds that the forwards of a generation take by themselves, prefill included.

    Args:
        model: The target.
        draft: The draft model, if some rounds were drafted by one; else it is not used.
        prompts: Tokens of each row, without padding.
        events: What `SpecConfig.on_step` was given. A tree's tokens are read as a chain.
        compile: As in `SpecConfig`.
    """
    texts = [list(prompt) for prompt in prompts]
    longest = max(map(len, texts)) + sum(max(map(len, event.emitted)) for event in events)
    reserve = longest + max(len(row) for event in events for row in event.drafted)
    with torch.no_grad():
        target = RowModel(model, len(texts), reserve, compile)
        drafter = RowModel(draft, len(texts), reserve, compile) if any(map(_draft_steps, events)) else None
        began = now(model.device)
        target.prefill(prompts)
        live = list(events[0].rows)
        for before, event in zip(events, events[1:], strict=False):
            for row, new in zip(before.rows, before.emitted, strict=True):
                texts[row] += new
            if list(event.rows) != live:
                keep = [live.index(row) for row in event.rows]
                live = list(event.rows)
                for runner in (target, drafter):
                    if runner is not None:
                        runner.cache.select(keep)
            if drafter is not None and (steps := _draft_steps(event)):
                _draft(drafter, [texts[row] for row in live], event, steps)
            _verify(target, [texts[row] for row in live], event)
        return now(model.device) - began


def _verify(target: RowModel, texts: Sequence[Sequence[int]], event: StepEvent) -> None:
    """The target's forward of a round."""
    width = max(map(len, event.drafted))
    block = [[text[-1], *row, *[0] * (width - len(row))] for text, row in zip(texts, event.drafted, strict=True)]
    target.forward(upload(block, target.device), [1 + len(row) for row in event.drafted])
    target.cache.commit([len(new) for new in event.emitted])


def _draft(drafter: RowModel, texts: Sequence[Sequence[int]], event: StepEvent, steps: int) -> None:
    """The draft model's forwards of a round: what it hasn't seen of the texts, then token after token."""
    known = drafter.model.get_input_embeddings().num_embeddings - 1
    seen = drafter.cache.lengths
    drafter.prefill([[min(token, known) for token in text[old:]] for text, old in zip(texts, seen, strict=True)])
    for step in range(steps - 1):
        block = upload([[min(row[step], known) if step < len(row) else 0] for row in event.drafted], drafter.device)
        drafter.forward(block, [1] * len(texts))
        drafter.cache.commit([1] * len(texts))
    kept = [min(accepted, steps - 1) for accepted in event.accepted]
    drafter.cache.roll_back([len(text) + count for text, count in zip(texts, kept, strict=True)])


def _draft_steps(event: StepEvent) -> int:
    """Tokens that a draft model drafted in a round, in its longest row."""
    by_model = (len(row) for row, by in zip(event.drafted, event.source, strict=True) if by == DraftModel.name)
    return max(by_model, default=0)
