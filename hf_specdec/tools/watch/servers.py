"""Reads a running server: its metrics, or what it tells where it has none. Also single answers that were saved."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import SpecDecError
from .engines import MOST, Counts, Reading, read_metrics
from .fetch import TIMEOUT, FetchError, at, check_url, fetch


HOW = {
    "vllm": "vLLM serves /metrics by itself unless --disable-log-stats is given.",
    "sglang": "SGLang needs --enable-metrics for them.",
    "llama-cpp": "llama.cpp needs --metrics for them.",
    "tgi": "TGI has them at the port of its router.",
}
ABSENT = (404, 405, 501)  # what servers answer that have no metrics, or have them switched off


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is, and how to read it.

    Attributes:
        url: Its address.
        engine: Which engine it is; `None` goes by its metrics.
        model: Count for the model of this name alone.
        num_draft_tokens: How many tokens it drafts, where it doesn't tell.
        timeout: Seconds for one answer.
        key: Sent as a bearer token.
    """

    url: str
    engine: str | None = None
    model: str | None = None
    num_draft_tokens: int | None = None
    timeout: float = TIMEOUT
    key: str | None = None

    def read(self) -> Reading:
        """Read it once.

        Raises:
            SpecDecError: If there is no answer that can be used; one line says why.
        """
        address = at(check_url(self.url), "/metrics")
        try:
            text = fetch(address, timeout=self.timeout, key=self.key)
        except FetchError as error:
            if error.status not in ABSENT:
                raise
            found = self._without_metrics()
            if found is None:
                how = " ".join([HOW[self.engine]] if self.engine else HOW.values())
                raise FetchError(f"{address} has no metrics (HTTP {error.status}). {how}", error.status) from error
            return found
        return read_metrics(text, engine=self.engine, model=self.model, num_draft_tokens=self.num_draft_tokens)

    def says(self, reading: Reading) -> bool | None:
        """Whether the server says that it speculates, asked only where its counters leave it open."""
        if reading.counts.steps:
            return None
        if reading.engine == "vllm":
            return None if reading.exposed else False
        if reading.engine == "llama-cpp":
            return _slots_speculate(self._json("/slots"))
        if reading.engine == "sglang":
            found = self._server_info()
            return None if found is None else bool(found.get("speculative_algorithm"))
        return None

    def _without_metrics(self) -> Reading | None:
        """SGLang's length since its start, or whether llama.cpp's slots speculate."""
        if self.engine in (None, "sglang") and (info := self._server_info()) is not None:
            lengths = [
                length for each in _states(info) if (length := _number(each.get("avg_spec_accept_length"))) is not None
            ]
            length = math.fsum(lengths) / len(lengths) if lengths else None
            on = bool(info.get("speculative_algorithm"))
            return Reading("sglang", Counts(), exposed=on and length is not None, length_now=length)
        if self.engine in (None, "llama-cpp") and (slots := self._json("/slots")) is not None:
            if _slots_speculate(slots) is None:
                return None
            return Reading("llama-cpp", Counts(), exposed=False)
        return None

    def _server_info(self) -> dict[str, Any] | None:
        for path in ("/server_info", "/get_server_info"):
            found = self._json(path)
            if isinstance(found, dict) and "internal_states" in found:
                return found
        return None

    def _json(self, path: str) -> Any:
        """What a server tells at a path, or `None`; not to know it is no failure."""
        try:
            return json.loads(fetch(at(check_url(self.url), path), timeout=self.timeout, key=self.key))
        except (FetchError, ValueError, RecursionError):
            return None


def read_response(text: str) -> Reading:
    """Read one answer of a server, which tells what that request drafted.

    Args:
        text: The JSON that llama.cpp (`timings`), SGLang (`meta_info`) or vLLM
            (`--per-request-spec-decode-metrics summary`) answered.

    Raises:
        SpecDecError: If it is something else.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecDecError(
            f"The answer isn't JSON ({error}). Save what the server gave, without streaming."
        ) from error
    for part in _parts(answer):
        if isinstance(timings := part.get("timings"), dict) and "predicted_n" in timings:
            return _from_timings(timings)
        if isinstance(metrics := part.get("metrics"), dict) and isinstance(
            found := metrics.get("speculative_decoding"), dict
        ):
            return _from_vllm(found, part.get("usage"))
        if isinstance(meta := part.get("meta_info"), dict) and "completion_tokens" in meta:
            return _from_meta_info(meta)
    raise SpecDecError(
        "The answer tells nothing about drafts. llama.cpp puts it into `timings`, SGLang into `meta_info`, vLLM into `metrics` "
        "with --per-request-spec-decode-metrics summary."
    )


def _from_timings(timings: Mapping[str, Any]) -> Reading:
    tokens, drafted = _count(timings, "predicted_n"), _count(timings, "draft_n", 0)
    accepted = _count(timings, "draft_n_accepted", 0)
    steps = max(tokens - 1 - accepted, 0.0) if drafted else 0.0
    return Reading("llama-cpp", Counts(tokens, 1.0, steps, drafted, accepted), exposed=True)


def _from_vllm(found: Mapping[str, Any], usage: Any) -> Reading:
    tokens = _count(usage, "completion_tokens") if isinstance(usage, dict) and "completion_tokens" in usage else None
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    steps, drafted, accepted = (_count(found, name) for name in names)
    return Reading("vllm", Counts(tokens, 1.0, steps, drafted, accepted), exposed=True)


def _from_meta_info(meta: Mapping[str, Any]) -> Reading:
    tokens, steps = _count(meta, "completion_tokens"), _count(meta, "spec_verify_ct", 0)
    drafted, accepted = _count(meta, "spec_num_proposed_drafts", 0), _count(meta, "spec_num_correct_drafts", 0)
    if steps and not drafted:  # older versions tell the verifications alone
        return Reading("sglang", Counts(tokens, 1.0, steps, None, max(tokens - 1 - steps, 0.0)), exposed=True)
    return Reading("sglang", Counts(tokens, 1.0, steps, drafted, accepted), exposed=bool(steps))


def _parts(answer: Any) -> Iterator[dict[str, Any]]:
    """The answer, or the answers in a list, and their choices."""
    for each in answer if isinstance(answer, list) else [answer]:
        if isinstance(each, dict):
            yield each
            choices = each.get("choices")
            yield from (
                choice for choice in (choices if isinstance(choices, list) else []) if isinstance(choice, dict)
            )


def _slots_speculate(slots: Any) -> bool | None:
    """Whether any slot of llama.cpp speculates; `None` if they don't tell."""
    told = (
        [each["speculative"] for each in slots if isinstance(each, dict) and "speculative" in each]
        if isinstance(slots, list)
        else []
    )
    return any(each is True for each in told) if told else None


def _states(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    states = info.get("internal_states")
    return [each for each in states if isinstance(each, dict)] if isinstance(states, list) else []


def _count(found: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = _number(found.get(name, default))
    if value is None:
        raise SpecDecError(f"`{name}` in the answer must be a count, got {found.get(name)!r}.")
    return value


def _number(value: Any) -> float | None:
    """A number from 0 that may be a count, or `None`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST:
        return None
    return float(value)
