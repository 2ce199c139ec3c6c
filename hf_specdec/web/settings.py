"""What a visitor may ask for: checked and bounded before anything runs, and shareable as a link."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, urlencode

from ..errors import SpecDecError


STRATEGIES = {
    "auto": "automatic",
    "draft_model": "draft model",
    "prompt_lookup": "prompt lookup",
    "recycling": "token recycling",
    "none": "our loop, no drafts",
}
NEEDS_DRAFT = ("draft_model",)
MOST_DRAFT_TOKENS = 16
LEAST_TEMPERATURE = 0.01  # logits over less than this may be no finite numbers


@dataclass(frozen=True, slots=True)
class Limits:
    """What one visitor may take of a machine that others wait for.

    Attributes:
        prompt_characters: Of the prompt.
        prompt_tokens: Of the prompt, the chat template included.
        new_tokens: Of each answer.
        seconds: Of each of the two runs.
    """

    prompt_characters: int = 8000
    prompt_tokens: int = 1024
    new_tokens: int = 256
    seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """One run's settings.

    Attributes:
        prompt: What the visitor wrote.
        family: Key of the model family (`models.families`).
        strategy: One of `STRATEGIES`.
        num_draft_tokens: Draft tokens a round; 0 leaves it to the controller.
        temperature: 0 is greedy.
        max_new_tokens: Most tokens of each answer.
        chat: Whether to wrap the prompt in the chat template.
        seed: Of the sampling noise, the same for both sides.
    """

    prompt: str
    family: str = "smollm2"
    strategy: str = "auto"
    num_draft_tokens: int = 0
    temperature: float = 0.0
    max_new_tokens: int = 96
    chat: bool = True
    seed: int = 0

    @classmethod
    def checked(cls, limits: Limits, families: Mapping[str, Any], **given: Any) -> RunSettings:
        """Settings from what came over the network.

        Args:
            limits: What may be asked for.
            families: The families there are; each has a `draft`, or `None`.
            **given: The fields, of any type.

        Raises:
            SpecDecError: With one sentence that says what is wrong and what would do.
        """
        prompt = given.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise SpecDecError("The prompt is empty. Write one, or choose an example.")
        if len(prompt) > limits.prompt_characters:
            raise SpecDecError(
                f"The prompt has {len(prompt):,} characters; at most {limits.prompt_characters:,} are taken here. Shorten it."
            )
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise SpecDecError("The prompt has half of a surrogate pair, which is no text. Delete it.") from error
        family = _choice("model", given.get("family", next(iter(families))), families)
        strategy = _choice("strategy", given.get("strategy", "auto"), STRATEGIES)
        if strategy in NEEDS_DRAFT and families[family].draft is None:
            raise SpecDecError(f"There is no draft model for {family!r} here. Choose another strategy.")
        return cls(
            prompt=prompt,
            family=family,
            strategy=strategy,
            num_draft_tokens=_whole("draft length", given.get("num_draft_tokens", 0), 0, MOST_DRAFT_TOKENS),
            temperature=_temperature(given.get("temperature", 0.0)),
            max_new_tokens=_whole(
                "number of new tokens", given.get("max_new_tokens", min(96, limits.new_tokens)), 1, limits.new_tokens
            ),
            chat=_flag("chat template", given.get("chat", True)),
            seed=_whole("seed", given.get("seed", 0), 0, 2**31 - 1),
        )

    @property
    def way(self) -> tuple[str, int, bool]:
        """What needs a warm-up of its own: strategy, draft tokens, and whether tokens are sampled."""
        return self.strategy, self.num_draft_tokens, self.temperature > 0

    def query(self) -> str:
        """These settings as what a link has behind its `#`: browsers send that to no server, so no log has the prompt."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return urlencode({name: int(value) if isinstance(value, bool) else value for name, value in given.items()})

    @classmethod
    def from_query(
        cls, query: Any, limits: Limits, families: Mapping[str, Any], **known: Any
    ) -> tuple[RunSettings | None, list[str]]:
        """Settings that `query` wrote, each checked as any other.

        Args:
            query: What the link says, whoever made it.
            limits: What may be asked for.
            families: The families there are.
            **known: Valid fields, for what the link doesn't say or says wrongly.

        Returns:
            The settings, `None` where the link has none, and why something in it wasn't taken, a sentence each.
        """
        given = dict(parse_qsl(query if isinstance(query, str) else "", keep_blank_values=True))
        names = [field.name for field in fields(cls) if field.name in given]
        refused = []
        for name in names:  # a strategy may be right for the link's model alone, which comes before it
            try:
                cls.checked(limits, families, **known | {name: given[name]})
                known[name] = given[name]
            except SpecDecError as error:
                refused.append(str(error))
        return cls.checked(limits, families, **known) if names else None, refused

    def code(self, target: str, draft: str | None, dtype: str) -> str:
        """The lines that do the same with speculation on.

        Args:
            target: Id or path of the target.
            draft: The same of the draft model, where the strategy has one.
            dtype: Of the weights.
        """
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "import hf_specdec",
            "",
            "hf_specdec.enable()",
            f"tokenizer = AutoTokenizer.from_pretrained({target!r})",
            f'model = AutoModelForCausalLM.from_pretrained({target!r}, dtype="{dtype}", device_map="auto")',
            f"prompt = {self.prompt!r}",
        ]
        if self.chat:
            lines += [
                "inputs = tokenizer.apply_chat_template(",
                '    [{"role": "user", "content": prompt}],',
                '    add_generation_prompt=True, return_tensors="pt", return_dict=True,',
                ").to(model.device)",
            ]
        else:
            lines.append('inputs = tokenizer(prompt, return_tensors="pt").to(model.device)')
        sampling = "do_sample=False"
        if self.temperature:
            sampling = f"do_sample=True, temperature={self.temperature!r}, top_k=0, top_p=1.0"
        lines += [
            f"output = model.generate(**inputs, max_new_tokens={self.max_new_tokens}, {sampling},",
            f"                        speculative={self._argument(draft)})",
            "print(tokenizer.decode(output[0], skip_special_tokens=True))",
        ]
        return "\n".join(lines)

    def _argument(self, draft: str | None) -> str:
        config = {} if self.strategy == "auto" else {"drafter": self.strategy}
        if draft is not None and self.strategy in ("auto", *NEEDS_DRAFT):
            config["draft_model"] = draft
        options = [f"{name}={value!r}" for name, value in config.items()]
        if self.num_draft_tokens:
            options.append(f'num_draft_tokens={self.num_draft_tokens}, draft_length="fixed"')
        if self.temperature:
            options.append(f'verification="coupled", seed={self.seed}')
        if not options:
            return "True"
        if options == [f"drafter={self.strategy!r}"]:
            return repr(self.strategy)
        return f"hf_specdec.SpecConfig({', '.join(options)})"


def _choice(name: str, given: Any, known: Mapping[str, Any]) -> str:
    if not isinstance(given, str) or given not in known:
        raise SpecDecError(f"The {name} must be one of {', '.join(known)}, got {_short(given)}.")
    return given


def _number(name: str, given: Any, low: float, high: float) -> float:
    try:
        value = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not low <= value <= high:
        raise SpecDecError(f"The {name} must be a number from {low:g} to {high:g}, got {_short(given)}.")
    return value


def _temperature(given: Any) -> float:
    value = _number("temperature", given, 0.0, 2.0)
    if 0 < value < LEAST_TEMPERATURE:
        raise SpecDecError(f"The temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got {_short(given)}.")
    return value


def _whole(name: str, given: Any, low: int, high: int) -> int:
    value = _number(name, given, low, high)
    if value != int(value):
        raise SpecDecError(f"The {name} must be a whole number, got {_short(given)}.")
    return int(value)


def _flag(name: str, given: Any) -> bool:
    known = {"true": True, "false": False, "1": True, "0": False}
    found = known.get(str(given).lower())
    if found is None:
        raise SpecDecError(f"The {name} must be on or off, got {_short(given)}.")
    return found


def _short(given: Any) -> str:
    """What was got, in as much room as a sentence has."""
    return reprlib.repr(given)
