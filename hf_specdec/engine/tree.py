"""Token trees: several continuations verified in one forward, each token seeing its own ancestors alone.

A tree is laid out as a block: index 0 is the row's last token, the root; index j + 1 is draft token j, whose parent
stands in front of it. A chain is the tree in which every token's parent is its neighbour.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor


class Tree:
    """The shape of one round's block.

    Attributes:
        parents: Parent of every block index in the block, int64 `[rows, k + 1]`; the root is its own, and so are dummies
            behind a row's last token.
        depth: Tokens between the root and each block index, int64 `[rows, k + 1]`; 0 for dummies.
        ancestors: Which block indices each block index sees, itself included: bool `[rows, k + 1, k + 1]`.
        deepest: The largest depth.
    """

    def __init__(self, parents: Sequence[Sequence[int]], device: torch.device) -> None:
        """Lay out a tree for each row.

        Args:
            parents: For each row the parent of each draft token: an earlier draft token's index, or -1 for the root.
            device: Where the block will be.
        """
        width = max(map(len, parents), default=0) + 1
        above, depth, sees = [], [], []
        for row in parents:
            blocks = [parent + 1 for parent in row]
            depths, seen = [0], [[True] + [False] * (width - 1)]
            for index, parent in enumerate(blocks, start=1):
                depths.append(depths[parent] + 1)
                line = list(seen[parent])
                line[index] = True
                seen.append(line)
            rest = range(len(blocks) + 1, width)
            above.append([0, *blocks, *rest])
            depth.append(depths + [0] * len(rest))
            sees.append(seen + [[other == index for other in range(width)] for index in rest])
        self.parents = torch.tensor(above, device=device)
        self.depth = torch.tensor(depth, device=device)
        self.ancestors = torch.tensor(sees, device=device)
        self.deepest = max(map(max, depth), default=0)

    def to(self, device: torch.device) -> Tree:
        """The same tree on another device."""
        if device == self.depth.device:
            return self
        moved = copy.copy(self)
        moved.parents, moved.depth = self.parents.to(device), self.depth.to(device)
        moved.ancestors = self.ancestors.to(device)
        return moved


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each draft token: 1 behind the root."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def accept_path(chosen: Tensor, draft: Tensor, counts: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """Sample-match on a tree: walk from the root to the child that says what the target chose, as long as there is one.

    Exact for deterministic drafts at any temperature, like `verify.accept_matching`: every emitted token is the
    target's own choice at its position.

    Args:
        chosen: The target's choice at every block index, int64 `[rows, k + 1]`.
        draft: Draft tokens, int64 `[rows, k]`.
        counts: Draft tokens of each row, int64 `[rows]`.
        tree: The block's shape.

    Returns:
        How many draft tokens are kept `[rows]`; the target's choice behind them `[rows]`; their block indices
        `[rows, deepest]`, where those behind the kept ones mean nothing.
    """
    at = torch.zeros_like(chosen[:, :1])
    accepted = torch.zeros_like(chosen[:, 0])
    indices = torch.arange(1, chosen.shape[1], device=chosen.device)
    parents = torch.where(indices <= counts[:, None], tree.parents[:, 1:], -1)
    path = []
    for _ in range(tree.deepest):
        says = (parents == at) & (draft == chosen.gather(1, at))
        found = says.any(-1)
        step = torch.where(says, indices, chosen.shape[1]).amin(-1, keepdim=True)
        at = torch.where(found[:, None], step, at)
        accepted = accepted + found
        path.append(at)
        # a row that found nothing stays where it is, and finds nothing again
    return accepted, chosen.gather(1, at).squeeze(1), torch.cat(path, 1) if path else at[:, :0]
