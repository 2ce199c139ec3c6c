"""Whether a server accepts what a check measured for the same models, and what to look at if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import SpecDecError
from ..gain import expected_tokens
from ..intervals import wilson
from .observe import ACTIVE, Observed


AS_MEASURED, BELOW, FAR_BELOW, ABOVE, NOT_COMPARED = "as measured", "below", "far below", "above", "not compared"
FAMILIES = {"vllm": "A1", "sglang": "A1", "llama-cpp": "B1", "tgi": "B1"}  # how their defaults accept sampled tokens
FAR = 0.8  # of what was measured
TOLERANCE = 0.05  # other prompts of the same kind differ by as much
LONGER = 0.1  # the same for a length, as a share
FEWEST_STEPS = 50
MOST_LENGTH = 1e4


@dataclass(frozen=True, slots=True)
class Comparison:
    """A server's figure beside the measured one.

    Attributes:
        verdict: `"as measured"`, `"below"`, `"far below"`, `"above"`, or `"not compared"`.
        figure: What is compared: `"draft_acceptance_rate"` or `"mean_acceptance_length"`.
        observed: The server's.
        observed_interval: Its 95 % interval.
        expected: The measured one's interval, for the server's number of draft tokens; it spans greedy and sampled requests.
        hints: What to look at, one sentence each.
    """

    verdict: str
    figure: str | None = None
    observed: float | None = None
    observed_interval: tuple[float, float] | None = None
    expected: tuple[float, float] | None = None
    hints: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def acceptance_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a check's report that a server is compared with.

    Raises:
        SpecDecError: If the report is of something else, or measured no acceptance.
    """
    acceptance = record.get("acceptance")
    if (
        record.get("kind") != "check"
        or not isinstance(acceptance, dict)
        or acceptance.get("draft_acceptance_rate") is None
    ):
        raise SpecDecError("To compare with, a report of hf-specdec check is needed that measured acceptance.")
    return acceptance


def compare(observed: Observed, acceptance: Mapping[str, Any]) -> Comparison:
    """Compare a server with a check.

    Args:
        observed: What the server did.
        acceptance: From `acceptance_of`.

    Raises:
        SpecDecError: If the report can't be read.
    """
    steps = observed.counts.steps
    if observed.status != ACTIVE:
        return Comparison(NOT_COMPARED)
    if steps is not None and steps < FEWEST_STEPS:
        return Comparison(
            NOT_COMPARED, hints=(f"Only {steps:.0f} steps had a draft; it takes {FEWEST_STEPS} to compare.",)
        )
    try:
        return _by_rate(observed, acceptance) or _by_length(observed, acceptance)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        if isinstance(error, SpecDecError):
            raise
        raise SpecDecError(f"The acceptance in the report can't be read ({error!r}). Write it again.") from error


def _by_rate(observed: Observed, acceptance: Mapping[str, Any]) -> Comparison | None:
    """Rates depend on the draft length, so the measured one is worked out for the server's."""
    rate, counts = observed.draft_acceptance_rate, observed.counts
    if rate is None:
        return None
    length = counts.drafted / counts.steps if counts.drafted and counts.steps else None
    expected = _expected_rates(observed.engine, acceptance, length)
    # tokens of one draft hang together, so steps are what counts as independent
    steps = counts.steps or 0.0
    interval = wilson(rate * steps, steps) if steps else (rate, rate)
    verdict = _verdict(interval, expected, TOLERANCE)
    hints = _hints(observed, acceptance, length) if verdict in (BELOW, FAR_BELOW) else ()
    return Comparison(verdict, "draft_acceptance_rate", rate, interval, expected, hints)


def _by_length(observed: Observed, acceptance: Mapping[str, Any]) -> Comparison:
    length = observed.mean_acceptance_length
    if length is None:
        return Comparison(NOT_COMPARED)
    known = _checked(acceptance["mean_acceptance_length"], MOST_LENGTH)
    low, high = (
        _checked(each, MOST_LENGTH) for each in acceptance.get("mean_acceptance_length_interval") or (known, known)
    )
    verdict = _verdict((length, length), (low, high), LONGER * known)
    hints = _hints(observed, acceptance, None) if verdict in (BELOW, FAR_BELOW) else ()
    return Comparison(verdict, "mean_acceptance_length", length, (length, length), (low, high), hints)


def _expected_rates(engine: str, acceptance: Mapping[str, Any], length: float | None) -> tuple[float, float]:
    """From the lowest to the highest rate that the check lets expect, greedy and with this engine's rule for sampling."""
    measured = _checked(acceptance["draft_acceptance_rate"])
    low, high = (_checked(each) for each in acceptance.get("draft_acceptance_rate_interval") or (measured, measured))
    known = acceptance.get("num_draft_tokens")
    tokens = round(length or _checked(known or 0, MOST_LENGTH))
    by_position = [_checked(each) for each in acceptance.get("per_position") or ()]
    rates = [measured]
    if by_position and tokens and tokens != known:
        rates = [_rate(by_position, tokens)]
    sampled = (acceptance.get("families") or {}).get(FAMILIES[engine])
    if sampled is not None and tokens:
        rates.append(_rate([_checked(sampled)], tokens))
    below, above = measured - low, high - measured
    return max(min(rates) - below, 0.0), min(max(rates) + above, 1.0)


def _checked(value: Any, most: float = 1.0) -> float:
    """A number of the report, from 0 to `most`."""
    number = float(value)
    if not 0 <= number <= most:
        raise ValueError(f"{value!r} is out of range")
    return number


def _rate(chances: Sequence[float], tokens: int) -> float:
    """Accepted ÷ drafted where every draft has so many tokens."""
    return (expected_tokens(chances, tokens) - 1) / tokens


def _verdict(observed: tuple[float, float], expected: tuple[float, float], tolerance: float) -> str:
    if observed[1] < FAR * expected[0]:
        return FAR_BELOW
    if observed[1] < expected[0] - tolerance:
        return BELOW
    if observed[0] > expected[1] + tolerance:
        return ABOVE
    return AS_MEASURED


def _hints(observed: Observed, acceptance: Mapping[str, Any], length: float | None) -> tuple[str, ...]:
    known = acceptance.get("num_draft_tokens")
    hints = []
    if length and known and round(length) != known:
        hints.append(f"The server drafts {length:.1f} tokens a step, the check drafted {known}.")
    first = observed.per_position_acceptance[:1]
    measured = (acceptance.get("per_position") or [None])[0]
    if first and measured:
        hints.append(f"First draft token: {first[0]:.0%} accepted there, {measured:.0%} in the check.")
    return (
        *hints,
        "Is it the same draft, the same quantisation of both models, the same chat template?",
        "Are the requests like the prompts that were checked? Other texts, longer answers and higher temperatures accept less.",
        "Do both vocabularies agree? hf-specdec drafts compares them; some engines only compare their sizes.",
    )
