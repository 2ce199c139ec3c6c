"""How often draft tokens are accepted, by position."""

from __future__ import annotations


DISCOUNT = 0.98  # how fast old rounds are forgotten
PRIOR_WEIGHT = 6.0  # rounds that the prior counts for
POOL_WEIGHT = 8.0  # rounds that all of a model's drafts together count for in one of its buckets
PRIOR_CHAIN = 0.5  # least prior for a position whose predecessor is likely accepted


class Acceptance:
    """Discounted counts of acceptance by position, for one source and bucket.

    Args:
        prior: Acceptance of the first token until it is measured.
        pool: The counts of all buckets of the source together, if these are what a bucket starts from.
    """

    def __init__(self, prior: float, pool: Acceptance | None = None) -> None:
        self.prior, self.pool = prior, pool
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
        if self.pool is not None:
            self.pool.update(drafted, accepted)

    def hazards(self, length: int) -> list[float]:
        """Chance of position 1, 2, … `length` to be accepted, given that all before it were."""
        pooled = None if self.pool is None else self.pool.hazards(length)
        weight = PRIOR_WEIGHT if pooled is None else POOL_WEIGHT
        found, estimate = [], self.prior
        for position in range(length):
            tried = self.tried[position] if position < len(self.tried) else 0.0
            kept = self.kept[position] if position < len(self.kept) else 0.0
            if pooled is not None:
                prior = pooled[position]
            else:
                prior = estimate if position == 0 else max(estimate, PRIOR_CHAIN)
            estimate = (kept + weight * prior) / (tried + weight)
            found.append(estimate)
        return found

    def survival(self, length: int) -> list[float]:
        """Chance that the first 1, 2, … `length` draft tokens are all accepted."""
        chances, survival = [], 1.0
        for hazard in self.hazards(length):
            survival *= hazard
            chances.append(survival)
        return chances
