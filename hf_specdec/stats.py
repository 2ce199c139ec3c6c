"""What a speculative generation did: `SpecStats` for a call, `StepEvent` for a round.

The names follow vLLM and AIPerf. All counts come from values that the loop has on the host anyway.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One round, as given to `SpecConfig.on_step`.

    Attributes:
        step: Number of the round, from 0 (the prefill).
        rows: Index in the batch of every row that took part.
        drafted: Draft tokens of each row, in the order of `rows`. A tree is given flat, its branches mixed; which of its
            tokens were accepted is then told by `emitted` alone.
        accepted: How many of them each row accepted.
        emitted: Tokens each row emitted: its accepted draft tokens, then a bonus or corrected token, cut at a stop.
        source: Which drafter proposed, for each row.
        seconds: Wall time of the round.
    """

    step: int
    rows: tuple[int, ...]
    drafted: tuple[tuple[int, ...], ...]
    accepted: tuple[int, ...]
    emitted: tuple[tuple[int, ...], ...]
    source: tuple[str, ...]
    seconds: float


@dataclass(slots=True)
class RowStats:
    """Counts of one row: rounds it took part in, tokens drafted, accepted, emitted."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_emitted_tokens: int = 0


@dataclass(slots=True)
class SpecStats:
    """Statistics of one `generate` call.

    A "step" is one target forward of one row, the prefill excluded; so a batch of 8 rows makes 8 steps a round.

    Attributes:
        drafter: Name of the drafter.
        num_spec_steps: Steps in all.
        num_draft_tokens: Draft tokens that were verified.
        num_accepted_draft_tokens: Draft tokens that were accepted and emitted (bonus tokens not counted).
        num_emitted_tokens: Tokens in the output, prompt and padding not counted.
        num_target_forwards: Forward passes of the target, the prefill included.
        lean_forward: Whether the target ran without the module calls around its operations
            (`HF_SPECDEC_LEAN=0` forbids it), which speeds up every forward, drafts or not.
        graph_replays: Forwards of target or draft model, or whole drafts, that were replayed from a CUDA graph
            (`HF_SPECDEC_GRAPHS=1` asks for it).
        compiled_forwards: Forwards that ran code compiled for `SpecConfig.compile`, those inside graphs not counted.
        capture_seconds: Wall time spent on capturing graphs and compiling; later calls profit from it.
        eager_reason: Why the target's forwards were not captured or compiled although they were meant to be, or
            `None`. The text is the same either way.
        acceptance_histogram: Steps that accepted 0, 1, 2 … draft tokens.
        drafted_at: Steps in which a draft token stood at position 1, 2, … and every earlier one was accepted.
        accepted_at: How many of those were accepted.
        steps_by_source: Steps whose draft came from each source (`"none"`: no draft).
        draft_seconds: Wall time spent proposing.
        verify_seconds: Wall time of target forwards, verification and the copy to the host, prefill excluded.
        prefill_seconds: Wall time up to the first token.
        calibration_seconds: Wall time of measuring what forwards of several widths cost, which the first generations of a
            model do; at most a twentieth of what the generation may take.
        total_seconds: Wall time of the loop.
        fallback_reason: Why (part of) the call was decoded plainly, or `None`.
        rows: The counts of each row of the batch.
        sum_min_pq: Sampled drafts: sum over verified positions of Σ min(p, q), the expected acceptance of rejection
            sampling. Position by position up to the first rejection, like `drafted_at`. The three sums let one run
            predict the acceptance of other engines' rules.
        sum_p_argmax_q: The same for p(argmax q), greedy drafts with exact match.
        sum_pq: The same for Σ p·q, independently sampled drafts with exact match.
    """

    drafter: str = "none"
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_emitted_tokens: int = 0
    num_target_forwards: int = 0
    lean_forward: bool = False
    graph_replays: int = 0
    compiled_forwards: int = 0
    capture_seconds: float = 0.0
    eager_reason: str | None = None
    acceptance_histogram: list[int] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    steps_by_source: dict[str, int] = field(default_factory=dict)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prefill_seconds: float = 0.0
    calibration_seconds: float = 0.0
    total_seconds: float = 0.0
    fallback_reason: str | None = None
    rows: list[RowStats] = field(default_factory=list)
    sum_min_pq: float = 0.0
    sum_p_argmax_q: float = 0.0
    sum_pq: float = 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step: 1 + accepted / steps, the bonus token included. 1.0 without any step."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted; 0.0 without any draft."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def per_position_acceptance(self) -> list[float]:
        """Chance that the draft token at position 1, 2, … is accepted, given that all before it were."""
        return [
            accepted / drafted if drafted else 0.0
            for drafted, accepted in zip(self.drafted_at, self.accepted_at, strict=True)
        ]

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows / wall time of the loop, prefill included."""
        return self.num_emitted_tokens / self.total_seconds if self.total_seconds else 0.0

    def record_row(
        self, row: int, source: str, drafted: int, accepted: int, emitted: int, tried: int | None = None
    ) -> None:
        """Count one step of one row.

        Args:
            row: The row's index in the batch.
            source: Where its draft came from.
            drafted: Draft tokens verified.
            accepted: Draft tokens accepted and emitted.
            emitted: Tokens emitted.
            tried: Positions that had a draft token with all predecessors accepted; `None` for a chain.
        """
        self.rows[row].num_spec_steps += 1
        self.rows[row].num_draft_tokens += drafted
        self.rows[row].num_accepted_draft_tokens += accepted
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        self.record_emitted(row, emitted)
        self.steps_by_source[source] = self.steps_by_source.get(source, 0) + 1
        _add_at(self.acceptance_histogram, accepted, 1)
        for position in range(min(accepted + 1, drafted if tried is None else tried)):
            _add_at(self.drafted_at, position, 1)
            _add_at(self.accepted_at, position, int(position < accepted))

    def add_overlaps(self, sums: tuple[float, float, float]) -> None:
        """Add a round's Σ min(p, q), p(argmax q) and Σ p·q."""
        self.sum_min_pq += sums[0]
        self.sum_p_argmax_q += sums[1]
        self.sum_pq += sums[2]

    def record_emitted(self, row: int, emitted: int) -> None:
        """Count tokens that a row put into the output."""
        self.rows[row].num_emitted_tokens += emitted
        self.num_emitted_tokens += emitted

    def to_dict(self) -> dict[str, Any]:
        """All counts and derived figures, as plain JSON types."""
        derived = (
            "mean_acceptance_length",
            "draft_acceptance_rate",
            "per_position_acceptance",
            "tokens_per_second",
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        first = (
            f"{self.drafter}: {self.num_emitted_tokens} tokens in {self.num_spec_steps} steps, "
            f"{self.mean_acceptance_length:.2f} tokens a step, {self.num_accepted_draft_tokens} of "
            f"{self.num_draft_tokens} draft tokens accepted ({self.draft_acceptance_rate:.0%})"
        )
        second = (
            f"{self.tokens_per_second:.1f} tokens/s; {self.total_seconds:.2f} s in all: prefill "
            f"{self.prefill_seconds:.2f}, draft {self.draft_seconds:.2f}, verify {self.verify_seconds:.2f}"
        )
        if self.fallback_reason:
            second += f"; decoded plainly: {self.fallback_reason}"
        return f"{first}\n{second}"


def _add_at(counts: list[int], index: int, amount: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += amount
