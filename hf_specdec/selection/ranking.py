"""What a draft model would gain, from the sizes of both models.

`tools.gain` has the formula; here are guesses of what goes into it. The numbers below are rough, and the adaptive draft
length goes by measured ones; they only have to say which draft is worth its memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from ..tools import gain
from .candidates import ModelFacts
from .facts import bytes_of


# a step's time goes with what it reads, and for a sixth with the number of layers: SmolLM2-135M costs .47 steps of
# SmolLM2-360M (37 % of the weights, 94 % of the layers), two of its layers and its output layer .19 steps of the whole
LAYER_SHARE = 1 / 6
EXTRA_TOKEN = gain.EXTRA_TOKEN
ROUND = 0.05  # what a round costs besides its forwards
FLOAT32_ON_CPU = 0.4  # the same there, where going from one token to several is going to slower kernels
NEW_EXPERTS = 0.5  # neighbouring tokens share about half of the experts they could differ in
MOST_DRAFT_TOKENS = 8

# same family, a tenth of the target: .7; each factor of four in size ± .03, and as much again below SMALL
USUAL_ACCEPTANCE, PER_FACTOR_OF_FOUR, SMALL = 0.7, 0.03, 100e6
OTHER_KIND = 0.1  # less, where an instruct model drafts for a coder, say
LEAST_SPEEDUP = 1.05
MOST_COST = 0.45  # dearer drafts lose as soon as acceptance is a little worse than predicted

CONTEXT = 4096  # tokens of cache that memory is stated for


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a draft would gain.

    Attributes:
        speedup: Over plain decoding, at the best number of draft tokens.
        num_draft_tokens: That number.
        cost: A draft step in target steps (c).
        acceptance: Chance that a draft token is accepted where those before it were (α).
    """

    speedup: float
    num_draft_tokens: int
    cost: float
    acceptance: float


def predict(
    target: ModelFacts,
    draft: ModelFacts,
    *,
    acceptance: float | None = None,
    same_kind: bool = True,
    overhead: float = ROUND,
) -> Prediction:
    """Predict the speed-up of one sequence.

    Args:
        target: Sizes of the target.
        draft: Sizes of the draft model.
        acceptance: Chance of a draft token, where it is known; else `usual_acceptance`.
        same_kind: Whether both are base models, or both instruct models, and so on.
        overhead: What a round costs besides its forwards and its tokens, in target steps.
    """
    chance = usual_acceptance(target, draft, same_kind) if acceptance is None else acceptance
    cost = step_cost(target, draft)

    def speedup(number: int) -> float:
        return gain.speedup(chance, number, cost, partial(forward_cost, target), overhead=overhead)

    best = max(range(1, MOST_DRAFT_TOKENS + 1), key=speedup)
    return Prediction(speedup(best), best, cost, chance)


def step_cost(target: ModelFacts, draft: ModelFacts) -> float:
    """A step of the draft in steps of the target. Its output layer counts: it is most of many a small model.

    The draft gets the target's dtype. A quantised target is taken to be as fast as what it reads, so a draft that isn't
    quantised is dearer for it.
    """
    size = bytes_of(target.dtype)
    layers = _body(target) * (size if target.bits is None else target.bits / 8)
    weights = draft.active_parameters * size / (layers + (target.active_parameters - _body(target)) * size)
    return (1 - LAYER_SHARE) * weights + LAYER_SHARE * draft.layers / target.layers


def forward_cost(target: ModelFacts, tokens: int) -> float:
    """A forward on `tokens` tokens in steps of the target. Of a mixture of experts, more tokens read more experts."""
    cost = 1 + EXTRA_TOKEN * (tokens - 1)
    if target.expert_parameters:
        fraction = target.expert_fraction
        share = target.expert_parameters * fraction / target.active_parameters
        cost += NEW_EXPERTS * share * ((1 - (1 - fraction) ** tokens) / fraction - 1)
    return cost


def usual_acceptance(target: ModelFacts, draft: ModelFacts, same_kind: bool = True) -> float:
    """How often a draft of the target's family is right, by the sizes without the output layers."""
    ratio = 10 * _body(draft) / _body(target) * min(_body(draft) / SMALL, 1)
    usual = USUAL_ACCEPTANCE + PER_FACTOR_OF_FOUR * math.log(ratio, 4)
    return min(max(usual, 0.5), 0.85) - (0 if same_kind else OTHER_KIND)


def cannot_pay(target: ModelFacts, draft: ModelFacts, prediction: Prediction) -> str | None:
    """Why a draft isn't worth loading, with the numbers, or `None`."""
    if prediction.cost > MOST_COST:
        packed = "" if target.bits is None else f" of {target.bits:.3g} bits"
        return (
            f"too large: a step reads {size(draft.active_parameters)} of weights in {draft.layers} layers, the "
            f"target's {size(target.active_parameters)}{packed} in {target.layers}, so it costs {prediction.cost:.2f} of the "
            f"target's (at most {MOST_COST} pay)"
        )
    if prediction.speedup < LEAST_SPEEDUP:
        return (
            f"predicted {prediction.speedup:.2f}× at {prediction.acceptance:.0%} acceptance and {prediction.cost:.2f} "
            f"target steps a draft token: less than {LEAST_SPEEDUP}×"
        )
    return None


def memory_bytes(model: ModelFacts, *, context: int = CONTEXT, rows: int = 1, dtype: str | None = None) -> int:
    """Weights and cache, in bytes, in the given or the saved dtype.

    Args:
        model: Sizes.
        context: Tokens a row.
        rows: Sequences at a time.
        dtype: Name of a dtype; `None` is the saved one.
    """
    return bytes_of(dtype or model.dtype) * (model.parameters + model.kv_numbers * context * rows)


def size(parameters: float) -> str:
    """`"596 M"`, `"8.2 B"`."""
    return f"{parameters / 1e6:.3g} M" if parameters < 1e9 else f"{parameters / 1e9:.3g} B"


def _body(model: ModelFacts) -> int:
    return max(model.active_parameters - model.output_parameters, 1)
