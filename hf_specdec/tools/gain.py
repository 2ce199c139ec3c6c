"""What speculation gains, from acceptance and costs: formulas alone, without torch.

All costs are in plain steps, a forward of the target that gives every row of the batch one token. A round that drafts k
tokens a row gives `1 + Σ_{j≤k} a_1 ⋯ a_j` tokens a row, where a_j is the chance that draft token j is accepted given that all
before it were, and takes

    R(k) = v(B·(k+1)) / v(B) + c·k + o

with a forward of v(n) on n tokens in all B rows together, a draft step of c, and an overhead of o. The quotient is the
speed-up (Leviathan et al., arXiv 2211.17192, theorem 3.8, has v = 1, o = 0 and one α for all a_j). Where only a share of the
rounds finds a draft (copied text), the others are plain steps, and both numbers are means over all rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from ..errors import SpecDecError


EXTRA_TOKEN = 0.02  # what every further token adds to a forward that waits for memory
MOST_DRAFT_TOKENS = 16  # as many as are looked at for the best length
PRECISION = 1e-9  # of a break-even that is searched for

Acceptance = float | Sequence[float]
"""One chance for all positions, or that of position 1, 2, … given that all before were accepted; the last one goes on."""

VerifyCost = float | Sequence[float] | Mapping[int, float] | Callable[[int], float]
"""What wider forwards cost: a slope `s`, `v(n) = 1 + s·(n − 1)`; or a sequence by tokens a row at this batch, the first
entry a plain step's; or a mapping or function of the tokens in all rows together. In any unit: only ratios count. What is
measured is joined by straight lines, and the last one goes on."""


def survival(acceptance: Acceptance, k: int) -> list[float]:
    """Chance that the first 1, 2, … k draft tokens are all accepted."""
    chances, alive = [], 1.0
    for position in range(k):
        alive *= _chance(acceptance, position)
        chances.append(alive)
    return chances


def conditional(survival: Sequence[float]) -> list[float]:
    """Chance of each position given that all before it were accepted, from that of all up to it; 0 behind a 0.

    Engines report the latter ("per-position acceptance rate" in vLLM and llama.cpp).
    """
    return [after / before if before else 0.0 for before, after in pairwise([1.0, *survival])]


def expected_tokens(acceptance: Acceptance, k: int) -> float:
    """Tokens that a row gets from a round of k draft tokens, the bonus or corrected token included; from 1 to k + 1."""
    return 1.0 + sum(survival(acceptance, k))


def round_cost(
    k: int, draft_cost: float, verify_cost: VerifyCost = EXTRA_TOKEN, *, batch: int = 1, overhead: float = 0.0
) -> float:
    """Plain steps that a round of k draft tokens takes; without drafts it is a plain step.

    Args:
        k: Draft tokens a row.
        draft_cost: A draft step (c); 0 for drafts that take no time.
        verify_cost: What wider forwards cost, see `VerifyCost`.
        batch: Rows.
        overhead: What a round with drafts costs besides its forwards (o).

    Raises:
        SpecDecError: If a cost is negative, or a plain step costs nothing.
    """
    _check_costs(draft_cost, batch, overhead)
    if k == 0:
        return 1.0
    return verify_ratio(k + 1, verify_cost, batch) + draft_cost * k + overhead


def verify_ratio(width: int, verify_cost: VerifyCost = EXTRA_TOKEN, batch: int = 1) -> float:
    """A forward on `width` tokens a row, in plain steps of the same batch."""
    if isinstance(verify_cost, Sequence):
        cost = _joined(dict(enumerate(verify_cost, start=1)))
        wide, plain = cost(width), cost(1)
    else:
        if isinstance(verify_cost, Mapping):
            cost = _joined(verify_cost)
        elif callable(verify_cost):
            cost = verify_cost
        else:
            cost = _line(verify_cost)
        wide, plain = cost(batch * width), cost(batch)
    if plain <= 0:
        raise SpecDecError(f"A plain step must cost something; the verification costs say {plain:g}.")
    return wide / plain


def speedup(
    acceptance: Acceptance,
    k: int,
    draft_cost: float = 0.0,
    verify_cost: VerifyCost = EXTRA_TOKEN,
    *,
    batch: int = 1,
    overhead: float = 0.0,
    share: float = 1.0,
) -> float:
    """Speed-up over plain decoding with k draft tokens a round; 1.0 for k = 0.

    Args:
        acceptance: Chance of each draft token, see `Acceptance`.
        k: Draft tokens a row.
        draft_cost: A draft step in plain steps.
        verify_cost: What wider forwards cost, see `VerifyCost`.
        batch: Rows.
        overhead: What a round with drafts costs besides its forwards.
        share: Share of the rounds that have a draft.
    """
    cost = round_cost(k, draft_cost, verify_cost, batch=batch, overhead=overhead)
    return over_all_rounds(expected_tokens(acceptance, k), share) / over_all_rounds(cost, share)


def over_all_rounds(figure: float, share: float) -> float:
    """The mean of a figure of rounds with a draft and the 1 of those without one."""
    if not 0 <= share <= 1:
        raise SpecDecError(f"The share of rounds with a draft must be a number from 0 to 1, got {share!r}.")
    return 1 + share * (figure - 1)


def best_length(
    acceptance: Acceptance,
    draft_cost: float = 0.0,
    verify_cost: VerifyCost = EXTRA_TOKEN,
    *,
    batch: int = 1,
    overhead: float = 0.0,
    share: float = 1.0,
    most: int = MOST_DRAFT_TOKENS,
) -> int:
    """The draft length with the largest speed-up, from 0 (don't draft) to `most`; the shortest of equals."""

    def value(k: int) -> float:
        return speedup(acceptance, k, draft_cost, verify_cost, batch=batch, overhead=overhead, share=share)

    return max(range(most + 1), key=value)


def break_even_acceptance(
    draft_cost: float = 0.0,
    verify_cost: VerifyCost = EXTRA_TOKEN,
    *,
    k: int | None = None,
    batch: int = 1,
    overhead: float = 0.0,
    most: int = MOST_DRAFT_TOKENS,
) -> float | None:
    """The acceptance, alike at all positions, from which on drafting is no slower than plain decoding.

    Args:
        draft_cost: A draft step.
        verify_cost: What wider forwards cost.
        k: The draft length; `None` is the one, up to `most`, that needs the least.
        batch: Rows.
        overhead: What a round with drafts costs besides its forwards.
        most: Longest draft that is looked at.

    Returns:
        From 0 to 1, or `None` if it loses even when every draft token is accepted.
    """
    lengths = range(1, most + 1) if k is None else [k]
    costs = {each: round_cost(each, draft_cost, verify_cost, batch=batch, overhead=overhead) for each in lengths}

    def gains(acceptance: float) -> bool:
        tokens = list(accumulate(survival(acceptance, max(lengths)), initial=1.0))
        return any(tokens[each] >= cost for each, cost in costs.items())

    if not gains(1.0):
        return None
    low, high = 0.0, 1.0  # bisection: the expected tokens grow with the acceptance
    if gains(low):
        return low
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high


def break_even_cost(
    acceptance: Acceptance,
    verify_cost: VerifyCost = EXTRA_TOKEN,
    *,
    wanted: float = 1.0,
    k: int | None = None,
    batch: int = 1,
    overhead: float = 0.0,
    share: float = 1.0,
    most: int = MOST_DRAFT_TOKENS,
) -> float | None:
    """The dearest draft step with which a speed-up of `wanted` is reached, or `None` if not even a free one does it.

    Solves `speedup(…, k, c, …) = wanted` for c, with the given k or with that which allows the most. Other arguments as in
    `break_even_acceptance` and `speedup`.
    """
    lengths = range(1, most + 1) if k is None else [k]
    tokens = list(accumulate(survival(acceptance, max(lengths)), initial=1.0))
    if share <= 0:
        return None

    def dearest(length: int) -> float:
        free = round_cost(length, 0.0, verify_cost, batch=batch, overhead=overhead)
        return ((over_all_rounds(tokens[length], share) / wanted - 1) / share + 1 - free) / length

    cost = max(map(dearest, lengths))
    return cost if cost >= 0 else None


def _chance(acceptance: Acceptance, position: int) -> float:
    if isinstance(acceptance, Sequence):
        if not acceptance:
            raise SpecDecError("The acceptance has no position. Give one chance, or that of each position.")
        chance = acceptance[min(position, len(acceptance) - 1)]
    else:
        chance = acceptance
    if not 0 <= chance <= 1:
        raise SpecDecError(f"An acceptance must be a number from 0 to 1, got {chance!r}.")
    return chance


def _check_costs(draft_cost: float, batch: int, overhead: float) -> None:
    for name, given in (("draft step", draft_cost), ("round's overhead", overhead)):
        if not 0 <= given < float("inf"):
            raise SpecDecError(f"The cost of a {name} must be a number of plain steps from 0, got {given!r}.")
    if batch < 1:
        raise SpecDecError(f"The batch must have at least one row, got {batch!r}.")


def _line(slope: float) -> Callable[[int], float]:
    if not 0 <= slope < float("inf"):
        raise SpecDecError(f"The cost of a further token must be a number of plain steps from 0, got {slope!r}.")
    return lambda tokens: 1 + slope * (tokens - 1)


def _joined(points: Mapping[int, float]) -> Callable[[int], float]:
    """Straight lines between what is known; the first and the last one go on, though never downwards."""
    known = sorted(points.items())
    if not known:
        raise SpecDecError("The verification costs are empty. Give that of a plain step and of wider forwards.")
    if not all(0 < cost < float("inf") for _, cost in known):
        raise SpecDecError(f"Verification costs must be positive numbers, got {dict(known)!r}.")
    if len(known) == 1:
        return _line_through(known[0], EXTRA_TOKEN * known[0][1])
    parts = [(left, (right[1] - left[1]) / (right[0] - left[0])) for left, right in pairwise(known)]

    def cost(tokens: int) -> float:
        if tokens > known[-1][0]:
            return _line_through(known[-1], max(parts[-1][1], 0.0))(tokens)
        start, slope = next((part for part in reversed(parts) if part[0][0] <= tokens), parts[0])
        return max(start[1] + slope * (tokens - start[0]), 0.0)

    return cost


def _line_through(point: tuple[int, float], slope: float) -> Callable[[int], float]:
    return lambda tokens: point[1] + slope * (tokens - point[0])
