"""What sampled tokens say for or against following the target's distribution."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..stats import StepEvent
from .significance import Moments, StatisticalTest, count_test, smallest_distance, smallest_shift, uniform_test, z_test


DETERMINISTIC = ("prompt_lookup", "recycling")  # sources whose drafts are a function of the text so far
TREES = ("recycling",)  # of them those whose drafts may be trees
# how often rounding may put a token inside a filter (top-k, top-p) that the plain forward has outside, a token
FORBIDDEN_HALF, FORBIDDEN_FLOAT32 = 1e-2, 1e-5
MOST_RATIO = 3.0  # log(q / p) is cut there, so that no single token decides
MOST_NUMBERS = 1 << 22  # probabilities looked at at once
DRAFT, TOP, OFFERED = "draft model's choice (z)", "most likely token (z)", "offered tokens (z)"
FIRST, LATER = "first of a round (z)", "later in a round (z)"
BY_ID, BY_PROBABILITY = "PIT by id (KS)", "PIT by probability (KS)"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token stood in its round.

    Attributes:
        index: 0 for the round's first token; `None` for a token of the prefill, or one that was decoded plainly.
        offered: Tokens that a deterministic draft had there; empty where none had any.
    """

    index: int | None = None
    offered: tuple[int, ...] = ()


def places(events: Sequence[StepEvent], lengths: Sequence[int]) -> list[list[Place]]:
    """Where each row's tokens stood in their rounds.

    Args:
        events: The rounds of a generation, the prefill first.
        lengths: Tokens of each row.
    """
    found: list[list[Place]] = [[] for _ in lengths]
    for event in events:
        for row, drafted, emitted, source in zip(event.rows, event.drafted, event.emitted, event.source, strict=True):
            for index in range(len(emitted)):
                offered: tuple[int, ...] = ()
                if source in TREES:  # given flat; all of it was decided before the round's first token
                    offered = tuple(sorted(set(drafted)))
                elif source in DETERMINISTIC:
                    offered = drafted[index : index + 1]
                found[row].append(Place(index if event.step else None, offered))
    return [(row + [Place()] * length)[:length] for row, length in zip(found, lengths, strict=True)]


class Evidence:
    """Sums and uniforms over all tokens looked at so far."""

    def __init__(self, half_precision: bool, rounds_are_free: bool, generator: torch.Generator) -> None:
        """Begin with nothing.

        Args:
            half_precision: Whether the target computes in half precision.
            rounds_are_free: Whether a later token of a round follows the target's distribution *given* that the round
                got that far. True of every rule but block verification of a sampled draft, which looks ahead.
            generator: Randomness of the probability integral transforms, on the CPU.
        """
        self.tolerated = FORBIDDEN_HALF if half_precision else FORBIDDEN_FLOAT32
        self.rounds_are_free, self.generator = rounds_are_free, generator
        self.sums: dict[str, Moments] = defaultdict(Moments)
        self.uniforms: dict[str, list[float]] = defaultdict(list)
        self.tokens = self.forbidden = 0

    def add(self, scores: Tensor, text: Sequence[int], where: Sequence[Place], draft_scores: Tensor | None) -> None:
        """Look at a text.

        Args:
            scores: The target's processed scores behind which each token stands, float32 `[tokens, vocabulary]`.
            text: The tokens.
            where: Where they stood in their rounds.
            draft_scores: The draft model's processed scores at the same places, if there is one.
        """
        known = [index for index, token in enumerate(text) if 0 <= token < scores.shape[1]]
        self.tokens += len(text)
        self.forbidden += len(text) - len(known)  # ids that don't exist
        if len(known) < len(text):
            scores, draft_scores = scores[known], None if draft_scores is None else draft_scores[known]
            text, where = [text[index] for index in known], [where[index] for index in known]
        tokens = torch.tensor(list(text), dtype=torch.long, device=scores.device)
        step = max(MOST_NUMBERS // scores.shape[1], 1)
        by_id: list[float] = []
        for start in range(0, len(text), step):
            part = slice(start, start + step)
            draft = None if draft_scores is None else draft_scores[part].to(scores.device)
            by_id += self._look(scores[part], tokens[part], where[part], draft)
        pairs = torch.tensor(by_id, dtype=torch.float64) - 0.5
        # the variance of a uniform is 1/12, that of the product of two 1/144
        self._sum("neighbouring tokens (z)", (pairs[1:] * pairs[:-1], torch.full_like(pairs[1:], 1 / 144)))

    def _look(self, scores: Tensor, tokens: Tensor, where: Sequence[Place], draft: Tensor | None) -> list[float]:
        """Look at some tokens; their uniforms by id."""
        at, log_p = tokens[:, None], torch.log_softmax(scores, -1)
        p = log_p.exp()
        allowed = p > 0
        self.forbidden += int((~allowed.gather(1, at)).sum())
        surprise = torch.where(allowed, -log_p, 0.0)
        # a token with no chance is as surprising as the least likely one that has some
        self._sum("surprise (z)", _centred(surprise, p, at, surprise.amax(-1)))
        hits = self._hits(TOP, p, p.argmax(-1), tokens)
        randomness = torch.rand(len(tokens), generator=self.generator, dtype=torch.float64)
        ids = torch.arange(p.shape[1], device=p.device).neg().expand_as(p)
        by_id = _uniforms(ids, p, at, randomness)
        self.uniforms[BY_ID] += by_id
        self.uniforms[BY_PROBABILITY] += _uniforms(p, p, at, randomness)
        if draft is not None:
            hits = self._hits(DRAFT, p, draft.argmax(-1), tokens)
            ratio = torch.where(allowed, torch.log_softmax(draft, -1) - log_p, 0.0).nan_to_num(nan=0.0)
            self.uniforms["PIT by draft preference (KS)"] += _uniforms(ratio, p, at, randomness)
            self._sum("draft against target (z)", _centred(ratio.clamp(-MOST_RATIO, MOST_RATIO), p, at))
        self._by_round(where, hits)
        self._offered(where, p, tokens)
        return by_id

    def _hits(self, name: str, p: Tensor, guess: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """How often a guess that hangs on the prefix alone came true, against its probability."""
        chance = p.gather(1, guess[:, None]).squeeze(1)
        found = _bernoulli((guess == tokens).to(chance), chance)
        self._sum(name, found)
        return found

    def _by_round(self, where: Sequence[Place], hits: tuple[Tensor, ...]) -> None:
        """The same hits, by the token's place in its round."""
        for name, indices in (
            (FIRST, [index for index, place in enumerate(where) if place.index == 0]),
            (LATER, [index for index, place in enumerate(where) if place.index]),
        ):
            if indices and (name == FIRST or self.rounds_are_free):
                self._sum(name, tuple(each[indices] for each in hits))

    def _offered(self, where: Sequence[Place], p: Tensor, tokens: Tensor) -> None:
        """How often tokens that a deterministic draft offered were emitted."""
        said = tokens.tolist()
        found = [(index, place.offered) for index, place in enumerate(where) if place.offered]
        if found:
            chance = torch.stack([p[index, list(offered)].sum() for index, offered in found]).clamp(max=1.0)
            hits = [float(said[index] in offered) for index, offered in found]
            self._sum(OFFERED, _bernoulli(chance.new_tensor(hits), chance))

    def _sum(self, name: str, parts: tuple[Tensor, ...]) -> None:
        """Add deviations, variances and third moments (zero where they aren't given)."""
        deviation, variance, third = (float(each.cpu().double().sum()) for each in (*parts, parts[0][:0])[:3])
        self.sums[name] += Moments(len(parts[0]), deviation, variance, third)

    def tests(self) -> tuple[StatisticalTest, ...]:
        """Every test that there is enough evidence for, not judged yet."""
        found = [uniform_test(name, values) for name, values in self.uniforms.items() if values]
        found += [z_test(name, moments) for name, moments in self._testable()]
        if self.tokens:
            found.append(count_test("forbidden tokens (count)", self.forbidden, self.tokens, self.tolerated))
        return tuple(found)

    def _testable(self) -> Iterator[tuple[str, Moments]]:
        return ((name, moments) for name, moments in self.sums.items() if moments.testable)

    def power(self) -> dict[str, float | None]:
        """What is found with which probability; see `SampledResult.power`."""
        number, testable = max(len(self.tests()), 1), dict(self._testable())

        def shift(*names: str) -> float | None:
            """Of the first sum that is there, as a share of all tokens."""
            moments = next((testable[name] for name in names if name in testable), None)
            return None if moments is None else smallest_shift(moments, number) * moments.n / self.tokens

        return {
            "draft_share": shift(DRAFT, OFFERED),
            "top_share": shift(TOP),
            "total_variation": smallest_distance(self.tokens, number) if self.tokens else None,
        }


def _centred(values: Tensor, p: Tensor, at: Tensor, impossible: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A function's value at the tokens minus its expectation, its variance and its third central moment.

    Args:
        values: The function, `[tokens, vocabulary]`, finite.
        p: Probabilities, of the same shape.
        at: The tokens, int64 `[tokens, 1]`.
        impossible: Its value for a token with no chance, `[tokens]`; `None`: its expectation.
    """
    mean = (p * values).sum(-1)
    centred = values - mean[:, None]
    square = p * centred.square()
    deviation = centred.gather(1, at).squeeze(1)
    no_chance = p.gather(1, at).squeeze(1) == 0
    deviation = torch.where(no_chance, 0.0 if impossible is None else impossible - mean, deviation)
    return deviation, square.sum(-1), (square * centred).sum(-1)


def _bernoulli(hit: Tensor, chance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for an event of a known chance."""
    variance = chance * (1 - chance)
    return hit - chance, variance, variance * (1 - 2 * chance)


def _uniforms(order: Tensor, p: Tensor, at: Tensor, randomness: Tensor) -> list[float]:
    """Randomised probability integral transforms: the chance of tokens ranked higher, plus a random part of the token's own.

    Args:
        order: What tokens are ranked by, highest first, `[tokens, vocabulary]`; equal ones share a rank.
        p: Probabilities.
        at: The tokens, int64 `[tokens, 1]`.
        randomness: Uniform on [0, 1), float64 `[tokens]`.
    """
    own = order.gather(1, at)
    above, level = ((p * mask).sum(-1).cpu().double() for mask in (order > own, order == own))
    found: list[float] = (above + randomness * level).clamp(0, 1).tolist()
    return found


def rounds_are_free(config: Any, draft: Any) -> bool:
    """Whether `Evidence` may condition on how far a round got.

    Args:
        config: The settings of speculation.
        draft: The draft model, or `None`.
    """
    return config.verification in ("rejection", "coupled") or (
        draft is None and not hasattr(config.drafter, "propose")
    )
