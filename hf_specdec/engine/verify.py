"""Verification: which draft tokens to keep, and the token that follows them. Pure functions of tensors.

Symbols of the papers: p is the target's distribution after all processors, q the one that a draft token was really
sampled from, x the draft tokens, k their number. Row `b` has `counts[b] ≤ k` of them.

Every rule here keeps the target's distribution exactly. On a rejection the next token comes from the *residual*
max(0, p − q), not from p: resampling from p is biased.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """What a round decided.

    Attributes:
        accepted: Draft tokens kept, int64 `[rows]`.
        weights: Unnormalised distribution of the token behind them, `[rows, vocabulary]`.
    """

    accepted: Tensor
    weights: Tensor


def accept_matching(chosen: Tensor, draft: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Sample-match: keep the draft while it says what the target chose; exact for any deterministic draft.

    Args:
        chosen: The target's own choice at every position (argmax, or a sample from p), int64 `[rows, k + 1]`.
        draft: Draft tokens, int64 `[rows, k]`.
        counts: Draft tokens of each row, int64 `[rows]`.

    Returns:
        Draft tokens kept `[rows]`, and the target's choice behind them `[rows]`.
    """
    same = (chosen[:, :-1] == draft) & _drafted(draft, counts)
    accepted = same.long().cumprod(-1).sum(-1)
    return accepted, chosen.gather(1, accepted[:, None]).squeeze(1)


def accept_tokens(p: Tensor, q: Tensor, draft: Tensor, counts: Tensor, uniform: Tensor) -> Verdict:
    """Token-level rejection (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    Keep x_i while u_i · q_i(x_i) < p_i(x_i); behind the first rejection the token follows max(0, p − q); behind a
    draft that was kept whole it follows p (the bonus token).

    Args:
        p: Target probabilities `[rows, k + 1, vocabulary]`.
        q: Draft probabilities `[rows, k, vocabulary]`.
        draft: Draft tokens, int64 `[rows, k]`, x_i ~ q_i.
        counts: Draft tokens of each row, int64 `[rows]`.
        uniform: u_i, uniform in [0, 1), `[rows, k]`.
    """
    p_x = p[:, :-1].gather(2, draft[..., None]).squeeze(2)
    q_x = q.gather(2, draft[..., None]).squeeze(2)
    kept = (uniform * q_x < p_x) & _drafted(draft, counts)
    accepted = kept.long().cumprod(-1).sum(-1)
    return Verdict(accepted, _residual(p, q, accepted, counts, torch.ones_like(p_x[:, :1])))


def accept_block(p: Tensor, q: Tensor, draft: Tensor, counts: Tensor, uniform: Tensor) -> Verdict:
    """Block verification (Sun et al., ICLR 2025, arXiv 2403.10444): never accepts fewer tokens than token rejection.

    With P_0 = 1, P_i = min(1, P_{i−1} · p_i(x_i) / q_i(x_i)) and Z_i = Σ_y max(0, P_i · p_{i+1}(y) − q_{i+1}(y)),
    keep the draft up to the *last* i with u_i < h_i = Z_i / (Z_i + 1 − P_i). Stopping at the first failure is biased.
    With q = 0 behind a row's draft the formula gives h_k = P_k, as it should.

    Args:
        p: Target probabilities `[rows, k + 1, vocabulary]`.
        q: Draft probabilities `[rows, k, vocabulary]`.
        draft: Draft tokens, int64 `[rows, k]`, x_i ~ q_i.
        counts: Draft tokens of each row, int64 `[rows]`.
        uniform: u_i, uniform in [0, 1), `[rows, k]`.
    """
    drafted = _drafted(draft, counts)
    p_x = p[:, :-1].gather(2, draft[..., None]).squeeze(2)
    q_x = q.gather(2, draft[..., None]).squeeze(2)
    ratio = torch.where(drafted & (q_x > 0), p_x / q_x, 0.0)
    products = [torch.ones_like(ratio[:, 0])]
    for i in range(draft.shape[1]):
        products.append((products[-1] * ratio[:, i]).clamp(max=1.0))
    P = torch.stack(products, dim=1)  # (rows, k + 1)
    Z = (P[:, 1:, None] * p[:, 1:] - _behind(q, counts)[:, 1:]).clamp(min=0).sum(-1)  # (rows, k)
    gap = Z + 1 - P[:, 1:]
    h = torch.where(gap > 0, Z / gap, 1.0)
    kept = (uniform < h) & drafted
    positions = torch.arange(1, draft.shape[1] + 1, device=draft.device)
    accepted = torch.where(kept, positions, 0).amax(-1)
    return Verdict(accepted, _residual(p, q, accepted, counts, P.gather(1, accepted[:, None])))


def _drafted(draft: Tensor, counts: Tensor) -> Tensor:
    """Which entries of `draft` are real, bool `[rows, k]`."""
    return torch.arange(draft.shape[1], device=draft.device) < counts[:, None]


def _behind(q: Tensor, counts: Tensor) -> Tensor:
    """q with zeros behind each row's draft, `[rows, k + 1, vocabulary]`."""
    extended = torch.nn.functional.pad(q, (0, 0, 0, 1))
    real = torch.arange(extended.shape[1], device=q.device) < counts[:, None]
    return torch.where(real[..., None], extended, 0.0)


def _residual(p: Tensor, q: Tensor, accepted: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
    """max(0, scale · p − q) at the position behind the accepted tokens, or p where that is nothing but rounding."""
    at = accepted[:, None, None].expand(-1, 1, p.shape[2])
    p_next = p.gather(1, at).squeeze(1)
    q_next = _behind(q, counts).gather(1, at).squeeze(1)
    residual = (scale * p_next - q_next).clamp(min=0)
    return torch.where(residual.sum(-1, keepdim=True) > 1e-12, residual, p_next)
