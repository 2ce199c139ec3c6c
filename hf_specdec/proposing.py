"""A generation's dealings with its drafter: how much to draft, what came of it, and what to do when it breaks.

A broken draft costs speed, never the answer: whatever a drafter raises or returns, the generation goes on without it.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .config import SpecConfig
from .drafters import model_of
from .drafters.base import Draft, DraftContext, Drafter, checked
from .engine.cache import upload
from .engine.length import AdaptiveLength, FixedLength, GainWatch, Outlook, Round, controller
from .engine.ranks import ALONE, Ranks
from .engine.rows import Rows


logger = logging.getLogger(__name__)

NOTHING = Outlook("none", acceptance=0.0, free=True)


class Proposer:
    """The drafter of one generation. Of several ranks the leader alone has one; the others are told its drafts.

    Attributes:
        drafter: The drafter, or `None` where there is none (any more).
        name: What statistics call it.
        length: What chooses the draft length.
        outlook: What this round's draft was expected to bring, one entry a live row.
        dropped: Why it was given up, or `None`.
    """

    def __init__(
        self, model: Any, config: SpecConfig, drafter: Drafter | None, rows: Rows, ranks: Ranks = ALONE
    ) -> None:
        self.drafter = copy.copy(drafter) if ranks.leads else None
        self.name = name_of(drafter)
        self.most, self.rows, self.ranks = ranks.same(config.max_draft_tokens), rows, ranks
        self.length = _length_control(model, config, drafter) if ranks.leads else FixedLength(0)
        self.outlook: list[Outlook] = []
        self.dropped: str | None = None
        self._watch = GainWatch()
        # of each row: a draft that is only watched, and how many of its tokens the text has said so far
        self._watched: dict[int, tuple[Outlook, int]] = {}

    @property
    def num_successors(self) -> int:
        """How many of the target's most likely tokens the drafter learns from."""
        return int(getattr(self.drafter, "num_successors", 0))

    def start(self, context: DraftContext) -> None:
        """Begin: the vocabulary is known now."""
        self.vocabulary, self.device, self.trees = context.vocabulary, context.device, context.trees
        self.tell("start", context)

    def propose(self) -> Draft:
        """As many draft tokens as pay; none without a drafter or from a broken one."""
        draft = self._propose()
        return draft if self.ranks.team is None else self._shared(draft)

    def _propose(self) -> Draft:
        rows = self.rows
        self.outlook = [NOTHING] * len(rows.live)
        most = min(self.most, rows.draft_room())
        if self.drafter is None or most < 1:
            return self._nothing()
        try:
            outlook = self.drafter.outlook(rows)
            if len(outlook) != len(rows.live):
                raise ValueError(f"`outlook` must give {len(rows.live)} entries, got {len(outlook)}")
            self.outlook = [_sound(each) for each in outlook]
            length = self.length.choose(self.outlook, most)
            if length < 1 or not any(each.acceptance > 0 for each in self.outlook):
                return self._nothing()
            draft = self.drafter.propose(rows, length)
            return checked(draft, len(rows.live), length, self.vocabulary, self.device, self.trees)
        except Exception as error:
            self._broken(error)
            return self._nothing()

    def _shared(self, draft: Draft) -> Draft:
        """The leader's draft: the same tokens, counts and parents on every rank, in one broadcast."""
        rows, width = len(self.rows.live), draft.tokens.shape[1]
        state = [int(self.dropped is not None), int(draft.parents is not None)]
        parents = [[*row, *[0] * (self.most - len(row))] for row in draft.parents or [[]] * rows]
        lines = [[*state, count, *row] for count, row in zip(draft.counts, parents, strict=True)]
        tokens = torch.zeros(rows, self.most, dtype=torch.long, device=self.device)
        tokens[:, :width] = draft.tokens
        told, tokens = self.ranks.share(upload(lines, self.device), tokens)
        if self.ranks.leads:
            return draft
        lines = told.tolist()
        if lines[0][0] and self.dropped is None:
            self.dropped = "the leading rank has given up its drafter"
        counts = [line[2] for line in lines]
        trees = [line[3:][:count] for line, count in zip(lines, counts, strict=True)] if lines[0][1] else None
        return Draft(tokens[:, : max(counts)], counts, parents=trees)

    def _nothing(self) -> Draft:
        return Draft.from_lists([[]] * len(self.rows.live))

    def observe(self, seen: Round, emitted: Sequence[Sequence[int]], live: Sequence[int]) -> None:
        """Learn from a round.

        Args:
            seen: The round.
            emitted: Tokens that each row of it emitted.
            live: These rows, by index in the batch.
        """
        self.length.observe(seen)
        length = self.length
        if isinstance(length, FixedLength) or self.drafter is None:
            return
        for row, outlook, drafted, new in zip(live, seen.outlook, seen.drafted, emitted, strict=True):
            self._watch_text(length, row, outlook, bool(drafted), new)
        plain_rounds = (seen.verify_seconds + seen.draft_seconds) / length.plain_seconds(len(live))
        lost = self._watch.add(sum(map(len, emitted)) / len(live), plain_rounds, any(seen.drafted))
        if lost:
            logger.info("%s", lost)
            self.dropped = lost
            self.drafter = None

    def _watch_text(
        self, length: AdaptiveLength, row: int, outlook: Outlook, drafted: bool, new: Sequence[int]
    ) -> None:
        """Compare what a row said with a draft that was known but not verified, and learn its acceptance from that."""
        watched, said = self._watched.pop(row, (outlook, 0))
        if drafted:
            if said:
                length.learn(watched, said, said)  # so far it was right
            return
        for token in new:
            if said == len(watched.guess) or watched.guess[said] != token:
                break
            said += 1
        else:
            if said < len(watched.guess):
                self._watched[row] = (watched, said)
                return
        if watched.guess:
            length.learn(watched, len(watched.guess), said)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the drafter, if it is still there."""
        if self.drafter is not None:
            try:
                getattr(self.drafter, method)(*arguments)
            except Exception as error:
                self._broken(error)

    def drop(self, reason: str) -> None:
        """Go on without drafts."""
        if self.drafter is not None:
            logger.warning("speculation stopped: %s. The generation goes on without drafts.", reason)
            self.dropped = reason
        self.drafter = None

    def _broken(self, error: Exception) -> None:
        self.drop(f"the drafter {self.name!r} failed: {type(error).__name__}: {error}")


def name_of(drafter: Any) -> str:
    """What statistics call a drafter."""
    return "none" if drafter is None else str(getattr(drafter, "name", type(drafter).__name__))


def _length_control(model: Any, config: SpecConfig, drafter: Any) -> AdaptiveLength | FixedLength:
    if config.draft_length == "fixed":
        return FixedLength(config.max_draft_tokens)
    kind = f"{type(drafter).__module__}.{type(drafter).__qualname__} {name_of(drafter)}"
    return controller(model, kind, model_of(drafter))


def _sound(outlook: Outlook) -> Outlook:
    """The outlook with numbers of its own, or a clear error: what it says is kept beyond this round."""
    gains = None if outlook.gains is None else [float(gain) for gain in outlook.gains]
    if not all(map(math.isfinite, [outlook.acceptance, *(gains or ())])):
        raise ValueError(f"an outlook must have finite chances, got {outlook.acceptance} and {gains}")
    return replace(outlook, gains=gains, guess=tuple(map(int, outlook.guess)))
