"""Rules of verification that have been seen in the wild and are biased. A test of the distribution must catch them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_specdec.engine.verify import Verdict, accept_block, accept_tokens


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Verdict]


def resample_from_p(p: Tensor, q: Tensor, draft: Tensor, counts: Tensor, uniform: Tensor) -> Verdict:
    accepted = accept_tokens(p, q, draft, counts, uniform).accepted
    return Verdict(accepted, p[torch.arange(len(p)), accepted])


def without_residual(rule: Rule) -> Rule:
    """Keep the rejected token out and renormalise p, as if the draft had been a point mass."""

    def changed(p: Tensor, q: Tensor, draft: Tensor, counts: Tensor, uniform: Tensor) -> Verdict:
        accepted, rows = rule(p, q, draft, counts, uniform).accepted, torch.arange(len(p))
        weights = p[rows, accepted].clone()
        rejected = torch.nn.functional.pad(draft, (0, 1))[rows, accepted]
        weights[rows, rejected] = torch.where(accepted < counts, 0.0, weights[rows, rejected])
        return Verdict(accepted, weights + 1e-30)

    changed.__name__ = "no_residual"
    return changed


no_residual = without_residual(accept_tokens)


def first_failure(p: Tensor, q: Tensor, draft: Tensor, counts: Tensor, uniform: Tensor) -> Verdict:
    """Block verification that stops at the first u > h."""
    rows, k = torch.arange(len(p)), draft.shape[1]
    ratio = (p[:, :-1].gather(2, draft[..., None]) / q.gather(2, draft[..., None]).clamp(min=1e-30)).squeeze(2)
    P = torch.ones(len(p), k + 1, dtype=p.dtype)
    for i in range(k):
        P[:, i + 1] = (P[:, i] * ratio[:, i]).clamp(max=1.0)
    q = _behind(q, counts)
    residual = (P[..., None] * p - q).clamp(min=0)
    Z = residual.sum(-1)[:, 1:]
    h = torch.where(Z + 1 - P[:, 1:] > 0, Z / (Z + 1 - P[:, 1:]), 1.0)
    accepted = ((uniform < h) & (torch.arange(k) < counts[:, None])).long().cumprod(-1).sum(-1)
    weights = residual[rows, accepted]
    return Verdict(accepted, torch.where(weights.sum(-1, keepdim=True) > 1e-12, weights, p[rows, accepted]))


def accept_one_more(p: Tensor, q: Tensor, draft: Tensor, counts: Tensor, uniform: Tensor) -> Verdict:
    accepted = torch.minimum(accept_tokens(p, q, draft, counts, uniform).accepted + 1, counts)
    return Verdict(accepted, p[torch.arange(len(p)), accepted])


def skip_the_residuals_scale(p: Tensor, q: Tensor, draft: Tensor, counts: Tensor, uniform: Tensor) -> Verdict:
    """Block acceptance with the residual of token rejection."""
    accepted = accept_block(p, q, draft, counts, uniform).accepted
    rows = torch.arange(len(p))
    p_next = p[rows, accepted]
    residual = (p_next - _behind(q, counts)[rows, accepted]).clamp(min=0)
    return Verdict(accepted, torch.where(residual.sum(-1, keepdim=True) > 1e-12, residual, p_next))


def _behind(q: Tensor, counts: Tensor) -> Tensor:
    """q with zeros behind each row's draft."""
    real = torch.arange(q.shape[1] + 1) < counts[:, None]
    return torch.nn.functional.pad(q, (0, 0, 0, 1)).where(real[..., None], 0.0)


WRONG_RULES = (resample_from_p, no_residual, first_failure, accept_one_more, skip_the_residuals_scale)
