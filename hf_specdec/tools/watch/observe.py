"""What the difference of two readings says: rate and length with our definitions, and whether speculation is really on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..gain import conditional
from .engines import TITLES, Counts, Reading


ACTIVE, UNUSED, OFF, IDLE, UNKNOWN = "active", "unused", "off", "idle", "unknown"
SPOKEN = {
    ACTIVE: "speculation is on",
    UNUSED: "loaded but never used",
    OFF: "speculation is off",
    IDLE: "nothing was generated",
    UNKNOWN: "it can't be told",
}
SWITCH = {
    "vllm": "--speculative-config",
    "sglang": "--speculative-algorithm",
    "llama-cpp": "--spec-type, with --spec-draft-model for a draft model",
    "tgi": "--speculate",
}
SIGN_OF_OFF = {
    "vllm": "No metrics of speculation; vLLM has them whenever it is on.",
    "sglang": "No verification was counted.",
    "llama-cpp": "No draft was counted, and the slots of llama.cpp are without speculation.",
    "tgi": "No token was skipped, which is what TGI calls an accepted draft token.",
}
LOOK = {
    "vllm": "With n-gram drafts the texts may have nothing to copy; else look for a batch-size limit in --speculative-config.",
    "sglang": "Look for 'speculative' in the server's log, and at the options of its first lines.",
    "llama-cpp": (
        "Look for 'failed to initialize speculative decoding context' in the server's log: it then serves without, for "
        "example where the vocabularies differ."
    ),
    "tgi": "No draft token was ever accepted.",
}
SAME = 0.01
DIGITS = 6  # of llama.cpp's counters


@dataclass(frozen=True, slots=True)
class Observed:
    """What a server did in some time.

    Attributes:
        engine: Name of the engine.
        models: Names of the models it counted for.
        counts: What was counted, `drafted` filled in where it follows from the steps.
        seconds: How long; `None` is since the server's start.
        exposed: Whether the server has counters of speculation.
        says: What it says of itself elsewhere, where the counters can't tell.
        restarted: Whether the counters went back, so that they were taken to start from zero.
        ever: Whether it drafted at any time since its start.
        rounded: Whether the counters are given with too few digits for so short a time.
        rate_now: A gauge's rate, where counts don't give one.
        length_now: A gauge's tokens a step, likewise.
    """

    engine: str
    models: tuple[str, ...]
    counts: Counts
    seconds: float | None
    exposed: bool
    says: bool | None = None
    restarted: bool = False
    ever: bool = False
    rounded: bool = False
    rate_now: float | None = None
    length_now: float | None = None

    @property
    def status(self) -> str:
        """`"active"`, `"unused"`, `"off"`, `"idle"` or `"unknown"`."""
        counts = self.counts
        drafts = counts.steps if counts.steps is not None else (self.length_now or 0) > 1
        if self.exposed and drafts and counts.drafted != 0:
            return ACTIVE
        if self.says is False:
            return OFF
        if not counts.tokens:
            return UNKNOWN if counts.tokens is None else IDLE
        if self.exposed:
            return UNUSED
        if self.engine == "llama-cpp":
            return UNKNOWN  # older versions don't count drafts
        return UNUSED if self.says else OFF

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted ÷ drafted, the bonus token not counted."""
        if self.counts.drafted and self.counts.accepted is not None:
            return min(self.counts.accepted / self.counts.drafted, 1.0)
        return self.rate_now if self.status == ACTIVE else None

    @property
    def all_steps(self) -> float | None:
        """Steps with and without a draft, the prompts' forwards left out: each gave its accepted tokens and one more."""
        counts = self.counts
        if counts.steps is None or counts.tokens is None or counts.accepted is None:
            return counts.steps
        return max(counts.tokens - (counts.firsts or 0.0) - counts.accepted, counts.steps)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a step: 1 + accepted ÷ steps, those without a draft included, as `SpecStats` has it."""
        return self._length(self.all_steps)

    @property
    def mean_acceptance_length_of_drafts(self) -> float | None:
        """1 + accepted ÷ steps that had a draft, as vLLM and llama.cpp log it."""
        return self._length(self.counts.steps)

    @property
    def drafting_share(self) -> float | None:
        """Share of the steps that had a draft."""
        steps, every = self.counts.steps, self.all_steps
        return steps / every if steps is not None and every else None

    @property
    def survival(self) -> list[float]:
        """Chance that the first 1, 2, … draft tokens of a step are all accepted."""
        steps = self.counts.steps
        return [min(count / steps, 1.0) for count in self.counts.accepted_at] if steps else []

    @property
    def per_position_acceptance(self) -> list[float]:
        """Chance of the draft token at position 1, 2, … given that all before it were accepted, as `SpecStats` has it."""
        return [min(each, 1.0) for each in conditional(self.survival)]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that the server gave out, over all requests ÷ wall time; `None` since the start."""
        tokens = self.counts.tokens
        return tokens / self.seconds if tokens is not None and self.seconds else None

    def _length(self, steps: float | None) -> float | None:
        if steps and self.counts.accepted is not None:
            return 1 + self.counts.accepted / steps
        return self.length_now if self.status == ACTIVE else None

    @property
    def spoken(self) -> str:
        """The status in words."""
        return "loaded but not used meanwhile" if self.status == UNUSED and self.ever else SPOKEN[self.status]

    def notes(self) -> list[str]:
        """What a reader has to know, one sentence each."""
        title, tokens = TITLES[self.engine], self.counts.tokens or 0
        many = f"{tokens:,.0f} tokens were generated, none of them drafted"
        notes = []
        if self.restarted:
            notes.append("The counters went back: the server was started anew. They are taken to start from zero.")
        if self.rounded:
            notes.append(
                f"{title} gives its counters six digits, too few by now for so short a time: watch for longer."
            )
        if len(self.models) > 1:
            notes.append(f"Sums over the models {', '.join(self.models)}; choose one with --model.")
        status = self.status
        if status == UNUSED:
            if self.ever:
                notes.append(f"It was used before, but not meanwhile: {many}. Is it limited to small batches?")
            else:
                notes.append(f"Loaded but never used: {many}. {LOOK[self.engine]}")
        elif status == OFF:
            notes.append(f"{SIGN_OF_OFF[self.engine]} Is it switched on? The option is {SWITCH[self.engine]}.")
        elif status == IDLE:
            notes.append("Nothing was generated meanwhile, so nothing can be told. Send it some requests.")
        elif status == UNKNOWN:
            notes.append(
                "The server doesn't count its drafts here. A newer version may; or look at one answer (--response)."
            )
        elif self.counts.drafted is None and self.rate_now is None:
            notes.append(
                f"{title} doesn't say how many tokens it drafts; give it with --num-draft-tokens for the rate."
            )
        elif self.counts.drafted is None:
            notes.append("The rate is the server's own gauge, of its last batches.")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain JSON types; counts and rates that aren't known are `None`."""
        counts = self.counts
        return {
            "engine": self.engine,
            "models": list(self.models),
            "seconds": self.seconds,
            "status": self.status,
            "num_emitted_tokens": counts.tokens,
            "num_spec_steps": self.all_steps,
            "num_drafts": counts.steps,
            "num_draft_tokens": counts.drafted,
            "num_accepted_draft_tokens": counts.accepted,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "mean_acceptance_length_of_drafts": self.mean_acceptance_length_of_drafts,
            "drafting_share": self.drafting_share,
            "per_position_acceptance": self.per_position_acceptance,
            "tokens_per_second": self.tokens_per_second,
            "restarted": self.restarted,
            "notes": self.notes(),
        }


def since_start(reading: Reading, says: bool | None = None) -> Observed:
    """What a server did since it was started."""
    return _observed(reading, reading.counts, None, says, restarted=False, width=reading.width)


def between(before: Reading, after: Reading, seconds: float, says: bool | None = None) -> Observed:
    """What a server did between two readings.

    Args:
        before: The earlier one.
        after: The later one.
        seconds: Time between them.
        says: What the server says of itself.
    """
    counts = after.counts - before.counts
    restarted = any((each or 0) < 0 for each in (counts.tokens, counts.firsts, counts.steps))
    if restarted:
        counts = after.counts
    width = after.width if restarted or after.width == before.width else None
    found = _observed(after, counts, seconds, says, restarted=restarted, width=width)
    return replace(found, rounded=after.engine == "llama-cpp" and _coarse(after.counts.drafted, counts.drafted))


def together(one: Observed, other: Observed) -> Observed:
    """Two neighbouring intervals as one."""
    return replace(
        other,
        counts=one.counts + other.counts,
        seconds=(one.seconds or 0.0) + (other.seconds or 0.0),
        exposed=one.exposed or other.exposed,
        restarted=one.restarted or other.restarted,
        rounded=one.rounded and other.rounded,
        models=tuple(dict.fromkeys([*one.models, *other.models])),
    )


def _coarse(total: float | None, counted: float | None) -> bool:
    """Whether a total of six digits leaves what was counted uncertain by more than `SAME`."""
    if not total or not counted:
        return False
    step = 10.0 ** max(math.floor(math.log10(total)) - DIGITS + 1, 0)
    return step > 1 and step > SAME * counted


def _observed(
    reading: Reading, counts: Counts, seconds: float | None, says: bool | None, *, restarted: bool, width: float | None
) -> Observed:
    drafted = counts.drafted
    if drafted is None and width is not None and counts.steps is not None:
        drafted = counts.steps * width
    accepted = None if counts.accepted is None else max(counts.accepted, 0.0)
    if accepted is not None and drafted is not None:
        accepted = min(accepted, drafted)
    return Observed(
        engine=reading.engine,
        models=reading.models,
        counts=replace(counts, drafted=drafted, accepted=accepted),
        seconds=seconds,
        exposed=reading.exposed,
        says=says,
        restarted=restarted,
        ever=bool(reading.counts.steps),
        rate_now=reading.rate_now,
        length_now=reading.length_now,
    )
