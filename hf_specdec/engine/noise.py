"""Randomness: Gumbel noise that depends only on (seed, row, position, token), and draws from a generator.

Choosing argmax(log p + noise) samples from p exactly (the Gumbel-max trick). As the noise doesn't depend on how the
position was reached, the sampled text is the same with any draft of any length, in any batch, and without a draft.
The noise is a hash, not a generator, so it is the same on every device and costs no synchronisation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


_MASK = 0xFFFFFFFF


def row_keys(texts: Sequence[Sequence[int]]) -> list[int]:
    """A number for each row that depends on its prompt alone; repeated prompts are counted to get different ones."""
    seen: dict[int, int] = {}
    keys = []
    for text in texts:
        digest = hashlib.blake2b(repr(list(text)).encode(), digest_size=8).digest()
        key = int.from_bytes(digest[:4], "little")
        seen[key] = seen.get(key, -1) + 1
        keys.append((key + 0x9E3779B9 * seen[key]) & _MASK)
    return keys


class Noise:
    """Gumbel noise for the rows of a batch.

    Attributes:
        keys: One number for each row of the batch.
    """

    def __init__(self, seed: int | Sequence[int], keys: Sequence[int]) -> None:
        """Make the noise of a batch.

        Args:
            seed: One for all rows, or one for each.
            keys: One number for each row.
        """
        self.seed = seed
        self.keys = list(keys)
        seeds = [seed] * len(self.keys) if isinstance(seed, int) else seed
        # mixed on its own, so that a seed and a key that differ alike don't cancel out
        mixed = {each: int(_mix(_mix(torch.tensor(each & _MASK)) ^ (each >> 32 & _MASK))) for each in set(seeds)}
        self._states = [key ^ mixed[each] for key, each in zip(self.keys, seeds, strict=True)]

    def gumbel(
        self, rows: Sequence[int], first: Sequence[int], width: int, vocabulary: int, device: torch.device
    ) -> Tensor:
        """Noise for `width` positions of some rows.

        Args:
            rows: Rows, by index in the batch.
            first: Position of each row's first token, counted from the start of its output.
            width: Positions a row.
            vocabulary: Tokens a position.
            device: Where to compute it.

        Returns:
            Standard Gumbel noise, float32 `[rows, width, vocabulary]`.
        """
        target = device
        if device.type == "mps":
            device = torch.device("cpu")  # it has no float64
        states = torch.tensor([self._states[row] for row in rows], device=device)
        positions = torch.tensor(list(first), device=device)[:, None] + torch.arange(width, device=device)
        state = _mix(_mix(states)[:, None] ^ _mix(positions))  # (rows, width)
        bits = _mix(_mix(state)[..., None] ^ _mix(torch.arange(vocabulary, device=device) + 0x85EBCA6B))
        uniform = (bits.double() + 0.5) / 2.0**32
        return uniform.log_().neg_().log_().neg_().float().to(target)


def _mix(bits: Tensor) -> Tensor:
    """A 32-bit integer hash with good avalanche (the "lowbias32" constants of C. Wellons), on int64 tensors."""
    bits = bits & _MASK
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _MASK
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _MASK
    return bits ^ (bits >> 16)


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One sample a row from unnormalised weights.

    An exponential race: the first of independent arrivals with these rates. `torch.multinomial` draws the same
    distribution but checks its arguments on the host, which waits for the device.

    Args:
        weights: Non-negative, `[rows, vocabulary]`.
        generator: Source of randomness, on the same device.

    Returns:
        Tokens, int64 `[rows]`.
    """
    arrivals = torch.empty_like(weights).exponential_(generator=generator)
    return (weights / arrivals.clamp_(min=torch.finfo(weights.dtype).tiny)).argmax(-1)
