"""Drafts from a smaller causal language model with the target's token ids."""

from __future__ import annotations

import bisect
import copy
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from ..engine import compat, forward
from ..engine.forward import RowModel
from ..engine.length import Outlook
from ..engine.noise import draw
from ..engine.rows import Rows
from ..errors import IncompatibleDraftError
from .base import Draft, DraftContext, Drafter, Rate


HOST = "cpu"  # the kind of device whose results can be read without waiting
# how sure a draft is of its token: bins of its largest probability, each with the acceptance that is really measured
CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
Calibrations: TypeAlias = "weakref.WeakKeyDictionary[Any, Calibration]"  # by draft model
_CALIBRATIONS: weakref.WeakKeyDictionary[Any, Calibrations] = weakref.WeakKeyDictionary()  # by target


class Calibration:
    """How often a draft's tokens are accepted, by how sure it is of them.

    The confidence is the largest probability of the distribution that the token is taken from, known *before* the token is
    drawn: a draft that ends where it is low stays exact.
    """

    def __init__(self) -> None:
        bounds = (0.0, *CONFIDENCES, 1.0)
        # hopeful until measured, or a timid draft would never be tried
        self.bins = [Rate((1 + (low + high) / 2) / 2, weight=5.0) for low, high in itertools.pairwise(bounds)]
        self.overall = Rate(0.7)

    def chances(self, confidences: Sequence[float]) -> list[float]:
        """Chance of each token to be accepted."""
        return [self.bins[bisect.bisect(CONFIDENCES, each)].value for each in confidences]

    def update(self, confidence: float, accepted: bool) -> None:
        """Count one verified token."""
        self.bins[bisect.bisect(CONFIDENCES, confidence)].update(accepted)
        self.overall.update(accepted)


def snapshot(target: Any) -> Calibrations:
    """A copy of what was learnt with a target, for `restore`: a measurement must not learn from its own repetitions."""
    return copy.deepcopy(_CALIBRATIONS.get(target, weakref.WeakKeyDictionary()))


def restore(target: Any, saved: Calibrations) -> None:
    """Go back to what was known with a target at `snapshot`."""
    _CALIBRATIONS[target] = copy.deepcopy(saved)


class DraftModel(Drafter):
    """Draft with a model of the target's family.

    The model has its own row-offset cache, kept over the whole generation: a round costs one forward per drafted
    token. Its logits go through the target's processors once, which is the distribution that verification is told.
    The model itself is never changed.

    With an adaptive length a draft on a CPU also ends in mid-round, where the draft is so unsure that the next token isn't
    worth its cost; elsewhere reading its confidence would make the host wait in every step.

    Args:
        model: A causal language model with the target's token ids. Padded vocabularies are fine.
        confidence_threshold: Stop a draft behind the first token whose probability is below it (the token itself is
            kept, so that the output stays exact). Costs a device sync a token; `None` drafts the full length.
    """

    name: ClassVar[str] = "draft_model"
    most_unread: ClassVar[int] = 2  # tokens that a round has to read if the one before was drafted

    def __init__(self, model: Any, confidence_threshold: float | None = None) -> None:
        self.model = model
        self.confidence_threshold = confidence_threshold

    def start(self, context: DraftContext) -> None:
        """Make an empty cache.

        Raises:
            IncompatibleDraftError: If the model can't draft for several rows of different length.
        """
        if reason := forward.unsupported_reason(self.model):
            raise IncompatibleDraftError(
                f"{type(self.model).__name__} can't be used as a draft model: {reason}. "
                "Pass another draft, or speculative='prompt_lookup'."
            )
        self.context = context
        longest, new = max(map(len, context.rows.texts)), context.rows.max_new_tokens
        reserve, most = longest + min(new, 256), longest + new
        self.runner = RowModel(self.model, len(context.rows.live), reserve, context.compile, most)
        self.known = compat.text_config(self.model).vocab_size
        self.last: list[int] = [3] * len(context.rows.live)
        self.drafted_from: list[int] | None = None
        self.fed = 0
        self.counts: list[int] = []
        self.confidences: list[list[float]] = []
        self.pays = context.pays if self.runner.device.type == HOST else None
        known = _CALIBRATIONS.setdefault(context.target, weakref.WeakKeyDictionary())
        self.calibration = known.setdefault(self.model, Calibration())

    def outlook(self, rows: Rows) -> list[Outlook]:
        """Acceptance depends on how the last draft went; a row past the model's positions has no draft."""
        return [
            Outlook(self.name, last, 0.7 if self._room(len(rows.texts[row])) > 0 else 0.0)
            for row, last in zip(rows.live, self.last, strict=True)
        ]

    def propose(self, rows: Rows, length: int, wanted: Sequence[bool] | None = None) -> Draft:
        """Draft `length` tokens for every live row.

        Args:
            rows: The texts.
            length: Most tokens to draft.
            wanted: Which live rows' drafts will be used, if not all; the others' don't count for when to stop.
        """
        texts = self._texts(rows)
        self.drafted_from = [len(text) for text in texts]
        unread = max(len(text) - old for text, old in zip(texts, self.runner.cache.lengths, strict=True))
        steady = unread <= self.most_unread
        counts = [min(length, self._room(len(text))) for text in texts]
        self.confidences, self.counts, self.fed = [], counts, 0
        if not any(counts):
            return Draft.from_lists([[]] * len(texts))
        if chain := self._chain(texts, counts, length):
            drafted, most = chain
            self.fed = length - 1
            return Draft(drafted.to(self.context.device), counts, healthy=self._healthy(most), steady=steady)
        logits = self._catch_up(texts, counts)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        highest: list[Tensor] = []  # of each step's logits; NaN where one of them is
        survival = [1.0] * len(counts) if wanted is None else [float(each) for each in wanted]
        for position in range(length):
            token, q, most = self._choose(logits, rows, tokens)
            highest.append(most)
            if self.pays is not None:
                self.confidences.append(_confidence(logits if q is None else q, q is None))
                chances = self.calibration.chances(self.confidences[-1])
                survival = [
                    chance * before * (position < count)
                    for chance, before, count in zip(chances, survival, counts, strict=True)
                ]
                # the first token is always drafted: its step is paid for, and the controller learns from it
                if position and not self.pays(sum(survival), position, length, len(texts), False):
                    break
            tokens.append(token)
            if q is not None:
                probs.append(q)
            last = position == length - 1 or self._unsure(token, logits, counts, position)
            if last or self._ends(survival, position, length):
                break
            fed = [int(position < count) for count in counts]
            self.fed = position + 1
            output = self.runner.forward(self._own(token)[:, None].to(self.runner.device), fed)
            self.runner.cache.commit(fed)
            logits = self._fit(compat.all_token_logits(output)[:, 0])
        self.counts = counts = [min(count, len(tokens)) for count in counts]
        drafted, q_all = torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None
        return Draft(drafted, list(counts), q_all, healthy=self._healthy(torch.stack(highest)), steady=steady)

    def commit(self, rows: Rows, accepted: Sequence[int]) -> None:
        """Forget the rejected tokens. Mostly the last one was never fed, so a full acceptance feeds two next time."""
        if self.drafted_from is None:
            return
        self.runner.cache.roll_back(
            [start + min(kept, self.fed) for start, kept in zip(self.drafted_from, accepted, strict=True)]
        )
        for row, (count, kept) in enumerate(zip(self.counts, accepted, strict=True)):
            for position, confidences in enumerate(self.confidences[: min(kept + 1, count)]):
                self.calibration.update(confidences[row], position < kept)
            if count:
                self.last[row] = _outcome(kept, count)
        self.drafted_from = None

    def disregard(self, row: int) -> None:
        """Hear that a row's draft isn't used, so that nothing is learnt from it."""
        self.counts[row] = 0

    def select(self, keep: Sequence[int]) -> None:
        """Keep these rows."""
        self.runner.cache.select(keep)
        self.last = [self.last[row] for row in keep]

    def _texts(self, rows: Rows) -> list[list[int]]:
        """What the draft reads for each live row."""
        return [rows.texts[row] for row in rows.live]

    def _own(self, token: Tensor) -> Tensor:
        """Drafted tokens as the draft reads them."""
        return token

    def _room(self, length: int) -> int:
        """How many tokens can be drafted behind a text of `length` tokens."""
        limit = self.runner.max_positions
        return 1_000_000 if limit is None else max(0, limit - length)

    def _catch_up(self, texts: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Feed what the cache hasn't seen; logits behind each row's last token, `[rows, vocabulary]`."""
        before = list(self.runner.cache.lengths)
        # a row out of positions reads one token again, at its old place: there may be no other
        seen = [old if count else max(old - 1, 0) for old, count in zip(before, counts, strict=True)]
        self.runner.cache.roll_back(seen)
        pending = [
            tokens if count else tokens[:1] for tokens, count in zip(self._unseen(texts, seen), counts, strict=True)
        ]
        logits = self.runner.prefill(pending).logits
        self.runner.cache.roll_back(
            [len(text) if count else old for text, old, count in zip(texts, before, counts, strict=True)]
        )
        return self._fit(logits)

    def _chain(
        self, texts: Sequence[Sequence[int]], counts: Sequence[int], length: int
    ) -> tuple[Tensor, Tensor] | None:
        """Draft greedily in one go, where the runner can: tokens and their logits, `[rows, length]` both."""
        context, cache = self.context, self.runner.cache
        plain = not context.do_sample and not context.logits.processors and self.confidence_threshold is None
        if self.runner.fast is None or not plain or self.pays is not None or not all(counts):
            return None
        pending = self._unseen(texts, cache.lengths)
        if max(map(len, pending)) > 2:  # rounds without a draft; one token is left for the chain
            self.runner.prefill([tokens[:-1] for tokens in pending])
            pending = [tokens[-1:] for tokens in pending]
        chain = self.runner.fast.chain(self.runner, pending, length, min(context.vocabulary, self.known))
        if chain is not None:
            cache.commit([len(tokens) + length - 1 for tokens in pending])
        return chain

    def _unseen(self, texts: Sequence[Sequence[int]], seen: Sequence[int]) -> list[list[int]]:
        """What stands behind the first `seen` tokens; an id that only the target has is outside of the embedding."""
        return [
            [token if token < self.known else 0 for token in text[old:]] for text, old in zip(texts, seen, strict=True)
        ]

    def _fit(self, logits: Tensor) -> Tensor:
        """Cut or pad the draft's vocabulary to the target's: ids beyond either can't be drafted."""
        missing = self.context.vocabulary - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[..., : self.context.vocabulary]

    def _healthy(self, highest: Tensor) -> Tensor:
        """Whether all logits that a draft was made from were numbers, given the highest of each distribution."""
        return ~highest.isnan().any().to(self.context.device)

    def _choose(self, logits: Tensor, rows: Rows, drafted: list[Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
        """The next draft token of every row, the distribution it was sampled from, and the draft's highest logit."""
        context = self.context
        position = len(drafted)
        if not context.do_sample and not context.logits.processors:
            highest, token = logits.max(-1)  # NaN counts as highest
            return token.to(context.device), None, highest
        highest = logits.amax(-1)
        logits = logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")).to(context.device)
        if context.logits.needs_prefix and position:
            rows.lay_draft(torch.stack(drafted, 1))
        if context.logits.processors:
            whole = [position] * len(rows.live)
            logits = context.logits(logits[:, None], rows, whole, first=position, draft_only=True)[:, 0]
        if not context.do_sample:
            return logits.argmax(-1), None, highest
        logits = logits.to(torch.float32)
        if context.noise is not None:
            first = [rows.num_new(row) + position for row in rows.live]
            return (
                (logits + context.noise.gumbel(rows.live, first, 1, logits.shape[-1], logits.device)[:, 0]).argmax(-1),
                None,
                highest,
            )
        q = torch.softmax(logits, -1)
        empty = ~(q.sum(-1, keepdim=True) > 0.5)  # nothing was left to sample from
        certain = torch.zeros_like(q)
        certain[:, 0] = 1.0
        q = torch.where(empty, certain, q)
        return draw(q, context.generator), q, highest

    def _ends(self, survival: Sequence[float], position: int, length: int) -> bool:
        """Whether one more draft step doesn't pay, going by what usually follows."""
        expected = sum(survival) * self.calibration.overall.value
        return self.pays is not None and not self.pays(expected, position + 1, length, len(survival), True)

    def _unsure(self, token: Tensor, logits: Tensor, counts: list[int], position: int) -> bool:
        """Cut the rows whose token is less likely than the threshold behind it; whether every row is cut."""
        if self.confidence_threshold is None:
            return False
        confidence = torch.softmax(logits.float(), -1).gather(1, token[:, None].to(logits.device)).squeeze(1)
        for row, low in enumerate((confidence < self.confidence_threshold).tolist()):
            if low:
                counts[row] = min(counts[row], position + 1)
        return all(count <= position + 1 for count in counts)


def _confidence(scores: Tensor, is_logits: bool) -> list[float]:
    """The largest probability of each row's distribution."""
    probs = torch.softmax(scores.float(), -1) if is_logits else scores
    found: list[float] = probs.amax(-1).nan_to_num(0.0).tolist()
    return found


def _outcome(accepted: int, drafted: int) -> int:
    """Bucket of the last round: 0 nothing accepted, 1 some, 2 all of a short draft, 3 all of a long one."""
    if accepted < drafted:
        return int(accepted > 0)
    return 2 if drafted < 4 else 3
