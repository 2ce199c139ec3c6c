"""The counters of vLLM, SGLang, llama.cpp and TGI, as one kind of reading.

What they count differs (names checked against the engines' sources: vLLM 0.9 and later, llama.cpp b10658, SGLang 0.5.23,
TGI 3.3.7):

* vLLM and llama.cpp count steps that had a draft, draft tokens, accepted ones (bonus tokens not counted) and, for each
  position, how often everything up to it was accepted. vLLM has these counters only while speculation is on; llama.cpp
  has them always.
* SGLang counts verifications and generated tokens of finished requests. A verification gives its accepted tokens and
  one more, and the first token of a request comes from its prompt, so the accepted ones are what is left.
* TGI has a histogram of accepted tokens (it calls them skipped) over all steps, those of the prompts included, and says
  nothing about how many were drafted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ...errors import SpecDecError


SHORT = 80
MOST = 1e18  # no counter is larger
ROUNDING, FEW = 1.02, 16  # what is derived from counters of different moments may be off by


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts since a server's start, or of an interval; `None` is what an engine doesn't tell.

    Attributes:
        tokens: Tokens given out, over all requests.
        firsts: How many of them came from a prompt's forward, one a request, so from no step.
        steps: Steps that had a draft.
        drafted: Draft tokens verified.
        accepted: Draft tokens accepted, bonus tokens not counted.
        accepted_at: Steps whose first 1, 2, … draft tokens were all accepted.
    """

    tokens: float | None = None
    firsts: float | None = None
    steps: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    accepted_at: tuple[float, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        return _by_field(lambda mine, theirs: mine + theirs, self, other)

    def __sub__(self, other: Counts) -> Counts:
        return _by_field(lambda mine, theirs: mine - theirs, self, other)


_SINGLE = tuple(each.name for each in fields(Counts) if each.name != "accepted_at")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server said at one time.

    Attributes:
        engine: `"vllm"`, `"sglang"`, `"llama-cpp"` or `"tgi"`.
        counts: Since its start.
        exposed: Whether it has counters of speculation at all.
        models: Names of the models it counted for, where it tells.
        rate_now: Accepted ÷ drafted of the last batches, from a gauge.
        length_now: Tokens a step of the last batches or since the start, from a gauge.
        width: Draft tokens a step, where `counts.drafted` isn't told but follows from it.
    """

    engine: str
    counts: Counts
    exposed: bool
    models: tuple[str, ...] = ()
    rate_now: float | None = None
    length_now: float | None = None
    width: float | None = None


Labels = Mapping[str, str]
Samples = dict[str, list[tuple[Labels, float]]]
PREFIXES = {"vllm": "vllm:", "sglang": "sglang:", "llama-cpp": "llamacpp:", "tgi": "tgi_"}
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "llama-cpp": "llama.cpp", "tgi": "TGI"}


def read_metrics(
    text: str, *, engine: str | None = None, model: str | None = None, num_draft_tokens: int | None = None
) -> Reading:
    """Read a server's Prometheus text.

    Args:
        text: The body of `/metrics`.
        engine: Which engine it is from; `None` goes by the names.
        model: Count for the model of this name alone.
        num_draft_tokens: How many tokens the server drafts, where it doesn't tell (TGI).

    Raises:
        SpecDecError: If it is something else, was cut off, or counts what can't be.
    """
    samples = _samples(text)
    found = [name for name, prefix in PREFIXES.items() if any(each.startswith(prefix) for each in samples)]
    if engine is None and len(found) > 1:
        raise SpecDecError(f"These are metrics of {' and '.join(found)}. Choose one with --engine.")
    if not found or engine not in (None, *found):
        wanted = "an engine that is known here" if engine is None else TITLES[engine]
        raise SpecDecError(f"There are no metrics of {wanted} at this address (known: {', '.join(PREFIXES)}).")
    engine = engine or found[0]
    prefix = PREFIXES[engine]
    own = {name.removeprefix(prefix): each for name, each in samples.items() if name.startswith(prefix)}
    models = sorted({labels["model_name"] for each in own.values() for labels, _ in each if labels.get("model_name")})
    if model is not None:
        if model not in models:
            raise SpecDecError(
                f"There is no model {model!r} in these metrics; there are: {', '.join(models) or 'none'}."
            )
        own = {name: [each for each in rows if each[0].get("model_name") == model] for name, rows in own.items()}
        models = [model]
    counters = _Counters(prefix, own)
    reading = _READERS[engine](counters, num_draft_tokens)
    _check(reading)
    return replace(reading, engine=engine, models=tuple(models))


class _Counters:
    """Looks counters up; the ending `_total` may be there or not."""

    def __init__(self, prefix: str, samples: Samples) -> None:
        self.prefix, self.samples = prefix, samples

    def rows(self, name: str) -> list[tuple[Labels, float]]:
        """All series of a metric that are numbers."""
        return self.samples.get(f"{name}_total") or self.samples.get(name) or []

    def total(self, name: str) -> float | None:
        """The sum over its series (engines, models), or `None` if there is none."""
        rows = self.rows(name)
        for _, value in rows:
            if not 0 <= value < MOST:
                raise SpecDecError(f"The counter {self.prefix}{name} says {value:g}, which is no count.")
        return math.fsum(value for _, value in rows) if rows else None

    def gauge(self, name: str) -> float | None:
        """The mean over its series, those left out that have nothing to say (0 or NaN)."""
        values = [value for _, value in self.rows(name) if 0 < value < MOST]
        return math.fsum(values) / len(values) if values else None

    def by(self, name: str, label: str) -> dict[float, float]:
        """The sum for each value of a label that is a number."""
        found: dict[float, float] = {}
        for labels, value in self.rows(name):
            try:
                place = float(labels[label])
            except (KeyError, ValueError):
                raise SpecDecError(f"A series of {self.prefix}{name} has no number in its label {label!r}.") from None
            if not 0 <= value < MOST:
                raise SpecDecError(f"The counter {self.prefix}{name} says {value:g}, which is no count.")
            found[place] = found.get(place, 0.0) + value
        return found


def _draft_counters(counters: _Counters, tokens: str, firsts: str | None) -> Reading:
    """vLLM's counters, which llama.cpp has too."""
    name = "spec_decode_num_{}".format
    steps, drafted = counters.total(name("drafts")), counters.total(name("draft_tokens"))
    accepted, emitted = counters.total(name("accepted_tokens")), counters.total(name("emitted_tokens"))
    if steps is None and emitted is not None and accepted is not None:
        steps = max(emitted - accepted, 0.0)  # vLLM 0.9 and earlier: each step gave one token beyond its accepted ones
    if drafted is not None and (steps is None or accepted is None):
        raise SpecDecError(f"Some of the counters {counters.prefix}{name('…')} are missing. Is this the whole answer?")
    places = counters.by(name("accepted_tokens_per_pos"), "position")
    return Reading(
        "",
        Counts(
            tokens=counters.total(tokens),
            firsts=None if firsts is None else counters.total(firsts),
            steps=steps,
            drafted=drafted,
            accepted=accepted,
            accepted_at=tuple(places[place] for place in sorted(places)),
        ),
        exposed=drafted is not None,
    )


def _vllm(counters: _Counters, _: int | None) -> Reading:
    return _draft_counters(counters, "generation_tokens", "time_to_first_token_seconds_count")


def _llama_cpp(counters: _Counters, _: int | None) -> Reading:
    return _draft_counters(counters, "tokens_predicted", None)


def _sglang(counters: _Counters, _: int | None) -> Reading:
    tokens, firsts = counters.total("generation_tokens"), counters.total("num_requests")
    steps, width = counters.total("spec_verify_calls"), counters.gauge("spec_num_draft_tokens")
    accepted = None
    if steps is not None and tokens is not None:
        accepted = max(tokens - (firsts or 0.0) - steps, 0.0)
    rate, length = counters.gauge("spec_accept_rate"), counters.gauge("spec_accept_length")
    return Reading(
        "",
        Counts(tokens, firsts, steps, None, accepted),
        exposed=steps is not None or bool(length and length > 1),
        rate_now=rate,
        length_now=length,
        width=width - 1 if width and width > 1 else None,  # the token that a draft starts from is counted too
    )


def _tgi(counters: _Counters, num_draft_tokens: int | None) -> Reading:
    name = "request_skipped_tokens"
    accepted, forwards = counters.total(f"{name}_sum"), counters.total(f"{name}_count")
    if accepted is None or forwards is None:
        return Reading("", Counts(tokens=counters.total("request_generated_tokens_sum")), exposed=False)
    firsts = min(counters.total("request_success") or 0.0, forwards)
    up_to = counters.by(f"{name}_bucket", "le")
    bounds = sorted(each for each in up_to if each < math.inf)
    width = num_draft_tokens or (int(bounds[-1]) if bounds else None)
    steps = forwards - firsts
    return Reading(
        "",
        Counts(
            tokens=forwards + accepted,
            firsts=firsts,
            steps=steps,
            accepted=accepted,
            accepted_at=tuple(max(forwards - up_to[bound], 0.0) for bound in bounds[:-1]),
        ),
        exposed=accepted > 0 or bool(width),
        width=width or None,
    )


_READERS: dict[str, Callable[[_Counters, int | None], Reading]] = {
    "vllm": _vllm, "sglang": _sglang, "llama-cpp": _llama_cpp, "tgi": _tgi,
}  # fmt: skip


def _samples(text: str) -> Samples:
    """The series of the engines, by name; other exporters' lines are none of our business."""
    from prometheus_client.parser import text_string_to_metric_families

    if text.lstrip()[:1] in ("<", "{", "["):
        kind = "a web page" if text.lstrip().startswith("<") else "JSON"
        raise SpecDecError(
            f"The answer is {kind}, not Prometheus text: {text.strip()[:SHORT]!r}. Is it the right address?"
        )
    if text and not text.endswith("\n"):
        raise SpecDecError(
            f"The metrics were cut off; they end in {text.rsplit(chr(10), 1)[-1][:SHORT]!r}. Try again."
        )
    found: Samples = {}
    known = tuple(PREFIXES.values())
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.startswith(known):
            continue
        try:
            rows = [row for family in text_string_to_metric_families(line) for row in family.samples]
        except (ValueError, IndexError, KeyError) as error:
            raise SpecDecError(f"Line {number} of the metrics can't be read: {line[:SHORT]!r}.") from error
        for row in rows:
            found.setdefault(row.name, []).append((row.labels, float(row.value)))
    return found


def _check(reading: Reading) -> None:
    """More can't be accepted than was drafted."""
    counts = reading.counts
    drafted = counts.drafted
    if drafted is None and reading.width and counts.steps is not None:
        drafted = counts.steps * reading.width
    if drafted is not None and counts.accepted is not None and counts.accepted > ROUNDING * drafted + FEW > 0:
        raise SpecDecError(
            f"The counters contradict each other: {counts.accepted:.0f} draft tokens accepted, {drafted:.0f} drafted. "
            "Does the server draft another number of tokens a step than was given (--num-draft-tokens)?"
        )


def _by_field(join: Callable[[float, float], float], one: Counts, other: Counts) -> Counts:
    """Field by field; a series that isn't there yet counts nothing."""
    joined: dict[str, Any] = {}
    for name in _SINGLE:
        mine, theirs = getattr(one, name), getattr(other, name)
        joined[name] = None if mine is None and theirs is None else join(mine or 0.0, theirs or 0.0)
    longest = max(len(one.accepted_at), len(other.accepted_at))
    padded = [(*each.accepted_at, *(0.0,) * (longest - len(each.accepted_at))) for each in (one, other)]
    return Counts(**joined, accepted_at=tuple(map(join, *padded)))
