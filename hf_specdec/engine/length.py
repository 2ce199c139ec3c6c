"""How many tokens to draft: measured acceptance against measured cost, with "none" always among the choices.

The rule is the renewal-reward one: a round that drafts k tokens emits E(k) = 1 + Σ_j Π_{i≤j} a_i tokens in expectation
and costs R(k) seconds; draft the k with the most tokens a second. a_j is the chance that position j is accepted given
that all before it were, one discounted table per draft source and bucket; positions behind the first rejection are
censored, never counted as rejections.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


DISCOUNT = 0.98  # how fast old rounds are forgotten
PRIOR_WEIGHT = 6.0  # rounds that the prior counts for
PRIOR_CHAIN = 0.5  # least prior for a position whose predecessor is likely accepted
KEEP_MARGIN, START_MARGIN = 1.0, 1.02  # gain needed to go on drafting, to start again
FIRST_PROBE, LAST_PROBE = 16, 256  # rounds between probes while off; doubles
PROBE_LENGTH = 2
COST_DISCOUNT = 0.9
OPTIMISTIC_SLOPE = 0.03  # cost of one more token, in units of a one-token forward, until it is measured


class Acceptance:
    """Discounted counts of acceptance by position, for one source and bucket."""

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.tried: list[float] = []
        self.kept: list[float] = []

    def update(self, drafted: int, accepted: int) -> None:
        """Count a row's draft of `drafted` tokens, `accepted` of them kept."""
        for position in range(min(accepted + 1, drafted)):
            if position == len(self.tried):
                self.tried.append(0.0)
                self.kept.append(0.0)
            self.tried[position] = DISCOUNT * self.tried[position] + 1
            self.kept[position] = DISCOUNT * self.kept[position] + (position < accepted)

    def survival(self, length: int) -> list[float]:
        """Chance that the first 1, 2, … `length` draft tokens are all accepted."""
        chances, survival, estimate = [], 1.0, self.prior
        for position in range(length):
            tried = self.tried[position] if position < len(self.tried) else 0.0
            kept = self.kept[position] if position < len(self.kept) else 0.0
            prior = estimate if position == 0 else max(estimate, PRIOR_CHAIN)
            estimate = (kept + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)
            survival *= estimate
            chances.append(survival)
        return chances


class CostTable:
    """Seconds of a forward by how many tokens it reads: a measured table, linear in between.

    Beyond what was measured the estimate is optimistic, so that a width is tried and then known: cost curves have
    cliffs (a float32 CPU forward of 2 tokens takes as long as one of 8).
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}

    def update(self, tokens: int, seconds: float) -> None:
        """Count a measured forward of `tokens` tokens in all rows together."""
        old = self.seconds.get(tokens)
        # a first measurement of a shape pays for warm-up, so a later, faster one replaces it
        if old is None or seconds < 0.5 * old:
            self.seconds[tokens] = seconds
        else:
            self.seconds[tokens] = COST_DISCOUNT * old + (1 - COST_DISCOUNT) * min(seconds, 3 * old)

    def estimate(self, tokens: int) -> float:
        """Seconds of a forward of `tokens` tokens."""
        if tokens in self.seconds:
            return self.seconds[tokens]
        known = sorted(self.seconds)
        if not known:
            return 1.0 + OPTIMISTIC_SLOPE * (tokens - 1)
        below = [size for size in known if size < tokens]
        above = [size for size in known if size > tokens]
        if below and above:
            low, high = below[-1], above[0]
            share = (tokens - low) / (high - low)
            return self.seconds[low] + share * (self.seconds[high] - self.seconds[low])
        near = below[-1] if below else above[0]
        return self.seconds[near] * (1.0 + OPTIMISTIC_SLOPE * (tokens - 1)) / (1.0 + OPTIMISTIC_SLOPE * (near - 1))


class FixedLength:
    """Always draft the same number of tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def choose(
        self, sources: Sequence[tuple[str, int]], priors: Sequence[float], free: bool, most: int,
        gains: Sequence[Sequence[float] | None] = (),
    ) -> int:  # fmt: skip
        """The number of tokens to draft this round."""
        return min(self.length, most)

    def observe(
        self, sources: Sequence[tuple[str, int]], priors: Sequence[float], drafted: Sequence[int],
        accepted: Sequence[int], width: int, verify_seconds: float, draft_seconds: float,
    ) -> None:  # fmt: skip
        """Nothing to learn."""


class AdaptiveLength:
    """Draft as much as pays; shared by the generations of one model and drafter, safe under threads."""

    def __init__(self, draft_cost: float) -> None:
        self.draft_cost = draft_cost
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.acceptance: dict[tuple[str, int], Acceptance] = {}
        self.verify = CostTable()
        self.draft: dict[int, float] = {}  # seconds of one draft step, by batch size
        self.off: dict[tuple[str, int], int] = defaultdict(int)  # rounds since the source was last drafted from
        self.probe_after: dict[tuple[str, int], int] = defaultdict(lambda: FIRST_PROBE)

    def choose(
        self, sources: Sequence[tuple[str, int]], priors: Sequence[float], free: bool, most: int,
        gains: Sequence[Sequence[float] | None] = (),
    ) -> int:  # fmt: skip
        """Choose this round's draft length.

        Args:
            sources: Source and bucket of each row's draft; a row without any draft is left out of the sum.
            priors: Expected acceptance of the first token of each row, until it is measured.
            free: Whether drafting costs nothing, as in lookup.
            most: Most tokens that are of use.
            gains: For each row the chance of each draft token to be accepted, where the drafter gives one.

        Returns:
            Tokens to draft, from 0 to `most`.
        """
        with self._lock:
            rows = len(sources)
            expected = [0.0] * (most + 1)
            told = gains or [None] * rows
            for source, prior, own in zip(sources, priors, told, strict=True):
                if prior > 0:
                    chances = self._table(source, prior).survival(most) if own is None else own[:most]
                    for position, chance in enumerate(chances):
                        expected[position + 1] += chance
            if rows not in self.verify.seconds:
                return 0  # what plain decoding costs must be known first
            step = 0.0 if free else self.draft.get(rows, self.draft_cost * self.verify.estimate(rows))
            base = self.verify.estimate(rows)
            best, best_value, emitted = 0, rows / base, float(rows)
            running = any(self.off[source] == 0 for source in sources)
            margin = KEEP_MARGIN if running else START_MARGIN
            for length in range(1, most + 1):
                emitted += expected[length]
                value = emitted / (self.verify.estimate(rows * (length + 1)) + step * length)
                if value > best_value * (margin if best == 0 else 1.0):
                    best, best_value = length, value
            return self._probe(
                [source for source, prior in zip(sources, priors, strict=True) if prior > 0], best, most
            )

    def observe(
        self, sources: Sequence[tuple[str, int]], priors: Sequence[float], drafted: Sequence[int],
        accepted: Sequence[int], width: int, verify_seconds: float, draft_seconds: float,
    ) -> None:  # fmt: skip
        """Learn from a round.

        Args:
            sources: As in `choose`.
            priors: As in `choose`.
            drafted: Tokens drafted by each row.
            accepted: Tokens accepted by each row.
            width: Tokens a row in the target's forward.
            verify_seconds: Time of forward, verification and copy.
            draft_seconds: Time of drafting.
        """
        with self._lock:
            for source, prior, count, kept in zip(sources, priors, drafted, accepted, strict=True):
                if count:
                    self._table(source, prior).update(count, kept)
            self.verify.update(len(sources) * width, verify_seconds)
            if width > 1 and draft_seconds > 0:
                old = self.draft.get(len(sources))
                step = draft_seconds / (width - 1)
                self.draft[len(sources)] = step if old is None else min(0.8 * old + 0.2 * step, 2 * old)

    def state(self) -> dict[str, Any]:
        """A copy of everything learnt, for `load`."""
        with self._lock:
            return copy.deepcopy({name: value for name, value in vars(self).items() if name != "_lock"})

    def load(self, state: dict[str, Any]) -> None:
        """Go back to what `state` gave."""
        with self._lock:
            vars(self).update(copy.deepcopy(state))

    def _table(self, source: tuple[str, int], prior: float) -> Acceptance:
        if source not in self.acceptance:
            self.acceptance[source] = Acceptance(prior)
        return self.acceptance[source]

    def _probe(self, sources: Sequence[tuple[str, int]], best: int, most: int) -> int:
        """While off, draft a little now and then: the text may have become easier."""
        for source in set(sources):
            if best:
                self.off[source], self.probe_after[source] = 0, FIRST_PROBE
                continue
            self.off[source] += 1
            if self.off[source] >= self.probe_after[source]:
                self.off[source] = 1
                self.probe_after[source] = min(2 * self.probe_after[source], LAST_PROBE)
                best = min(PROBE_LENGTH, most)
        return best


_CONTROLLERS: weakref.WeakKeyDictionary[Any, dict[str, AdaptiveLength]] = weakref.WeakKeyDictionary()
_CONTROLLERS_LOCK = threading.Lock()


def controller(model: Any, drafter: str, draft: Any = None) -> AdaptiveLength:
    """The controller of one target and drafter: what one generation learnt serves the next.

    Args:
        model: The target.
        drafter: Name of the drafter.
        draft: Its model, if it has one; sizes give the first guess of a draft step's cost.
    """
    with _CONTROLLERS_LOCK:
        known = _CONTROLLERS.setdefault(model, {})
        key = drafter if draft is None else f"{drafter}:{id(draft)}"
        if key not in known:
            known[key] = AdaptiveLength(0.0 if draft is None else _size(draft) / _size(model))
        return known[key]


def _size(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def reset(model: Any) -> None:
    """Forget what was learnt about a target."""
    with _CONTROLLERS_LOCK:
        _CONTROLLERS.pop(model, None)


def snapshot(model: Any) -> dict[str, dict[str, Any]]:
    """A copy of what was learnt about a target, for `restore`: a measurement must not learn from its own repetitions."""
    with _CONTROLLERS_LOCK:
        return {key: each.state() for key, each in _CONTROLLERS.get(model, {}).items()}


def restore(model: Any, saved: dict[str, dict[str, Any]]) -> None:
    """Go back to what was known about a target at `snapshot`."""
    with _CONTROLLERS_LOCK:
        for key, each in _CONTROLLERS.get(model, {}).items():
            if key in saved:
                each.load(saved[key])
            else:
                each.reset()
