"""Does sampling with speculation keep the target's distribution?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..config import SpecConfig
from ..tools.loading import LoadedModel
from ..tools.suites import BenchPrompt


Tell = Callable[[str, int, int], None]
DEFAULT_TOKENS = 3000


@dataclass(frozen=True, slots=True)
class StatisticalTest:
    """One test of the hypothesis that the tokens follow the target's distribution.

    Attributes:
        name: What it looks at.
        statistic: Its value: a z-score, the KS distance, or a count.
        p_value: Chance of a value this far off, were the hypothesis true.
        n: Tokens that it looks at.
        passed: Whether it stays within what chance explains, all tests together (Holm).
    """

    name: str
    statistic: float
    p_value: float
    n: int
    passed: bool


@dataclass(frozen=True, slots=True)
class SampledResult:
    """Whether speculation kept the sampling distribution.

    Attributes:
        verdict: `"pass"`, `"fail"` or `"too few tokens"`.
        reasons: Why it isn't a pass, one sentence each.
        temperature: Temperature of the sampling.
        tokens: Tokens that the verdict is about.
        tests: The tests on them.
        rerun: Whether a first sample looked off, so that the verdict is about a fresh one, four times as large.
        false_alarm: Chance that a lossless run fails, at most.
        power: What is found how surely: `probability` (0.9), and for each kind of deviation the smallest that is found
            with it. `draft_share`: how much too many or too few draft tokens are emitted, as a share of all tokens
            (`None` where no draft is known); `top_share`: the same for the target's most likely token;
            `total_variation`: total variation of the token's distribution, shifted along one of the orders.
        num_draft_tokens: Draft tokens that were verified.
        num_accepted_draft_tokens: How many of them were accepted.
        seed: Seed of the run.
    """

    verdict: str
    reasons: tuple[str, ...]
    temperature: float
    tokens: int
    tests: tuple[StatisticalTest, ...]
    rerun: bool
    false_alarm: float
    power: dict[str, float | None]
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    seed: int

    @property
    def passed(self) -> bool:
        """Whether no deviation was found with enough tokens."""
        return self.verdict == "pass"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON types."""
        return asdict(self)


def check_sampled(
    loaded: LoadedModel, prompts: Sequence[BenchPrompt], config: SpecConfig, *, tokens: int = DEFAULT_TOKENS,
    temperature: float = 1.0, seed: int = 0, batch_size: int = 8, max_new_tokens: int = 64, tell: Tell | None = None,
) -> SampledResult:  # fmt: skip
    """Sample with speculation and test whether the tokens follow the target's distribution.

    Args:
        loaded: The target and its tokenizer.
        prompts: What to continue, over and over until there are enough tokens.
        config: The user's settings of speculation; its seed is replaced.
        tokens: How many tokens to look at, roughly; four times as many where the first look finds something.
        temperature: Temperature of the sampling; other settings are the model's own (`generation_config`).
        seed: Seed of the run: the same seed, the same result.
        batch_size: Texts to decode at once.
        max_new_tokens: Most tokens a text.
        tell: Called with what is done now, how many tokens are done, and how many there are.

    Raises:
        SpecDecError: If there are no prompts, the temperature isn't positive, or SciPy isn't installed.
    """
    raise NotImplementedError
