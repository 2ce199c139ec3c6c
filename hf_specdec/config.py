"""`SpecConfig`: everything a user may set, validated when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .errors import SpecDecError


if TYPE_CHECKING:
    from .stats import StepEvent

DRAFT_LENGTHS = ("adaptive", "fixed")
VERIFICATIONS = ("auto", "rejection", "block", "coupled")
DEFAULT_NUM_DRAFT_TOKENS = {"adaptive": 16, "fixed": 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """Settings of one speculative generation. Every field is optional.

    Attributes:
        drafter: Where draft tokens come from: a name (`"prompt_lookup"`, `"recycling"`, `"draft_model"`, `"hybrid"`,
            `"none"`), a `Drafter` instance, or `None` to choose: `"hybrid"` with a draft model, else
            `"prompt_lookup"`.
        draft_model: A causal language model with the target's token ids, its Hub id or its local path. `None` takes one
            that fits and pays from the local cache, or, for a target that came from the Hub, from there, and says so before the
            download; `"auto"` does that for a target from a folder too.
        num_draft_tokens: Tokens drafted a round; with `draft_length="adaptive"` the most that may be drafted.
            `None` means 16 (adaptive) or 5 (fixed); 0 switches speculation off.
        draft_length: `"adaptive"` chooses each round's length from measured acceptance and cost, 0 included;
            `"fixed"` always drafts `num_draft_tokens`.
        verification: How sampled drafts are checked: `"rejection"` (Leviathan et al., arXiv 2211.17192), `"block"`
            (Sun et al., arXiv 2403.10444), `"coupled"` (same seed, same text, whatever the draft), or `"auto"`: block. All
            keep the target's distribution exactly.
        seed: Seed of the sampling noise. `None` draws one from torch's global generator, so `torch.manual_seed` works. A
            tuple gives each row of the batch its own; verification is then coupled, so that a row's text is the one that
            its seed gives it alone.
        draft_device: Device to load `draft_model` on when it is an id or a path; `None` means the target's.
        strict: Raise where the default decodes plainly and logs a reason.
        on_step: Called with a `StepEvent` after every round.
        compile: Compile the forwards of target and draft model with `torch.compile`. The first calls take longer, by
            tens of seconds for each kind of shape; what was compiled serves every later call. Where it can't be
            compiled (a CPU needs a C++ compiler), the model runs as it is, and a reason is logged.
    """

    drafter: Any = None
    draft_model: Any = None
    num_draft_tokens: int | None = None
    draft_length: str = "adaptive"
    verification: str = "auto"
    seed: int | tuple[int, ...] | None = None
    draft_device: Any = None
    strict: bool = False
    on_step: Callable[[StepEvent], None] | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        if self.draft_length not in DRAFT_LENGTHS:
            raise SpecDecError(f"`draft_length` must be one of {DRAFT_LENGTHS}, got {self.draft_length!r}.")
        if self.verification not in VERIFICATIONS:
            raise SpecDecError(f"`verification` must be one of {VERIFICATIONS}, got {self.verification!r}.")
        number = self.num_draft_tokens
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= 128):
            raise SpecDecError(f"`num_draft_tokens` must be an integer from 0 to 128 or None, got {number!r}.")
        seeds = self.seed if isinstance(self.seed, tuple) else (0 if self.seed is None else self.seed,)
        if not seeds or any(isinstance(seed, bool) or not isinstance(seed, int) for seed in seeds):
            raise SpecDecError(
                f"`seed` must be an integer or None, got {self.seed!r}. A tuple gives each row its own."
            )
        if isinstance(self.seed, tuple) and self.verification not in ("auto", "coupled"):
            raise SpecDecError(
                f"A `seed` for each row needs `verification='coupled'` or 'auto', got {self.verification!r}, which draws "
                "for the whole batch at once. Pass one integer."
            )
        if not isinstance(self.compile, bool):
            raise SpecDecError(f"`compile` must be True or False, got {self.compile!r}.")
        if self.on_step is not None and not callable(self.on_step):
            raise SpecDecError(f"`on_step` must be a callable taking a StepEvent, got {self.on_step!r}.")

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens a round may draft."""
        if self.num_draft_tokens is None:
            return DEFAULT_NUM_DRAFT_TOKENS[self.draft_length]
        return self.num_draft_tokens

    @classmethod
    def from_argument(cls, speculative: Any, **overrides: Any) -> SpecConfig | None:
        """Read what a user passed as `speculative=`.

        Args:
            speculative: `True`, `False`, `None`, a drafter's name, a `SpecConfig` or a `Drafter` instance.
            **overrides: Fields to set where they are not `None`, such as the draft model of `assistant_model=`.

        Returns:
            The configuration, or `None` where speculation is off.

        Raises:
            SpecDecError: If the argument is none of these.
        """
        if speculative is None or speculative is False:
            return None
        if speculative is True:
            config = cls()
        elif isinstance(speculative, cls):
            config = speculative
        elif isinstance(speculative, str) or (hasattr(speculative, "propose") and not isinstance(speculative, type)):
            config = cls(drafter=speculative)
        else:
            raise SpecDecError(
                f"`speculative` must be True, False, a drafter's name, a SpecConfig or a Drafter instance, got "
                f"{speculative!r} ({type(speculative).__name__})."
            )
        given = {name: value for name, value in overrides.items() if value is not None}
        return replace(config, **given) if given else config
