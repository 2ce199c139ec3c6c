"""Faults that have been seen in implementations of speculative decoding, planted in ours for the time of a block.

Each is put where it would really be: in the verification rule, in the cache, in the drafter, or where ids are read back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hf_specdec.drafters import DraftModel
from hf_specdec.engine import verify
from hf_specdec.engine.cache import RowCache
from hf_specdec.engine.sampling import Decision, HostDecision
from hf_specdec.engine.verify import Verdict

from ..wrong_rules import without_residual


@contextmanager
def resample_from_p() -> Iterator[None]:
    """The rule that many articles print: behind a rejection the token is drawn from p, not from the residual."""

    def plain_p(p: Tensor, q: Tensor, accepted: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
        return p[torch.arange(len(p)), accepted]

    with patch.object(verify, "_residual", plain_p):
        yield


@contextmanager
def missing_residual() -> Iterator[None]:
    """Behind a rejection p without the rejected token, as if the draft had been certain of it."""
    with (
        patch.object(verify, "accept_tokens", without_residual(verify.accept_tokens)),
        patch.object(verify, "accept_block", without_residual(verify.accept_block)),
    ):
        yield


@contextmanager
def draft_temperature() -> Iterator[None]:
    """The draft says the distribution of another temperature (1.6) than the one it sampled at."""
    choose = DraftModel._choose

    def lying(self: DraftModel, *arguments: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        token, q, highest = choose(self, *arguments)
        if q is not None:
            q = q ** (1 / 1.6)
            q = q / q.sum(-1, keepdim=True)
        return token, q, highest

    with patch.object(DraftModel, "_choose", lying):
        yield


@contextmanager
def typical_acceptance() -> Iterator[None]:
    """Medusa's rule: accept what the target finds typical, p(x) > min(0.09, 0.3 · exp(−H(p))), whatever q is."""

    def rule(p: Tensor, q: Tensor, draft: Tensor, counts: Tensor, uniform: Tensor) -> Verdict:
        entropy = torch.special.entr(p[:, :-1]).sum(-1)
        p_x = p[:, :-1].gather(2, draft[..., None]).squeeze(2)
        kept = (p_x > (0.3 * torch.exp(-entropy)).clamp(max=0.09)) & (torch.arange(draft.shape[1]) < counts[:, None])
        accepted = kept.long().cumprod(-1).sum(-1)
        return Verdict(accepted, p[torch.arange(len(p)), accepted])

    with patch.object(verify, "accept_tokens", rule), patch.object(verify, "accept_block", rule):
        yield


@contextmanager
def rollback_keeps_one(layers: int = 2) -> Iterator[None]:
    """The target's cache keeps the first rejected token, so that all later tokens see it and stand one further on.

    Args:
        layers: Layers of the target, which tell its cache from the draft's.
    """
    commit = RowCache.commit

    def off_by_one(self: RowCache, counts: Any) -> None:
        width = self.stop - max(self.lengths)
        of_a_round = len(self.layers) == layers and min(self.lengths) > 0
        commit(self, [count + int(of_a_round and count < width) for count in counts])

    with patch.object(RowCache, "commit", off_by_one):
        yield


@contextmanager
def rollback_drops_one(layers: int = 2) -> Iterator[None]:
    """The target's cache forgets one token too many behind a rejection.

    Args:
        layers: As above.
    """
    commit = RowCache.commit

    def off_by_one(self: RowCache, counts: Any) -> None:
        width = self.stop - max(self.lengths)
        of_a_round = len(self.layers) == layers and min(self.lengths) > 0
        commit(self, [count - int(of_a_round and count < width) for count in counts])

    with patch.object(RowCache, "commit", off_by_one):
        yield


@contextmanager
def mistranslated_ids(shift: int = 1) -> Iterator[None]:
    """Accepted draft tokens are written with another tokenizer's ids, here every id one further on.

    That the draft *reads* other ids is harmless: it only guesses worse. What corrupts a text is to take over its ids.
    """
    to_host = Decision.to_host

    def translated(self: Decision, *arguments: Any) -> HostDecision:
        known = to_host(self, *arguments)
        return known._replace(guesses=[[token + shift for token in row] for row in known.guesses])

    with patch.object(Decision, "to_host", translated):
        yield


SAMPLED = {
    "resample from p": resample_from_p,
    "missing residual": missing_residual,
    "draft temperature": draft_temperature,
    "typical acceptance": typical_acceptance,
}
BOTH = {
    "rollback keeps one": rollback_keeps_one,
    "rollback drops one": rollback_drops_one,
    "mistranslated ids": mistranslated_ids,
}
