"""A check from prompts to report: which stages there are, in which order, and how one that was stopped goes on.

Every stage returns plain JSON types and is kept when it is finished; the report is made of these alone.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from ..config import SpecConfig
from ..engine import forward
from ..errors import SpecDecError
from ..request import Request
from ..selection import automatic, load
from ..tools.bench import LEAST_TRIALS, Tell, choose_methods, describe_model
from ..tools.environment import describe_environment
from ..tools.loading import LoadedModel
from ..tools.suites import BenchPrompt
from ..tools.trials import Method, reason
from . import lossless, sampled, speed, state
from .acceptance import measure_acceptance
from .planning import measure_pace, plan_work
from .prompts import Reading, choose_prompts
from .report import assemble
from .static import static_facts


Load = Callable[[], LoadedModel]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """What to measure.

    Attributes:
        target: Local folder or Hub id.
        draft: Draft model, the same; `None` takes what `speculative=True` would.
        drafter: A drafter's name, or `"auto"`.
        dtype: As in `load_model`.
        batch_sizes: Prompts decoded at once.
        most_prompts: How many prompts to use.
        timed_prompts: On how many of them to take times, at most.
        max_new_tokens: Most new tokens a prompt.
        max_prompt_tokens: Longer prompts are left out.
        trials: Runs of each side on each prompt, at least 2.
        temperature: Of sampled decoding.
        temperatures: Of the curve.
        curve_prompts: Prompts of that curve.
        sampled_tokens: Tokens for the test of the distribution.
        num_draft_tokens: Draft length at which acceptance is measured.
        seed: Of all sampling.
        minutes: How long all of it should take, roughly: where the model is slow, less is measured.
    """

    target: str
    draft: str | None = None
    drafter: str = "auto"
    dtype: str = "auto"
    batch_sizes: tuple[int, ...] = (1, 4)
    most_prompts: int = 24
    timed_prompts: int = 12
    max_new_tokens: int = 64
    max_prompt_tokens: int = 1024
    trials: int = 2
    temperature: float = 1.0
    temperatures: tuple[float, ...] = (0.7, 1.0, 1.5)
    curve_prompts: int = 3
    sampled_tokens: int = 2000
    num_draft_tokens: int = 8
    seed: int = 0
    minutes: float = 9.0

    def __post_init__(self) -> None:
        least = {
            "most_prompts": 1, "timed_prompts": 1, "curve_prompts": 1, "max_new_tokens": 8, "max_prompt_tokens": 1,
            "sampled_tokens": 1, "num_draft_tokens": 1, "trials": LEAST_TRIALS,
        }  # fmt: skip
        for name, number in least.items():
            if getattr(self, name) < number:
                raise SpecDecError(f"`{name}` must be at least {number}, got {getattr(self, name)}.")
        if not self.batch_sizes or min(self.batch_sizes) < 1 or len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise SpecDecError(f"`batch_sizes` must be different numbers from 1, got {list(self.batch_sizes)}.")
        if not self.minutes > 0:
            raise SpecDecError(f"`minutes` must be above 0, got {self.minutes}.")
        if not self.temperature > 0:
            raise SpecDecError(
                f"`temperature` must be above 0, got {self.temperature}: greedy decoding is checked anyway."
            )

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is checked: the models, and the prompts that were chosen for them."""

    loaded: LoadedModel
    draft: Any
    draft_name: str | None
    config: SpecConfig
    reading: Reading

    @property
    def prompts(self) -> tuple[BenchPrompt, ...]:
        return self.reading.suite.prompts


def run_check(
    settings: CheckSettings, reading: Reading, load_target: Load, *, folder: Path | None = None, restart: bool = False,
    static_only: bool = False, tell: Tell | None = None, say: Say | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Check a model on some prompts.

    A stage that fails is part of the report, and the others go on. Ctrl-C gives the report of the finished stages; the same
    settings and prompts then go on behind them.

    Args:
        settings: What to measure.
        reading: The prompts, from `read_prompts`.
        load_target: Loads the target; called once.
        folder: Where finished stages are kept until the check is done; `None` is `state.default_folder()`.
        restart: Forget what was kept.
        static_only: Stop before weights are loaded.
        tell: Called with what is done now, parts done, parts in all.
        say: Called with a line that the user should read at once.

    Returns:
        The report (see `report.assemble`).

    Raises:
        SpecDecError: If the models can't be loaded, no prompt can be used, or speculation is switched off.
    """
    tell, say = tell or (lambda title, done, total: None), say or (lambda line: None)
    choose_methods((settings.drafter,), draft=settings.draft)  # a wrong name is told before weights are loaded
    if Request.is_switched_off():
        raise SpecDecError("HF_SPECDEC_DISABLE switches speculation off: there is nothing to check. Unset it.")
    tell("configuration, tokenizer, memory", 0, 1)
    static = static_facts(
        settings.target, settings.draft, dtype=settings.dtype, batch=max(settings.batch_sizes),
        context=settings.max_prompt_tokens + settings.max_new_tokens,
    )  # fmt: skip
    header: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": settings.to_dict(),
        "environment": describe_environment(),
        "static": static,
    }
    if static_only or static["plain_reason"]:
        names = {"target": {"name": settings.target}, "draft": settings.draft, "drafter": settings.drafter}
        return assemble(header | names, reading, {}, {}, interrupted=False, static_only=static_only)
    subject = _prepare(settings, reading, load_target)
    header |= {
        "static": static | {"plain_reason": forward.unsupported_reason(subject.loaded.model)},
        "target": describe_model(subject.loaded.model, settings.target),
        "draft": subject.draft_name,
        "drafter": settings.drafter,
    }
    if header["static"]["plain_reason"]:
        return assemble(header, subject.reading, {}, {}, interrupted=False)
    key = state.fingerprint(_conditions(settings, header, subject.reading))
    kept = state.State(folder or state.default_folder(), key)
    if restart:
        kept.forget()
    if kept.stages:
        say(f"Going on behind: {', '.join(kept.stages)} ({kept.path}).")
    problems: dict[str, str] = {}
    interrupted = _run_stages(settings, subject, kept, problems, tell, say)
    if not interrupted and not problems:
        stages, seconds = dict(kept.stages), dict(kept.seconds)
        kept.forget()
    else:
        stages, seconds = kept.stages, kept.seconds
        say(f"What is finished is kept in {kept.path}; the same command goes on from there.")
    return assemble(header | {"seconds": seconds}, subject.reading, stages, problems, interrupted=interrupted)


def _prepare(settings: CheckSettings, reading: Reading, load_target: Load) -> _Subject:
    loaded = load_target()
    chosen = choose_prompts(loaded, reading, settings.most_prompts, settings.max_prompt_tokens)
    draft = name = None
    if settings.draft is not None:
        draft, name = load.load_draft(loaded.model, settings.draft), settings.draft
    elif automatic.is_wanted(wanted := SpecConfig(drafter=None if settings.drafter == "auto" else settings.drafter)):
        draft = automatic.draft_for(loaded.model, wanted)
        name = None if draft is None else str(draft.name_or_path)
    (method,), _ = choose_methods((settings.drafter,), draft=draft)
    return _Subject(loaded, draft, name, method.speculative, chosen)


def _conditions(settings: CheckSettings, header: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """What the results depend on."""
    environment = header["environment"]
    return {
        "settings": header["settings"],
        "prompts": [[prompt.id, prompt.category, prompt.text] for prompt in reading.suite.prompts],
        "target": [header["target"], state.describe_files(settings.target)],
        "draft": [header["draft"], state.describe_files(header["draft"]) if header["draft"] else None],
        "versions": environment["versions"],
        "hardware": [environment["cpu"], environment["torch_threads"], environment["settings"]],
    }


def _run_stages(
    settings: CheckSettings, subject: _Subject, kept: state.State, problems: dict[str, str], tell: Tell, say: Say
) -> bool:
    """Run what isn't kept yet; returns whether it was interrupted."""
    todo = _stages(settings, subject, kept.stages, tell)
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # a warning a call would bury everything else
    try:
        for name, run in todo.items():
            if name in kept.stages:
                continue
            began = time.monotonic()
            try:
                torch.manual_seed(settings.seed)
                result = run()
            except Exception as error:
                problems[name] = str(error) if isinstance(error, SpecDecError) else reason(error)
                continue
            try:
                kept.keep(name, result, time.monotonic() - began)
            except SpecDecError as error:  # it can't go on from here, that is all
                say(str(error))
    except KeyboardInterrupt:
        return True
    finally:
        transformers_logging.set_verbosity(level)
    return False


def _stages(
    settings: CheckSettings, subject: _Subject, done: Mapping[str, Any], tell: Tell
) -> dict[str, Callable[[], Any]]:
    """The stages by name, in order: what decides most comes first. `done` has those that are finished."""
    loaded, prompts, config, draft = subject.loaded, subject.prompts, subject.config, subject.draft
    method = Method(settings.drafter, config)
    several = min(max(settings.batch_sizes), len(prompts))

    def accepted(prompts: Sequence[BenchPrompt], temperature: float) -> list[dict[str, Any]]:
        return measure_acceptance(
            loaded, prompts, config, num_draft_tokens=settings.num_draft_tokens, temperature=temperature,
            seed=settings.seed, tell=tell, max_new_tokens=done["plan"]["text_tokens"],
        )  # fmt: skip

    def planned() -> dict[str, Any]:
        return plan_work(
            *measure_pace(loaded, prompts), settings.minutes, prompts=len(prompts), max_new_tokens=settings.max_new_tokens,
            sampled_tokens=settings.sampled_tokens, batch_sizes=settings.batch_sizes,
            temperatures=len(settings.temperatures), trials=settings.trials, timed_prompts=settings.timed_prompts,
            curve_prompts=settings.curve_prompts,
        )  # fmt: skip

    def timed_batch(size: int) -> dict[str, Any]:
        number = done["plan"]["timed"][str(size)]
        timed = _some(prompts, number if size == 1 else settings.timed_prompts)
        return speed.measure_batch(
            loaded, timed, method, size, max_new_tokens=done["plan"]["timed_tokens"][str(size)], trials=settings.trials,
            most=number, draft=draft, tell=tell,
        )  # fmt: skip

    def sampled_prompts() -> list[BenchPrompt]:
        short_first = sorted(prompts, key=lambda prompt: len(prompt.text))  # reading takes time from the tokens
        return _some(short_first, done["plan"]["sampled_prompts"])

    def curve() -> list[dict[str, Any]]:
        return speed.measure_temperatures(
            loaded, _some(sampled_prompts(), done["plan"]["curve_prompts"]), method, settings.temperatures,
            max_new_tokens=max(settings.max_new_tokens // 2, 8), trials=settings.trials, seed=settings.seed, tell=tell,
        )  # fmt: skip

    stages: dict[str, Callable[[], Any]] = {
        "plan": planned,
        "greedy": lambda: lossless.check_greedy(
            loaded, prompts, config, max_new_tokens=done["plan"]["text_tokens"], batch_size=several, tell=tell
        ).to_dict(),
        "acceptance": lambda: accepted(prompts, 0.0),
    }
    stages |= {f"speed {size}": lambda size=size: timed_batch(size) for size in settings.batch_sizes}  # type: ignore[misc]
    stages["costs"] = lambda: speed.measure_pass_costs(
        loaded,
        _some(sampled_prompts(), settings.curve_prompts),
        settings.batch_sizes,
        settings.num_draft_tokens,
        draft,
        tell,
    )
    if importlib.util.find_spec("scipy") is not None:
        stages["sampled"] = lambda: sampled.check_sampled(
            loaded, sampled_prompts(), config, tokens=done["plan"]["sampled_tokens"], temperature=settings.temperature,
            seed=settings.seed, max_new_tokens=settings.max_new_tokens, tell=tell,
        ).to_dict()  # fmt: skip
    stages["acceptance sampled"] = lambda: accepted(
        _some(sampled_prompts(), settings.timed_prompts), settings.temperature
    )
    stages["temperatures"] = curve
    return stages


def _some(prompts: Sequence[BenchPrompt], most: int) -> list[BenchPrompt]:
    """As many prompts of each category as can be."""
    categories = dict.fromkeys(prompt.category for prompt in prompts)
    ranked = sorted(
        ((place, number, prompt)
        for number, name in enumerate(categories)
        for place, prompt in enumerate(each for each in prompts if each.category == name)),
        key=lambda each: each[:2],
    )  # fmt: skip
    chosen = {id(prompt) for _, _, prompt in ranked[:most]}
    return [prompt for prompt in prompts if id(prompt) in chosen]
