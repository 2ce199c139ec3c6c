"""How many tokens to draft: as many as pay, none if none do.

A round that drafts k tokens emits 1 + Σ_j Π_{i≤j} a_i tokens in expectation and takes R(k) seconds. a_j is the chance that
position j is accepted given that all before it were: one discounted table for each source of drafts and bucket, where
positions behind the first rejection are censored, never counted as rejections.

What a round may cost is set by the whole generation, not by the round alone: with ρ tokens a second emitted in the
long run, time is worth ρ tokens a second, and the best k has the largest Σ_j Π a_i − ρ·(R(k) − R(0)) (the renewal-reward
argument; for equal rounds it is the same as most tokens a second). A round with a weak draft is then kept short, one
with a strong draft goes further than its own average.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .acceptance import DISCOUNT, Acceptance
from .costs import CostTable


GAINS_WEIGHT = 4.0  # expected tokens that a drafter's own gains are trusted for
RATE_DISCOUNT = 0.98
START_MARGIN = 0.02  # tokens a row that drafting must bring to start again
FIRST_PROBE, LAST_PROBE = 16, 256  # rounds between probes while off; doubles
PROBE_LENGTH = 2
WINDOW, FEWEST_DRAFTED = 64, 16  # rounds, and the drafted ones among them that judge a generation's gain
LEAST_GAIN = 0.98


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a drafter expects of a row's next draft, so that the draft length can be chosen before drafting.

    Attributes:
        source: Where the draft would come from.
        bucket: A class of drafts that are accepted alike, such as the length of a lookup's match.
        acceptance: Expected acceptance of the first token until it has been measured; 0 if there is no draft.
        free: Whether drafting takes (nearly) no time.
        gains: Chance of each draft token to be accepted, in the order in which they would be drafted, where the drafter
            knows better than the counts of whole chains (trees). Its sum is the expected number of accepted tokens.
        guess: The tokens that would be drafted, a chain, where they are known already. Then acceptance is
            learnt from what the text says next even if nothing is drafted.
    """

    source: str
    bucket: int = 0
    acceptance: float = 0.7
    free: bool = False
    gains: Sequence[float] | None = None
    guess: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Round:
    """What happened in a round, one entry a live row.

    Attributes:
        outlook: What was expected.
        drafted: Draft tokens verified.
        tried: Positions that had a draft token with all predecessors accepted.
        accepted: Draft tokens accepted.
        width: Tokens a row in the target's forward.
        verify_seconds: Time of forward, verification and copy.
        draft_seconds: Time of drafting.
    """

    outlook: Sequence[Outlook]
    drafted: Sequence[int]
    tried: Sequence[int]
    accepted: Sequence[int]
    width: int
    verify_seconds: float
    draft_seconds: float


class FixedLength:
    """Always draft the same number of tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def choose(self, outlook: Sequence[Outlook], most: int) -> int:
        """The number of tokens to draft this round."""
        return min(self.length, most)

    def observe(self, seen: Round) -> None:
        """Nothing to learn."""


class AdaptiveLength:
    """Draft as much as pays; shared by the generations of one model and drafter, safe under threads.

    Args:
        draft_cost: First guess of a draft step's cost, in units of the target's.
    """

    def __init__(self, draft_cost: float) -> None:
        self.draft_cost = draft_cost
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        with self._lock:
            self.acceptance: dict[tuple[str, int | None], Acceptance] = {}
            self.verify = CostTable()
            self.draft: dict[int, float] = {}  # a draft step in units of a plain round, by batch size
            # accepted and expected tokens, of sources that tell their gains
            self.trust: dict[str, tuple[float, float]] = {}
            self.off: dict[tuple[str, int], int] = defaultdict(int)  # rounds since the source was last drafted from
            self.probe_after: dict[tuple[str, int], int] = defaultdict(lambda: FIRST_PROBE)
            # tokens a row, and the plain rounds that would have taken as long
            self.emitted, self.plain_rounds = 0.0, 0.0

    @property
    def rate(self) -> float:
        """Tokens a row emitted in the time of a plain round, in the long run; at least the 1 of plain decoding."""
        return max(self.emitted / self.plain_rounds, 1.0) if self.plain_rounds else 1.0

    def plain_seconds(self, rows: int) -> float:
        """Seconds of a round without drafts."""
        with self._lock:
            return self.verify.estimate(rows)

    def choose(self, outlook: Sequence[Outlook], most: int) -> int:
        """Choose this round's draft length.

        Args:
            outlook: What to expect of each row's draft; a row without any draft is left out of the sum.
            most: Most tokens that are of use.

        Returns:
            Tokens to draft, from 0 to `most`.
        """
        with self._lock:
            rows, drafting = len(outlook), [each for each in outlook if each.acceptance > 0]
            if not self.verify or not drafting:
                return 0  # what plain decoding costs must be known first
            expected = [0.0] * most
            # rows of one bucket have the same chances: worked out once
            alike = Counter((each.source, each.bucket) for each in drafting if each.gains is None)
            for each in drafting:
                weight = 1 if each.gains is not None else alike.pop((each.source, each.bucket), 0)
                for position, chance in enumerate(self._chances(each, most)) if weight else ():
                    expected[position] += weight * chance
            step, plain = self._step(rows, all(each.free for each in outlook)), self.verify.estimate(rows)
            worth = self.rate * rows / plain
            running = any(self.off[each.source, each.bucket] == 0 for each in drafting)
            best, best_value, gain = 0, 0.0 if running else START_MARGIN * rows, 0.0
            for length in range(1, most + 1):
                gain += expected[length - 1]
                extra = self.verify.estimate(rows * (length + 1)) - plain + step * length
                if gain - worth * extra > best_value:
                    best, best_value = length, gain - worth * extra
            return self._probe(drafting, best, most)

    def pays(self, expected: float, drafted: int, most: int, rows: int, step: bool) -> bool:
        """Whether one more draft token pays, seen from inside of a round.

        Args:
            expected: How many of the rows' next draft tokens will be accepted, in expectation.
            drafted: Tokens drafted for each row so far.
            most: Tokens that may be drafted: a step of the cost curve counts by its share of the tokens on it.
            rows: Live rows.
            step: Whether a draft step has still to be run for it; else it only widens the target's forward.
        """
        with self._lock:
            now = self.verify.estimate(rows * (drafted + 1))
            slopes = [
                (self.verify.estimate(rows * (length + 1)) - now) / (length - drafted)
                for length in range(drafted + 1, max(most, drafted + 1) + 1)
            ]
            cost = max(min(slopes), 0.0) + (self._step(rows, free=False) if step else 0.0)
            return expected >= self.rate * rows / self.verify.estimate(rows) * cost

    def observe(self, seen: Round) -> None:
        """Learn from a round."""
        with self._lock:
            rows = len(seen.outlook)
            for each, drafted, tried, kept in zip(seen.outlook, seen.drafted, seen.tried, seen.accepted, strict=True):
                if not drafted:
                    continue
                if each.gains is None:
                    self._table(each).update(tried, kept)
                else:
                    accepted, expected = self.trust.get(each.source, (0.0, 0.0))
                    expected = DISCOUNT * expected + sum(each.gains[:drafted])
                    self.trust[each.source] = (DISCOUNT * accepted + kept, expected)
            self.verify.update(rows * seen.width, seen.verify_seconds)
            plain = self.verify.estimate(rows)
            by_model = not all(each.free for each in seen.outlook)
            if by_model and seen.width > 1 and seen.draft_seconds > 0:
                old, step = self.draft.get(rows), seen.draft_seconds / (seen.width - 1) / plain
                self.draft[rows] = step if old is None else min(0.8 * old + 0.2 * step, 2 * old)
            emitted = 1 + sum(seen.accepted) / rows
            self.emitted = RATE_DISCOUNT * self.emitted + emitted
            took = (seen.verify_seconds + seen.draft_seconds) / plain
            self.plain_rounds = RATE_DISCOUNT * self.plain_rounds + took

    def state(self) -> dict[str, Any]:
        """A copy of everything learnt, for `load`."""
        with self._lock:
            return copy.deepcopy({name: value for name, value in vars(self).items() if name != "_lock"})

    def load(self, state: dict[str, Any]) -> None:
        """Go back to what `state` gave."""
        with self._lock:
            vars(self).update(copy.deepcopy(state))

    def learn(self, outlook: Outlook, drafted: int, accepted: int) -> None:
        """Learn from a draft that was never verified: `accepted` of its tokens are what the text went on to say."""
        with self._lock:
            self._table(outlook).update(drafted, accepted)

    def _chances(self, outlook: Outlook, most: int) -> list[float]:
        """Chance of each draft token to be accepted."""
        if outlook.gains is None:
            return self._table(outlook).survival(most)
        accepted, expected = self.trust.get(outlook.source, (0.0, 0.0))
        scale = (accepted + GAINS_WEIGHT) / (expected + GAINS_WEIGHT)
        return [min(scale * gain, 1.0) for gain in outlook.gains[:most]]

    def _step(self, rows: int, free: bool) -> float:
        """Seconds of a draft step."""
        if free:
            return 0.0
        known = min(self.draft, key=lambda size: abs(size - rows), default=None)
        return (self.draft_cost if known is None else self.draft[known]) * self.verify.estimate(rows)

    def _table(self, outlook: Outlook) -> Acceptance:
        """The counts of a source's bucket.

        Buckets of a free source are drafts of different kinds (long and short matches), each with its own prior; those of a
        model are moods of one kind, and start from what is known of all.
        """
        key = (outlook.source, outlook.bucket)
        if key not in self.acceptance:
            pool = None
            if not outlook.free:
                pool = self.acceptance.setdefault((outlook.source, None), Acceptance(outlook.acceptance))
            self.acceptance[key] = Acceptance(outlook.acceptance, pool)
        return self.acceptance[key]

    def _probe(self, drafting: Sequence[Outlook], best: int, most: int) -> int:
        """While off, draft a little now and then: the text may have become easier."""
        chosen = best
        for source in {(each.source, each.bucket) for each in drafting if not each.guess}:
            if best:
                self.off[source], self.probe_after[source] = 0, FIRST_PROBE
                continue
            self.off[source] += 1
            if self.off[source] >= self.probe_after[source]:
                self.off[source] = 1
                self.probe_after[source] = min(2 * self.probe_after[source], LAST_PROBE)
                chosen = min(PROBE_LENGTH, most)
        return chosen


class GainWatch:
    """Whether one generation's drafting is measured to lose, whatever the estimates say."""

    def __init__(self) -> None:
        self.rounds: deque[tuple[float, float, bool]] = deque(maxlen=WINDOW)

    def add(self, emitted: float, plain_rounds: float, drafted: bool) -> str | None:
        """Count a round.

        Args:
            emitted: Tokens a row.
            plain_rounds: Time of the round in units of a plain one.
            drafted: Whether anything was drafted.

        Returns:
            Why drafting should end for this generation, or `None`.
        """
        self.rounds.append((emitted, plain_rounds, drafted))
        judged = [(tokens, took) for tokens, took, drafts in self.rounds if drafts]
        if len(self.rounds) < WINDOW or len(judged) < FEWEST_DRAFTED:
            return None
        gain = sum(tokens for tokens, _ in judged) / sum(took for _, took in judged)
        if gain >= LEAST_GAIN:
            return None
        return f"speculative disabled: measured gain {gain:.2f}x in {len(judged)} drafted rounds"


# by target, then by draft model (the target itself stands for none), then by drafter
_Known = weakref.WeakKeyDictionary[Any, dict[str, AdaptiveLength]]
_CONTROLLERS: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
_CONTROLLERS_LOCK = threading.Lock()


def controller(model: Any, drafter: str, draft: Any = None) -> AdaptiveLength:
    """The controller of one target and drafter: what one generation learnt serves the next.

    Args:
        model: The target.
        drafter: Name of the drafter.
        draft: Its model, if it has one; sizes give the first guess of a draft step's cost.
    """
    with _CONTROLLERS_LOCK:
        by_draft = _CONTROLLERS.setdefault(model, weakref.WeakKeyDictionary())
        known = by_draft.setdefault(model if draft is None else draft, {})
        if drafter not in known:
            known[drafter] = AdaptiveLength(0.0 if draft is None else _size(draft) / _size(model))
        return known[drafter]


def _size(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def reset(model: Any = None) -> None:
    """Forget what was learnt about a target, or about all."""
    with _CONTROLLERS_LOCK:
        if model is None:
            _CONTROLLERS.clear()
        else:
            _CONTROLLERS.pop(model, None)


def snapshot(model: Any) -> list[tuple[AdaptiveLength, dict[str, Any]]]:
    """A copy of what was learnt about a target, for `restore`: a measurement must not learn from its own repetitions."""
    return [(each, each.state()) for each in _controllers(model)]


def restore(model: Any, saved: list[tuple[AdaptiveLength, dict[str, Any]]]) -> None:
    """Go back to what was known about a target at `snapshot`."""
    states = {id(each): state for each, state in saved}
    for each in _controllers(model):
        if id(each) in states:
            each.load(states[id(each)])
        else:
            each.reset()


def _controllers(model: Any) -> list[AdaptiveLength]:
    with _CONTROLLERS_LOCK:
        return [each for known in _CONTROLLERS.get(model, {}).values() for each in known.values()]
