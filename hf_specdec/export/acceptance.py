"""What acceptance measured here means in another engine.

At temperature 0 every engine keeps a draft token where it is the target's most likely one, so what was measured greedily
holds there. Above, p being the target's distribution and q the draft's, engines differ in what they draft and keep; a
sampled check has the chances of all families from one run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..tools.gain import expected_tokens
from .render import Export, Setup


GREEDY = "greedy"
FAMILIES = {
    GREEDY: "temperature 0: kept where it is the target's most likely token",
    "A1": "the draft's most likely token, kept by the ratio test: p(argmax q)",
    "A2": "a sampled draft token, kept by the ratio test: Σ min(p, q)",
    "B1": "the draft's most likely token, kept where the target samples the same: p(argmax q)",
    "B2": "a sampled draft token, kept where the target samples the same: Σ p·q",
    "here": "the same loop as here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How much of the drafts the engine will accept.

    Attributes:
        family: How it judges drafts at this temperature, one of `FAMILIES`; `None` where that isn't known.
        rule: That in words.
        temperature: The temperature asked about.
        draft_acceptance_rate: Accepted ÷ drafted, the bonus token excluded; `None` without a prediction.
        mean_acceptance_length: Tokens a step that has a draft, the bonus token included.
        num_draft_tokens: Tokens drafted a step.
        reason: Why there is no prediction, or what it leaves out.
    """

    family: str | None
    rule: str
    temperature: float
    draft_acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    num_draft_tokens: int | None = None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def predict(exported: Export, setup: Setup, record: Mapping[str, Any] | None) -> Prediction:
    """Predict the acceptance of a setup in its engine.

    Args:
        exported: The setup in the engine's terms.
        setup: The setup.
        record: The report of a check of these models, if there is one.
    """
    family = exported.family if setup.temperature > 0 else GREEDY
    if family is None:
        rule = "drafts are judged in a way of its own, which isn't known well enough"
        return Prediction(family=None, rule=rule, temperature=setup.temperature, reason=rule)
    found = Prediction(family=family, rule=FAMILIES[family], temperature=setup.temperature)
    if record is None:
        return replace(
            found, reason="not measured: pass --from, what `hf-specdec check --json FILE` wrote of this pair"
        )
    chances, reason = _chances(family, setup.temperature, record.get("acceptance") or {})
    tokens = setup.num_draft_tokens
    if chances is None or not tokens:
        return replace(found, reason=reason or "the length of the drafts adapts itself")
    length = expected_tokens(chances, tokens)
    reasons = [reason, _other_drafts(exported, (record.get("acceptance") or {}).get("drafter"))]
    return replace(
        found,
        draft_acceptance_rate=(length - 1) / tokens,
        mean_acceptance_length=length,
        num_draft_tokens=tokens,
        reason="; ".join(each for each in reasons if each) or None,
    )


def _other_drafts(exported: Export, measured: str | None) -> str | None:
    """Whether the engine's drafts are others than those that were measured."""
    if exported.weaker:
        return "an upper bound: this engine's own drafts are worse"
    if exported.family == "here" or measured in (None, "draft_model"):
        return None
    return f"measured with {measured} here, and this engine drafts in its own way"


def _chances(
    family: str, temperature: float, acceptance: Mapping[str, Any]
) -> tuple[float | list[float] | None, str | None]:
    """Chances of the draft tokens, by position or for all, and what to know about them."""
    if family == GREEDY:
        known = [each for each in acceptance.get("per_position") or () if each is not None]
        return known or None, None if known else "the check has no acceptance by position"
    sampled = acceptance.get("sampled") or {}
    # the loop here draws drafts as A2 does
    chance = (acceptance.get("families") or {}).get("A2" if family == "here" else family)
    if chance is None:
        return None, "the check has no sampled part"
    measured = sampled.get("temperature")
    other = measured is not None and abs(measured - temperature) > 1e-6
    return float(chance), f"measured at temperature {measured:g}, not {temperature:g}" if other else None
