"""Several processes that decode together.

*A team* holds one model between its ranks (tensor parallel): every rank runs every forward of the target, over the same
rows. Clocks, random numbers and the last bits of sums differ between processes, so nothing is decided twice: rank 0 of the
team drafts, verifies and says when to stop, and the others are told.

*Ranks in lock-step* (`synced_gpus`; FSDP, DeepSpeed ZeRO-3) have rows of their own, but gather each other's weights in
every forward. So every forward of any of them needs one of all the others: each is announced, and a rank that has nothing
left to say runs dummies until no other one announces any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..errors import SpecDecError
from . import compat


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of one generation; one process alone costs nothing.

    Attributes:
        team: The process group that decides together, or `None`.
        lockstep: Whether every forward needs one of all processes.
        device: Where tensors are that are sent.
    """

    team: Any = None
    lockstep: bool = False
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, model: Any, lockstep: bool, device: torch.device) -> Ranks:
        """The ranks that a model is spread over.

        Args:
            model: The target.
            lockstep: `generate`'s `synced_gpus`.
            device: The prompts' device.
        """
        if not compat.several_processes():
            return ALONE
        return cls(compat.tensor_parallel_group(model), lockstep, device)

    @property
    def alone(self) -> bool:
        """Whether this process needs no other."""
        return self.team is None and not self.lockstep

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.team is None or dist.get_rank(self.team) == 0

    def share(self, *tensors: Tensor) -> list[Tensor]:
        """What the leader has in their place, in one broadcast.

        Args:
            *tensors: int64, of the same shapes on every rank of the team.
        """
        if self.team is None:
            return list(tensors)
        packed = torch.cat([each.flatten().to(self.device) for each in tensors])
        dist.broadcast(packed, src=dist.get_global_rank(self.team, 0), group=self.team)
        parts = torch.split(packed, [each.numel() for each in tensors])
        return [part.view(each.shape).to(each.device) for part, each in zip(parts, tensors, strict=True)]

    def same(self, value: int) -> int:
        """The leader's value."""
        return value if self.team is None else int(self.share(torch.tensor(int(value)))[0])

    def agreed(self, reason: str | None, failure: SpecDecError | None = None) -> str | None:
        """Why this call can't be sped up on every rank, or `None`: one rank that goes another way would leave the others.

        Args:
            reason: Why this rank can't.
            failure: What this rank has to raise.

        Raises:
            SpecDecError: The failure, or one that says that another rank has one.
        """
        if not self.alone:
            state = torch.tensor(2 if failure is not None else int(reason is not None), device=self.device)
            dist.all_reduce(state, dist.ReduceOp.MAX, None if self.lockstep else self.team)
            if failure is None and state == 2:
                failure = SpecDecError(
                    "Another rank can't make its draft, and says why. Mend it there; all ranks stop together."
                )
            if reason is None and state == 1:
                reason = "another rank can't speed up its call"
        if failure is not None:
            raise failure
        return reason

    def announce(self) -> None:
        """Tell the others that a forward comes; they run one too."""
        if self.lockstep:
            self._announced(1)

    def wait(self, dummy: Callable[[], Any]) -> None:
        """Run a dummy forward for every one that another rank announces, until all ranks wait."""
        while self.lockstep and self._announced(0).item():
            dummy()

    def _announced(self, forwards: int) -> Tensor:
        """How many ranks run a forward now, no dimensions; nobody has to look at it."""
        flag = torch.tensor(forwards, device=self.device)
        dist.all_reduce(flag)
        return flag


ALONE = Ranks()
