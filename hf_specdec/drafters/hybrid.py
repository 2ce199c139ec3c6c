"""Lookup where the text repeats itself, the draft model elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch.nn.functional import pad

from ..engine.length import Outlook
from ..engine.rows import Rows
from .base import Draft, DraftContext, Drafter
from .draft_model import DraftModel
from .prompt_lookup import PromptLookup


class Hybrid(Drafter):
    """Draft by lookup in rows whose end matches at least `min_match` earlier tokens, else with a model.

    If every row has a match, the model isn't run at all.

    Args:
        model: The drafter to use where lookup finds nothing.
        min_match: Shortest match that lookup is trusted with.
    """

    name: ClassVar[str] = "hybrid"

    def __init__(self, model: DraftModel, min_match: int = 3) -> None:
        self.model = model
        self.lookup = PromptLookup(min_match=min_match)

    def start(self, context: DraftContext) -> None:
        """Start both."""
        self.model, self.lookup = copy.copy(self.model), copy.copy(self.lookup)
        self.model.start(context)
        self.lookup.start(context)
        self.found: list[bool] = []
        self.wanted: list[bool] = []
        self.asked_model = False

    def outlook(self, rows: Rows) -> list[Outlook]:
        """Lookup's outlook where it has a match, else the model's."""
        lookups, models = self.lookup.outlook(rows), self.model.outlook(rows)
        self.found = [each.acceptance > 0 for each in lookups]
        self.wanted = [not found and each.acceptance > 0 for found, each in zip(self.found, models, strict=True)]
        return [lookup if found else model for found, lookup, model in zip(self.found, lookups, models, strict=True)]

    def propose(self, rows: Rows, length: int) -> Draft:
        """Copy where there is a match; ask the model if some row has none."""
        copied = self.lookup.propose(rows, length)
        sources = [(self.lookup if found else self.model).name for found in self.found]
        self.asked_model = any(self.wanted)
        if not self.asked_model:
            return Draft(copied.tokens, copied.counts, sources=sources)
        drafted = self.model.propose(rows, length, self.wanted)
        taken = [index for index, found in enumerate(self.found) if found]
        if not taken:
            return replace(drafted, sources=sources)
        for index in taken:
            self.model.disregard(index)
        counts = [
            copy_count if found else model_count
            for found, copy_count, model_count in zip(self.found, copied.counts, drafted.counts, strict=True)
        ]
        width, probs = max(counts), drafted.probs
        tokens = pad(drafted.tokens, (0, max(width - drafted.tokens.shape[1], 0)))
        tokens[taken, : copied.tokens.shape[1]] = copied.tokens[taken].to(tokens.device)
        if probs is not None:  # a copied token is a draw from a distribution that holds nothing else
            probs = pad(probs, (0, 0, 0, tokens.shape[1] - probs.shape[1]))
            # not `one_hot`, which looks at its argument on the host
            probs[taken] = torch.zeros_like(probs[taken]).scatter_(-1, tokens[taken][..., None], 1.0)
        return replace(drafted, tokens=tokens, counts=counts, probs=probs, sources=sources)

    def commit(self, rows: Rows, accepted: Sequence[int]) -> None:
        """Tell the model, if it drafted; in a row that was copied none of its own tokens count."""
        if self.asked_model:
            self.model.commit(rows, [0 if found else kept for found, kept in zip(self.found, accepted, strict=True)])
            self.asked_model = False

    def select(self, keep: Sequence[int]) -> None:
        """Keep these rows."""
        self.model.select(keep)
