"""The benchmark: plain decoding against drafters and Transformers' own loops, on real prompts.

`trials` has the protocol of one prompt, `replay` the ideal, `costs` the cost curve, `bench_report` the figures, `plots` the pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from ..config import SpecConfig
from ..drafters import DRAFTERS, NEEDS_MODEL
from ..errors import SpecDecError
from ..request import Request
from .bench_report import BenchReport, Failure
from .costs import CURVE_WIDTHS, Costs, measure_costs, real_tokens
from .environment import describe_environment, git_revision
from .loading import LoadedModel, encode_batch, encode_prompt, pad_token
from .replay import replay
from .suites import BenchPrompt, Suite
from .trials import PLAIN, Case, Learnt, Method, Run, decode, first_differences, interleave, reason


AUTO = "auto"
EVERY = "all"
IDEAL = "ideal"  # what forwards alone are called where they fail
LEAST_TRIALS = 2
WARM_UP_TOKENS = 32
SHORT_WARM_UP_TOKENS = 4
# Not in any suite: what is learnt from it must not help with the prompts that are measured.
WARM_UP_PROMPT = "Count from one to ten in words. Then count from one to ten in words again, without a mistake."

Tell = Callable[[str, int, int], None]


def choose_methods(
    drafters: Sequence[str] = (AUTO,), *, draft: Any = None, vs_transformers: bool = False
) -> tuple[list[Method], list[Failure]]:
    """Name the methods to compare with plain decoding.

    Args:
        drafters: Names of drafters; "auto" is what `speculative=True` chooses, "all" every drafter that can run.
        draft: The draft model, if there is one.
        vs_transformers: Add Transformers' own loops: prompt lookup, and assisted decoding where there is a draft model.

    Returns:
        The methods, and those of "all" that need a draft model and have none.

    Raises:
        SpecDecError: If a name is unknown, or needs a draft model and there is none.
    """
    names = list(dict.fromkeys(name for each in drafters for name in (DRAFTERS if each == EVERY else [each])))
    unknown = [name for name in names if name != AUTO and name not in DRAFTERS]
    if unknown:
        raise SpecDecError(
            f"There is no drafter {unknown[0]!r}. Choose from {', '.join([AUTO, EVERY, *sorted(DRAFTERS)])}."
        )
    missing = [name for name in names if name in NEEDS_MODEL and draft is None]
    asked = [name for name in missing if name in drafters]
    if asked:
        raise SpecDecError(f"The drafter {asked[0]!r} needs a draft model. Name one with --draft.")
    methods = [Method(name, _config(name, draft)) for name in names if name not in missing]
    if vs_transformers:
        methods.append(Method("transformers_lookup", options={"prompt_lookup_num_tokens": 10}))
        if draft is not None:
            methods.append(Method("transformers_draft", options={"assistant_model": draft}))
    return methods, [Failure(name, None, "needs a draft model (--draft)", skipped=True) for name in missing]


def _config(name: str, draft: Any) -> SpecConfig:
    if name == AUTO:
        return SpecConfig(draft_model=draft)
    return SpecConfig(drafter=name, draft_model=draft if name in NEEDS_MODEL else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What to measure.

    Attributes:
        categories: Names of categories; `None` is all of the suite.
        per_category: Most prompts of each.
        batch_sizes: Prompts decoded at once; each size is measured by itself.
        max_new_tokens: Most new tokens a prompt.
        max_prompt_tokens: Longer prompts are left out.
        trials: Runs of each method on each prompt, at least 2.
        ideal: Run the forwards alone too: the ideal, η and the cost curve.
    """

    categories: tuple[str, ...] | None = None
    per_category: int = 4
    batch_sizes: tuple[int, ...] = (1,)
    max_new_tokens: int = 64
    max_prompt_tokens: int = 1024
    trials: int = 3
    ideal: bool = True

    def __post_init__(self) -> None:
        for name, least in (("per_category", 1), ("max_new_tokens", 2), ("max_prompt_tokens", 1)):
            if getattr(self, name) < least:
                raise SpecDecError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")
        if self.trials < LEAST_TRIALS:
            raise SpecDecError(
                f"`trials` must be at least {LEAST_TRIALS}, got {self.trials}: one run says nothing about its spread."
            )
        if not self.batch_sizes or min(self.batch_sizes) < 1 or len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise SpecDecError(f"`batch_sizes` must be different numbers from 1, got {list(self.batch_sizes)}.")


def run_bench(
    loaded: LoadedModel,
    suite: Suite,
    methods: Sequence[Method],
    settings: BenchSettings | None = None,
    *,
    draft: Any = None,
    skipped: Sequence[Failure] = (),
    command: Sequence[str] = (),
    tell: Tell | None = None,
) -> BenchReport:
    """Compare methods with plain decoding.

    Whatever was finished is reported when the run is interrupted (Ctrl-C) or a method fails.

    Args:
        loaded: The target and its tokenizer.
        suite: The prompts.
        methods: What to compare, from `choose_methods`.
        settings: What to measure.
        draft: The draft model, for the ideal and the draft step's cost.
        skipped: Methods that can't run, for the report.
        command: The command line, for the report.
        tell: Called with what is done now, parts done, parts in all.

    Raises:
        SpecDecError: If there is nothing to measure: no method, no prompt that fits, no full batch, or speculation is
            switched off by `HF_SPECDEC_DISABLE`.
    """
    settings = settings or BenchSettings()
    if Request.is_switched_off():
        raise SpecDecError("HF_SPECDEC_DISABLE switches speculation off: there is nothing to measure. Unset it.")
    if not methods:
        raise SpecDecError("There is no method to compare with plain decoding. Name a drafter.")
    prompts, too_long = _choose_prompts(loaded, suite, settings)
    bench = _Bench(loaded, methods, settings, draft, tell or (lambda title, done, total: None))
    bench.plan(prompts)
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # a warning a call would bury everything else
    try:
        bench.run()
    except KeyboardInterrupt:
        bench.interrupted = True
    finally:
        transformers_logging.set_verbosity(level)
    return BenchReport(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=tuple(command),
        git_revision=git_revision(),
        environment=describe_environment(),
        target=describe_model(loaded.model, loaded.name),
        draft=None if draft is None else describe_model(draft, getattr(draft, "name_or_path", "")),
        settings=settings,
        methods=tuple(method.name for method in methods),
        ours=tuple(method.name for method in methods if method.ours),
        suite=replace(suite, prompts=tuple(prompts)),
        too_long=too_long,
        incomplete=bench.incomplete,
        cases=tuple(bench.cases),
        curves=bench.curves,
        failures=(*skipped, *bench.failures),
        interrupted=bench.interrupted,
    )


def describe_model(model: Any, name: str) -> dict[str, Any]:
    """A model's name, class, size, dtype and place."""
    on_gpu = model.device.type == "cuda"
    return {
        "name": str(name),
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "hardware": torch.cuda.get_device_name(model.device) if on_gpu else None,
        "attention": getattr(model.config, "_attn_implementation", None),
        "revision": getattr(model.config, "_commit_hash", None),
    }


def _choose_prompts(loaded: LoadedModel, suite: Suite, settings: BenchSettings) -> tuple[list[BenchPrompt], int]:
    """The first prompts of each category that fit, and how many before them were too long."""
    chosen: list[BenchPrompt] = []
    too_long = 0
    selected = suite.select(settings.categories)
    for category in selected.categories:
        kept = 0
        for prompt in selected.prompts:
            if prompt.category != category or kept == settings.per_category:
                continue
            if encode_prompt(loaded, prompt.text)["input_ids"].shape[1] > settings.max_prompt_tokens:
                too_long += 1
            else:
                chosen.append(prompt)
                kept += 1
    if not chosen:
        raise SpecDecError(
            f"All {too_long} prompts have more than {settings.max_prompt_tokens} tokens. Raise --max-prompt-tokens."
        )
    return chosen, too_long


class _Bench:
    """One benchmark under way; what is finished is always in its attributes."""

    def __init__(
        self, loaded: LoadedModel, methods: Sequence[Method], settings: BenchSettings, draft: Any, tell: Tell
    ) -> None:
        self.loaded, self.methods, self.settings, self.draft = loaded, methods, settings, draft
        self.tell = tell
        self.cases: list[Case] = []
        self.curves: dict[int, Costs] = {}
        self.failures: list[Failure] = []
        self.incomplete: dict[int, int] = {}
        self.interrupted = False
        self.planned: dict[int, list[tuple[BenchPrompt, ...]]] = {}
        self.learnt: dict[str, Learnt] = {}
        self.done = 0

    def plan(self, prompts: Sequence[BenchPrompt]) -> None:
        """Group the prompts of each category into batches.

        Raises:
            SpecDecError: If some batch size can't be filled.
        """
        categories = dict.fromkeys(prompt.category for prompt in prompts)
        groups = [[prompt for prompt in prompts if prompt.category == name] for name in categories]
        for size in self.settings.batch_sizes:
            cut = [tuple(group[first : first + size]) for group in groups for first in range(0, len(group), size)]
            self.planned[size] = [batch for batch in cut if len(batch) == size]
            self.incomplete[size] = sum(len(batch) for batch in cut if len(batch) < size)
            if not self.planned[size]:
                raise SpecDecError(
                    f"A batch of {size} needs {size} prompts of one category; the largest has {max(map(len, groups))}. "
                    "Raise --per-category or lower --batch."
                )

    @property
    def _runs(self) -> int:
        """Runs in all."""
        a_case = 1 + len(self.methods) + 1 + 2 * len(self.methods) * self.settings.trials
        warm_up = 1 + len(self.methods) + self.settings.ideal
        return sum(len(batches) * a_case + warm_up for batches in self.planned.values())

    def run(self) -> None:
        """Measure every batch size."""
        fresh = Learnt(self.loaded.model)
        try:
            for size, batches in self.planned.items():
                # the prompts of one batch size are those of the next
                self.learnt = {method.name: fresh for method in self.methods}
                self._batch_size(size, batches)
            self.tell("done", self._runs, self._runs)
        finally:
            fresh.restore()

    def _batch_size(self, size: int, batches: Sequence[Sequence[BenchPrompt]]) -> None:
        failed: dict[str, str] = {}
        try:
            self.learnt |= self._warm_up([WARM_UP_PROMPT] * size, WARM_UP_TOKENS, failed)
            for batch in batches:
                self._case(batch, failed)
            if self.settings.ideal:
                self._curve(batches, size, failed)
        except Exception as error:
            self.failures.append(Failure(PLAIN.name, size, reason(error)))
        finally:
            self.failures += [Failure(name, size, why) for name, why in failed.items()]

    def _case(self, batch: Sequence[BenchPrompt], failed: dict[str, str]) -> None:
        """Measure one prompt or batch of prompts."""
        size, category, texts = len(batch), batch[0].category, [prompt.text for prompt in batch]
        self._warm_up(texts, SHORT_WARM_UP_TOKENS, failed)
        inputs, title, after = encode_batch(self.loaded, texts), f"batch {size}, {category}", dict(self.learnt)

        def run(method: Method) -> Run:
            if method.ours:
                self.learnt[method.name].restore()
            found = self._decode(inputs, method, self.settings.max_new_tokens, title)
            if method.ours:
                after[method.name] = Learnt(self.loaded.model)
                found = replace(found, forward_seconds=self._forwards_alone(inputs, found, failed))
            return found

        plain, trials = interleave(run, self.methods, self.settings.trials, failed)
        self.learnt = after
        differences = {name: first_differences(self.loaded, inputs, plain, runs) for name, runs in trials.items()}
        case = Case(
            batch=size,
            category=category,
            prompts=tuple(prompt.id for prompt in batch),
            prompt_tokens=tuple(inputs["attention_mask"].sum(-1).tolist()),
            plain=plain,
            trials=trials,
            differences=differences,
        )
        self.cases.append(case)

    def _forwards_alone(self, inputs: Mapping[str, Any], run: Run, failed: dict[str, str]) -> float | None:
        """Seconds of a run's forwards by themselves; where that fails, the measured figures still stand."""
        if not self.settings.ideal or not run.events or IDEAL in failed:
            return None
        try:
            return replay(self.loaded.model, self.draft, real_tokens(inputs), run.events)
        except Exception as error:
            failed[IDEAL] = reason(error)
            return None

    def _curve(self, batches: Sequence[Sequence[BenchPrompt]], size: int, failed: dict[str, str]) -> None:
        """Measure the cost curve behind the batch of middle length."""
        self._say(f"batch {size}: cost curve")
        cases = sorted((case for case in self.cases if case.batch == size), key=lambda case: max(case.prompt_tokens))
        middle = cases[len(cases) // 2]
        texts = [prompt.text for batch in batches for prompt in batch if prompt.id in middle.prompts]
        inputs = encode_batch(self.loaded, texts)
        costs = self._costs(inputs, middle.plain[0], [width * size for width in CURVE_WIDTHS], failed)
        if costs is not None:
            self.curves[size] = costs

    def _costs(
        self, inputs: dict[str, Any], plain: Run, tokens: Sequence[int], failed: dict[str, str]
    ) -> Costs | None:
        """Isolated forwards; where they fail, the measured figures still stand."""
        if IDEAL in failed:
            return None
        options = {"pad_token_id": pad_token(self.loaded)}
        try:
            return measure_costs(self.loaded.model, inputs, plain.tokens, tokens, self.draft, options)
        except Exception as error:
            failed[IDEAL] = reason(error)
            return None

    def _warm_up(self, texts: Sequence[Any], tokens: int, failed: dict[str, str]) -> dict[str, Learnt]:
        """Let every method run once: kernels are chosen, memory is taken. Returns what each method has learnt."""
        inputs, title = encode_batch(self.loaded, texts), f"batch {len(texts)}: warm up"
        found = {}
        self._decode(inputs, PLAIN, tokens, title)
        for method in self.methods:
            if method.name not in failed:
                try:
                    self.learnt[method.name].restore()
                    self._decode(inputs, method, tokens, title)
                    found[method.name] = Learnt(self.loaded.model)
                except Exception as error:
                    failed[method.name] = reason(error)
        return found

    def _decode(self, inputs: dict[str, Any], method: Method, tokens: int, title: str) -> Run:
        self._say(f"{title}: {method.name}")
        return decode(self.loaded, inputs, method, tokens)

    def _say(self, title: str) -> None:
        self.tell(title, self.done, self._runs)
        self.done += 1
