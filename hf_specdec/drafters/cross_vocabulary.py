"""Drafts from a model with other token ids than the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..engine import compat
from ..engine.logits import BlockLogits
from ..engine.rows import Rows
from ..engine.tokens import Codec, PerPair, behind, saved_tokenizer
from ..errors import IncompatibleDraftError, SpecDecError
from .base import Draft, DraftContext
from .draft_model import DraftModel


MODES = ("auto", "intersection", "text")
LEAST_OVERLAP = 0.8  # share of the target's tokens that the draft must have for the intersection to be used
TAIL = 10  # tokens in front of new text that are split again together with it


@dataclass(frozen=True)
class Bridge:
    """What two tokenizers have in common.

    Attributes:
        target: The target's.
        draft: The draft's.
        common: Target id → draft id for tokens that stand for the same bytes, one to one.
        markers: Target id → draft id for special tokens: of the same name, or with the same role.
    """

    target: Codec
    draft: Codec
    common: dict[int, int]
    markers: dict[int, int]

    @classmethod
    def between(cls, tokenizer: Any, draft_tokenizer: Any) -> Bridge:
        """Compare two tokenizers; neither is changed."""
        target, draft = Codec(tokenizer), Codec(draft_tokenizer)
        ours, theirs = target.vocabulary, draft.vocabulary
        places: dict[bytes, list[int]] = {}
        for index in theirs.by_preference():
            places.setdefault(theirs.pieces[index], []).append(index)
        common: dict[int, int] = {}
        for index in ours.by_preference():
            if same := places.get(ours.pieces[index]):
                common[index] = same.pop(0)
        markers = {
            index: theirs.tokens[token]
            for token, index in ours.tokens.items()
            if index in ours.special and theirs.tokens.get(token) in theirs.special
        }
        for role in ("bos_token", "eos_token"):
            if role in ours.roles and role in theirs.roles:
                markers.setdefault(ours.roles[role], theirs.roles[role])
        return cls(target, draft, common, markers)

    @property
    def overlap(self) -> float:
        """Share of the target's tokens that the draft has too."""
        return len(self.common) / max(len(self.target.vocabulary.pieces), 1)


bridge_between = PerPair(Bridge.between)


class CrossVocabulary(DraftModel):
    """Draft with a model that has another tokenizer, in one of two ways.

    Intersection: the draft's probability of every token that both have moves to the target's id, everything else gets
    none, and the rest is the draft distribution that verification is told: the output is exact (TLI of Timor et al., arXiv
    2502.05202). Text: the draft goes on with the text in its own tokens, greedily; what it wrote is split into the
    target's tokens, a deterministic draft (SLEM of the same paper).

    The draft reads the text in its own tokens. What it has read is kept: a round reads what is new and, where new text
    changes how the end of the old one is split, those last tokens.

    Args:
        model: A causal language model.
        tokenizer: The target's tokenizer; `None`: the one saved where the target was loaded from.
        draft_tokenizer: The draft's tokenizer; `None`: likewise.
        mode: `"intersection"`, `"text"`, or `"auto"`: the intersection where the draft has at least 80 % of the target's
            tokens.
        confidence_threshold: As in `DraftModel`.

    Raises:
        SpecDecError: If there is no such mode.
    """

    name: ClassVar[str] = "cross_vocabulary"
    most_unread: ClassVar[int] = TAIL

    def __init__(
        self, model: Any, tokenizer: Any = None, draft_tokenizer: Any = None, mode: str = "auto",
        confidence_threshold: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, confidence_threshold)
        if mode not in MODES:
            raise SpecDecError(f"`mode` must be one of {MODES}, got {mode!r}.")
        self.tokenizer, self.draft_tokenizer, self.mode = tokenizer, draft_tokenizer, mode

    def start(self, context: DraftContext) -> None:
        """Compare the tokenizers and make an empty cache.

        Raises:
            IncompatibleDraftError: If the model can't draft, or a tokenizer is neither given nor saved.
        """
        tokenizers = []
        for given, model, whose in (
            (self.tokenizer, context.target, "target"), (self.draft_tokenizer, self.model, "draft"),
        ):  # fmt: skip
            found = given if given is not None else saved_tokenizer(model)
            if found is None:
                raise IncompatibleDraftError(
                    f"The {whose}'s tokenizer isn't known. Pass CrossVocabulary(model, tokenizer, draft_tokenizer), or "
                    "generate(..., tokenizer=..., assistant_tokenizer=...)."
                )
            tokenizers.append(found)
        bridge = self.bridge = bridge_between(*tokenizers)
        overlaps = bridge.overlap >= LEAST_OVERLAP
        self.by_text = self.mode == "text" or (self.mode == "auto" and not overlaps)
        known = compat.text_config(self.model).vocab_size
        own = context
        if self.by_text:  # the draft is on its own: its ids, and no processor that knows the target's
            own = replace(context, vocabulary=known, do_sample=False, logits=BlockLogits([]), noise=None)
        super().start(own)
        self._find_ends(context.end_tokens)
        ours, theirs = context.vocabulary, self.known
        passed = bridge.markers if self.by_text else bridge.common | bridge.markers
        self.passed = {
            one: other for one, other in (passed | self._ends_passed).items() if one < ours and other < theirs
        }
        pairs = torch.tensor(list(self.passed.items()), dtype=torch.long).reshape(-1, 2).to(self.runner.device)
        self.ours, self.theirs = pairs.unbind(1)
        self.own = torch.zeros(ours, dtype=torch.long, device=self.runner.device).scatter(0, self.ours, self.theirs)
        self.written: dict[int, _Written] = {}
        self.offered: list[tuple[list[int], list[int]]] = []

    def propose(self, rows: Rows, length: int, wanted: Sequence[bool] | None = None) -> Draft:
        """Draft up to `length` tokens for every live row; see `DraftModel.propose`."""
        draft = super().propose(rows, length, wanted)
        if not self.by_text:
            return draft
        drafted = [line[:count] for line, count in zip(draft.tokens.tolist(), draft.counts, strict=True)]
        self.offered = []
        for row, ids in zip(rows.live, drafted, strict=True):
            self.offered.append((self._translated(rows.texts[row], ids)[:length], ids))
            self.written[row].seen = self.written[row].ids + ids
        offered = Draft.from_lists([ours for ours, _ in self.offered])
        return replace(offered, healthy=draft.healthy, steady=draft.steady)

    def commit(self, rows: Rows, accepted: Sequence[int]) -> None:
        """Forget what of the draft's own tokens isn't in the text."""
        if self.by_text and self.drafted_from is not None:
            accepted = [self._own_kept(*pair, kept) for pair, kept in zip(self.offered, accepted, strict=True)]
        super().commit(rows, accepted)

    def _find_ends(self, end_tokens: frozenset[int]) -> None:
        """Which tokens end a text for the draft, and which one they stand for."""
        saved = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        usual, own = (each.vocabulary.roles.get("eos_token") for each in (self.bridge.target, self.bridge.draft))
        listed = saved if isinstance(saved, (list, tuple)) else [saved]
        self.ends = {int(token) for token in [*listed, own] if token is not None}
        self.end = usual if usual in end_tokens else min(end_tokens, default=None)
        end = own if own is not None else min(self.ends, default=None)
        self._ends_passed = {} if end is None else dict.fromkeys(end_tokens, end)

    def _texts(self, rows: Rows) -> list[list[int]]:
        """The texts in the draft's tokens; the cache forgets what is split otherwise now."""
        for row in rows.live:
            if row not in self.written:
                self.written[row] = _Written(list(self.bridge.draft.vocabulary.prefix))
            self._write(self.written[row], rows.texts[row])
        written = [self.written[row] for row in rows.live]
        lengths = self.runner.cache.lengths
        if self.by_text:
            lengths = [each.still_seen(old) for each, old in zip(written, lengths, strict=True)]
        # there must be something to read, also where the draft has no token for what is new
        self.runner.cache.roll_back([min(old, len(each.ids) - 1) for each, old in zip(written, lengths, strict=True)])
        return [each.ids for each in written]

    def _write(self, written: _Written, text: Sequence[int]) -> None:
        """Put the target's new tokens behind a row's text: one by one where the draft has them, else as text."""
        bridge = self.bridge
        prefix, pieces = bridge.target.vocabulary.prefix, bridge.target.vocabulary.pieces
        if not written.taken and tuple(text[: len(prefix)]) == prefix:
            written.taken = len(prefix)  # the draft has a prefix of its own
        run = b""
        written.changed = len(written.ids)
        for token in text[written.taken :]:
            own = self.passed.get(token)
            if own is None:
                run += pieces.get(token, b"")  # a marker that the draft doesn't have is left out
                continue
            written.append(bridge.draft, run, TAIL * self.by_text)
            written.ids.append(own)
            run = b""
        written.append(bridge.draft, run, TAIL * self.by_text)
        written.taken = len(text)
        if not written.ids:
            roles = bridge.draft.vocabulary.roles
            written.ids.append(roles.get("bos_token", roles.get("eos_token", 0)))

    def _translated(self, text: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The draft's tokens as the target's that follow a text."""
        target, draft = self.bridge.target, self.bridge.draft
        ended, said = False, b""
        for token in drafted:
            ended = token in self.ends
            piece = draft.vocabulary.pieces.get(token)
            if ended or piece is None:
                break
            said += piece
        tail = target.text_of(target.tail(text, TAIL))
        # split together with what is in front of it, as the target would have; but its own tokens there stay as they are
        ids = behind(target, target.ids_of(tail + said), len(tail))
        if ids is None:
            ids = target.ids_of(said)
        return [*ids, self.end] if ended and self.end is not None else ids

    def _own_kept(self, ours: Sequence[int], drafted: Sequence[int], accepted: int) -> int:
        """How many of the draft's tokens are whole in the accepted ones of the target."""
        left, pieces, kept = len(self.bridge.target.text_of(ours[:accepted])), self.bridge.draft.vocabulary.pieces, 0
        for token in drafted:
            left -= len(pieces.get(token, b""))
            if left < 0 or (token in self.ends and accepted < len(ours)):
                break
            kept += 1
        return kept

    def _own(self, token: Tensor) -> Tensor:
        """Drafted tokens as the draft reads them."""
        return token if self.by_text else self.own[token.to(self.own.device)]

    def _fit(self, logits: Tensor) -> Tensor:
        """Move each common token's logit to the target's id; no other token can be drafted."""
        if self.by_text:
            return super()._fit(logits)
        fitted = logits.new_full((*logits.shape[:-1], self.own.shape[0]), float("-inf"))
        ours, theirs = self.ours.to(logits.device), self.theirs.to(logits.device)
        fitted[..., ours] = logits[..., theirs]
        return fitted

    def _chain(
        self, texts: Sequence[Sequence[int]], counts: Sequence[int], length: int
    ) -> tuple[Tensor, Tensor] | None:
        return super()._chain(texts, counts, length) if self.by_text else None


@dataclass
class _Written:
    """A row's text in the draft's tokens.

    Attributes:
        ids: The tokens.
        taken: How many of the target's tokens they stand for.
        seen: What the draft has read, or would have; its cache holds a prefix of it.
        changed: The first place where `ids` isn't what it was a round before.
    """

    ids: list[int]
    taken: int = 0
    seen: list[int] = field(default_factory=list)
    changed: int = 0

    def append(self, codec: Codec, text: bytes, tail: int) -> None:
        """Put a piece of text behind it; the last `tail` tokens are split again with it."""
        if not text:
            return
        again = codec.tail(self.ids, tail) if tail else []
        start = len(self.ids) - len(again)
        self.ids[start:] = codec.ids_of(codec.text_of(again) + text)
        self.changed = min(self.changed, start)

    def still_seen(self, length: int) -> int:
        """How many of the first `length` tokens that were read are still the text's."""
        length = min(length, len(self.ids), len(self.seen))
        same = min(self.changed, length)
        while same < length and self.ids[same] == self.seen[same]:
            same += 1
        self.seen = self.ids
        return same
