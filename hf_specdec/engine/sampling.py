"""From scores to tokens: greedy, sampled, coupled; with or without a draft to verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SpecDecError
from . import verify
from .noise import Noise, draw, row_keys
from .ranks import Ranks
from .rows import Rows
from .tree import Tree, accept_path


class HostDecision(NamedTuple):
    """A round's decision on the host, one entry a live row.

    Attributes:
        accepted: Draft tokens kept.
        following: The token behind them.
        drafted: Draft tokens that were verified.
        guesses: The draft tokens.
        overlaps: The three sums of `Decision.overlaps`, zeros without a sampled draft.
        healthy: Whether the drafter called its draft sound.
        paths: Block indices of the draft tokens kept; 1, 2 … for a chain.
        successors: The target's most likely tokens at every block index, if they were asked for.
    """

    accepted: list[int]
    following: list[int]
    drafted: list[int]
    guesses: list[list[int]]
    overlaps: tuple[float, float, float]
    healthy: bool
    paths: list[list[int]]
    successors: list[list[list[int]]]


class Decision(NamedTuple):
    """What was decided for every live row, still on the device.

    Attributes:
        accepted: Draft tokens kept, int64 `[rows]`.
        following: The token behind them, int64 `[rows]`.
        overlaps: For sampled drafts Σmin(p, q), p(argmax q) and Σp·q, summed over the positions up to the first
            rejection, float32 `[3]`; else `None`.
        path: Block indices of the tokens kept on a tree, int64 `[rows, depth]`; `None` for a chain.
    """

    accepted: Tensor
    following: Tensor
    overlaps: Tensor | None = None
    path: Tensor | None = None

    def shared(self, ranks: Ranks, counts: Tensor) -> tuple[Decision, Tensor]:
        """What the leading rank has decided, and how many draft tokens of each row it has verified.

        Args:
            ranks: The processes that decide together.
            counts: Draft tokens of each row, int64 `[rows]`.
        """
        paths = [] if self.path is None else [self.path]
        accepted, following, counts, *paths = ranks.share(self.accepted, self.following, counts, *paths)
        return self._replace(accepted=accepted, following=following, path=paths[0] if paths else None), counts

    def to_host(
        self, counts: Tensor, tokens: Tensor, healthy: Tensor | None, successors: Tensor | None = None
    ) -> HostDecision:
        """The round's one copy from the device: everything the host needs to know.

        Args:
            counts: Draft tokens of each row, int64 `[rows]`.
            tokens: Draft tokens, int64 `[rows, k]`.
            healthy: `Draft.healthy`.
            successors: The target's most likely tokens, int64 `[rows, k + 1, n]`.
        """
        parts = [torch.stack([self.accepted, self.following, counts], 1), tokens]
        parts += [each.flatten(1) for each in (self.path, successors) if each is not None]
        table = torch.cat(parts, 1)
        # float32 holds ids below 2²⁴ exactly, and not every device has float64
        sums = self.overlaps if self.overlaps is not None else table.new_zeros(3, dtype=torch.float32)
        sound = healthy if healthy is not None else table.new_ones(())
        numbers = torch.cat([table.flatten().to(sums), sums, sound.reshape(1).to(sums)]).tolist()
        *numbers, min_pq, p_argmax_q, pq, was_healthy = numbers
        width = table.shape[1]
        lines = [[int(value) for value in numbers[at : at + width]] for at in range(0, len(numbers), width)]
        behind = 3 + tokens.shape[1]
        steps = 0 if self.path is None else self.path.shape[1]
        straight = list(range(1, tokens.shape[1] + 1))
        each = 1 if successors is None else successors.shape[2]
        return HostDecision(
            [line[0] for line in lines],
            [line[1] for line in lines],
            [line[2] for line in lines],
            [line[3:behind] for line in lines],
            (min_pq, p_argmax_q, pq),
            bool(was_healthy),
            [(straight if self.path is None else line[behind : behind + steps])[: line[0]] for line in lines],
            [[line[at : at + each] for at in range(behind + steps, len(line), each)] for line in lines],
        )


class Sampler:
    """Chooses tokens for one generation.

    Without a sampled draft every position is decided by argmax(score + noise), where the noise is zero for greedy
    decoding and depends on (seed, row, position) alone for sampling: the text is the same with any draft.

    Attributes:
        noise: The noise, or `None` for greedy decoding.
        generator: Randomness for sampled drafts and their verification.
    """

    def __init__(
        self, do_sample: bool, verification: str, seed: int | Sequence[int] | None, rows: Rows, device: torch.device
    ) -> None:
        """Take the noise of every row from the seed.

        Args:
            do_sample: Whether to sample.
            verification: As in `SpecConfig`.
            seed: As in `SpecConfig`.
            rows: The texts.
            device: Where scores are.

        Raises:
            SpecDecError: If there are several seeds, but not one a row.
        """
        if do_sample and seed is None:
            seed = int(torch.randint(2**62, (1,)))
        self.verification = verification if seed is None or isinstance(seed, int) else "coupled"
        self.noise = Noise(seed, _keys(rows.texts, seed)) if do_sample and seed is not None else None
        self.generator = torch.Generator(device=device)
        if isinstance(seed, int):
            self.generator.manual_seed(seed % 2**63)

    @property
    def shared_noise(self) -> Noise | None:
        """Noise that a draft should use too, if it is to guess what this sampler will choose."""
        return self.noise if self.verification == "coupled" else None

    def decide(
        self, scores: Tensor, draft: Tensor, counts: Tensor, probs: Tensor | None, rows: Rows, tree: Tree | None = None
    ) -> Decision:
        """Verify a draft and choose the token behind it.

        Args:
            scores: Processed scores, float32 `[rows, k + 1, vocabulary]`.
            draft: Draft tokens, int64 `[rows, k]`.
            counts: Draft tokens of each row, int64 `[rows]`.
            probs: What they were sampled from, `[rows, k, vocabulary]`, or `None` for a deterministic draft.
            rows: The texts.
            tree: The shape of a deterministic draft that is more than a chain.
        """
        if tree is not None:
            accepted, following, path = accept_path(self._choose(scores, rows, tree), draft, counts, tree)
            return Decision(accepted, following, path=path)
        if self.noise is None or probs is None or self.verification == "coupled" or not draft.shape[1]:
            return Decision(*verify.accept_matching(self._choose(scores, rows), draft, counts))
        p = torch.softmax(scores, -1)
        uniform = torch.rand(draft.shape, generator=self.generator, device=scores.device)
        # one rule for every draft: which one to take must not hang on how long the draft became, as that may hang on
        # what was drawn
        accept = verify.accept_tokens if self.verification == "rejection" else verify.accept_block
        verdict = accept(p, probs, draft, counts, uniform)
        following = draw(verdict.weights, self.generator)
        return Decision(verdict.accepted, following, _overlaps(p[:, :-1], probs, counts, verdict.accepted))

    def _choose(self, scores: Tensor, rows: Rows, tree: Tree | None = None) -> Tensor:
        """The target's own choice at every position, int64 `[rows, k + 1]`; ties go to the lowest id."""
        if self.noise is not None:
            first: Sequence[int] = [rows.num_new(row) for row in rows.live]
            width = scores.shape[1] if tree is None else tree.deepest + 1
            noise = self.noise.gumbel(rows.live, first, width, scores.shape[2], scores.device)
            if tree is not None:  # tokens at one position share its noise, on whatever branch they stand
                noise = noise.gather(1, tree.depth[..., None].expand_as(scores))
            scores = scores + noise
        return scores.argmax(-1)


def _keys(texts: Sequence[Sequence[int]], seed: int | Sequence[int]) -> list[int]:
    """The rows' keys; a row with a seed of its own has the key that it has alone, also next to the same prompt."""
    if isinstance(seed, int):
        return row_keys(texts)
    if len(seed) != len(texts):
        raise SpecDecError(f"`seed` has {len(seed)} seeds, and the batch {len(texts)} rows. Pass one for each row.")
    return [row_keys([text])[0] for text in texts]


def _overlaps(p: Tensor, q: Tensor, counts: Tensor, accepted: Tensor) -> Tensor:
    """The three acceptance sums of `Decision.overlaps`."""
    positions = torch.arange(q.shape[1], device=q.device)
    seen = (positions < counts[:, None]) & (positions <= accepted[:, None])
    each = (
        torch.minimum(p, q).sum(-1),
        p.gather(2, q.argmax(-1, keepdim=True)).squeeze(2),
        (p * q).sum(-1),
    )
    return torch.stack([(values * seen).sum() for values in each])
