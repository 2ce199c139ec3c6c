"""Is greedy decoding with speculation what plain decoding says? Compared text by text, and at every position.

Comparing texts alone sees only each text's first difference: behind a near-tie the two are about different things. So
every token that speculation emitted is also held against a plain forward over the text that it stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..config import SpecConfig
from ..tools.differences import Difference
from ..tools.loading import LoadedModel
from ..tools.suites import BenchPrompt


Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where one prompt's text with speculation leaves plain decoding's.

    Attributes:
        prompt: The prompt's id.
        kind: `"tie"`, `"near-tie"` or `"mismatch"`, as in `Difference`.
        difference: Where it is, and how large.
    """

    prompt: str
    kind: str
    difference: Difference


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """Whether speculation kept greedy decoding.

    Attributes:
        verdict: `"exact"`: every text is plain decoding's; `"near-tie"`: some differ where rounding explains it;
            `"fail"`: some differ otherwise, or a token isn't what the target says there.
        reasons: Why it failed, one sentence each.
        texts: Texts compared, one a prompt.
        same: Those that are equal.
        ties: Those that first differ where both tokens' logits are the same number.
        near_ties: Those that first differ where the logits are within the band. In float32 this is a failure.
        mismatches: Those that first differ otherwise.
        tokens: Tokens emitted with speculation, each held against a plain forward over its text.
        off_argmax: How many of them that forward wouldn't choose, but within the band.
        wrong: How many of them are below the highest logit by more than the band.
        worst_gap: Largest gap to the highest logit, of all of these tokens; `None` without a token.
        plain_worst_gap: The same for plain decoding's own texts, which rounding alone explains.
        band: Largest gap that rounding explains next to the logit of `worst_gap`.
        num_draft_tokens: Draft tokens that were verified: without any, nothing was checked.
        num_accepted_draft_tokens: How many of them were accepted.
        batch_size: Prompts decoded at once.
        dtype: The target's.
        first_differences: Where texts differ.
    """

    verdict: str
    reasons: tuple[str, ...]
    texts: int
    same: int
    ties: int
    near_ties: int
    mismatches: int
    tokens: int
    off_argmax: int
    wrong: int
    worst_gap: float | None
    plain_worst_gap: float | None
    band: float
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    batch_size: int
    dtype: str
    first_differences: tuple[FirstDifference, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing but rounding was found."""
        return self.verdict != "fail"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        return asdict(self)


def check_greedy(
    loaded: LoadedModel, prompts: Sequence[BenchPrompt], config: SpecConfig, *, max_new_tokens: int = 64,
    batch_size: int = 1, tell: Tell | None = None,
) -> GreedyResult:  # fmt: skip
    """Decode prompts greedily without and with speculation and compare.

    Args:
        loaded: The target and its tokenizer.
        prompts: What to continue.
        config: The user's settings of speculation.
        max_new_tokens: Most tokens a prompt.
        batch_size: Prompts to decode at once.
        tell: Called with what is done now, how many prompts are done, and how many there are.

    Raises:
        SpecDecError: If there are no prompts.
    """
    raise NotImplementedError
