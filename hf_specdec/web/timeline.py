"""What happened when: the tokens and rounds of one answer, as plain values that travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import SpecDecError


SCHEMA_VERSION = 1


@dataclass(slots=True)
class Token:
    """A token of an answer.

    Attributes:
        id: Its id.
        text: What it adds to the text; empty while a character isn't complete, and for special tokens.
        seconds: When it was there, from the start of the run.
        kind: `"plain"` (no draft), `"accepted"` (drafted, and kept), `"bonus"` (behind a draft that was right to its end),
            `"corrected"` (in place of the first draft token that wasn't kept) or `"own"` (behind a tree, where it may
            be either).
        step: Its round, from 0 (the prompt's).
        source: Which drafter had proposed it, or `""`.
        probability: What the target gave it at the run's temperature, before its other logits processors; or `None`.
    """

    id: int
    text: str
    seconds: float
    kind: str = "plain"
    step: int = 0
    source: str = ""
    probability: float | None = None


@dataclass(slots=True)
class Round:
    """A round: what was drafted, and what came of it.

    Attributes:
        step: Its number, from 0 (the prompt's).
        source: Which drafter proposed.
        drafted: The draft tokens' texts; of a tree flat.
        accepted: How many were kept.
        first: Index of its first token in the answer.
        tokens: How many tokens the answer got.
        seconds: When it ended.
        rejected: What the target gave the first draft token that wasn't kept, or `None`.
        is_tree: Whether the draft had branches.
    """

    step: int
    source: str
    drafted: list[str]
    accepted: int
    first: int
    tokens: int
    seconds: float
    rejected: float | None = None
    is_tree: bool = False


@dataclass(slots=True)
class Side:
    """One of the two answers.

    Attributes:
        tokens: Its tokens.
        rounds: Its rounds; without speculation there are none.
        seconds: What it took, the prompt included; up to now while it runs.
        done: Whether it has ended.
        cut: Why it ended before its time, or `""`.
        stats: `SpecStats.to_dict()`, empty without speculation.
    """

    tokens: list[Token] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0
    done: bool = False
    cut: str = ""
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(token.text for token in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Tokens over seconds, the prompt's pass included."""
        return len(self.tokens) / self.seconds if self.seconds and self.tokens else 0.0

    @property
    def first_token_seconds(self) -> float | None:
        """Time to the first token."""
        return self.tokens[0].seconds if self.tokens else None


@dataclass(slots=True)
class Comparison:
    """Both answers to one prompt, and the conditions they were measured under.

    Attributes:
        off: Plain `generate`.
        on: With speculation.
        settings: The run's settings as a dict.
        model: Name of the target.
        conditions: Hardware, dtype, versions, as one line.
        difference: Where the two texts part and why, or `""` where they don't or nothing was compared.
        near_tie: Whether rounding explains that.
        title: Of an example prompt, else `"own prompt"`.
        checked: Whether the check of both texts has ended: where they part, and every token's probability.
    """

    off: Side
    on: Side
    settings: dict[str, Any]
    model: str
    conditions: str
    difference: str = ""
    near_tie: bool = False
    title: str = ""
    checked: bool = True

    @property
    def complete(self) -> bool:
        """Whether both sides ended as they should."""
        return self.off.done and self.on.done and not self.on.cut

    @property
    def speedup(self) -> float | None:
        """Tokens a second with speculation over without; `None` until both are there."""
        if not self.complete or not self.off.tokens_per_second:
            return None
        return self.on.tokens_per_second / self.off.tokens_per_second

    @property
    def same_text(self) -> bool | None:
        """Whether both have the same tokens; `None` until both are there."""
        off, on = ([token.id for token in side.tokens] for side in (self.off, self.on))
        return not self.difference and off == on if self.complete else None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        return asdict(self) | {"schema_version": SCHEMA_VERSION, "speedup": self.speedup, "same_text": self.same_text}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Comparison:
        """Read what `to_dict` wrote.

        Raises:
            SpecDecError: If it is something else.
        """
        try:
            if given["schema_version"] != SCHEMA_VERSION:
                raise SpecDecError(f"The trace has schema version {given['schema_version']!r}, not {SCHEMA_VERSION}.")
            own = {name: value for name, value in given.items() if name in cls.__slots__}
            return cls(off=_side(own.pop("off")), on=_side(own.pop("on")), **own)
        except (KeyError, TypeError, AttributeError) as error:
            raise SpecDecError(f"This is no recorded run: {error!r}.") from error


def _side(given: Mapping[str, Any]) -> Side:
    tokens = [Token(**token) for token in given["tokens"]]
    return Side(**{**given, "tokens": tokens, "rounds": [Round(**each) for each in given["rounds"]]})
