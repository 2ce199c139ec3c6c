"""The methods that `peers.py` compares. Each takes the inputs of `generate` and gives every row's new tokens.

    plain                     `model.generate`
    ours, ours:NAME           `speculative=True`, or a drafter by name
    ours:none, ours:off       our loop without a drafter, and with `num_draft_tokens=0`
    ours:adversarial          our loop with random drafts that claim to be good
    transformers_lookup       `prompt_lookup_num_tokens=10`
    transformers_assisted     `assistant_model=` (pairs only)
    flashspec_ngram           FlashSpec's n-gram drafter, six tokens: the n-gram half of its default, a composite
    flashspec_model           FlashSpec with a model drafter (pairs only)
    economize_lookup          economize's prompt lookup, cycles of seven
    economize_model           economize's draft model (pairs only)

`@eager` behind a name of ours forbids the lean forward (`HF_SPECDEC_LEAN=0`).
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

import hf_specdec
from hf_specdec.engine.rows import Rows
from hf_specdec.stats import StepEvent
from hf_specdec.tools.environment import version_of


PEERS = ("flashspec", "economize")
LOOKUP_TOKENS = 10  # Transformers' documented example
NGRAM_TOKENS = 6  # the n-gram half of FlashSpec's default, `composite-g6-f2`; economize gets the same
MODEL_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Bench:
    """What every method works with: the same target, the same draft, the same stop rule."""

    model: Any
    draft: Any
    pad: int
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """A generation: new tokens of each row, tokens a target forward, and what our loop did in each round."""

    rows: list[list[int]]
    acceptance_length: float | None = None
    events: list[StepEvent] = field(default_factory=list)
    stats: Any = None


Method = Callable[[dict[str, Tensor], int], Output]


class Adversarial(hf_specdec.Drafter):
    """Random tokens that claim to be accepted nine times in ten: what the length control is for."""

    name: ClassVar[str] = "adversarial"

    def start(self, context: Any) -> None:
        self.vocabulary, self.generator = context.vocabulary, torch.Generator().manual_seed(0)

    def outlook(self, rows: Rows) -> list[hf_specdec.drafters.Outlook]:
        return [hf_specdec.drafters.Outlook(self.name, acceptance=0.9, free=True)] * len(rows.live)

    def propose(self, rows: Rows, length: int) -> hf_specdec.Draft:
        shape = (len(rows.live), length)
        return hf_specdec.Draft(torch.randint(self.vocabulary, shape, generator=self.generator), [length] * shape[0])


def peer_versions() -> dict[str, str | None]:
    """Versions of the peers, `None` for one that isn't importable."""
    return {name: version_of(name) for name in PEERS}


def build(name: str, bench: Bench) -> Method:
    """The method of a name.

    Raises:
        ImportError: If it belongs to a package that isn't installed.
        ValueError: If there is none of that name, or it needs a pair.
    """
    base, _, flavour = name.partition("@")
    kind, _, drafter = base.partition(":")
    if flavour not in ("", "eager") or (flavour and kind != "ours"):
        raise ValueError(f"there is no method {name!r}: only `ours` takes `@eager`")
    if kind == "ours":
        return _ours(bench, drafter, flavour == "eager")
    if drafter or kind not in BUILDERS:
        raise ValueError(f"there is no method {name!r}. Known: ours, ours:DRAFTER, {', '.join(BUILDERS)}")
    if bench.draft is None and kind.endswith(("_model", "_assisted")):
        raise ValueError(f"the method {name!r} needs a draft model: run `pair`")
    return BUILDERS[kind](bench)


def cut(row: list[int], ends: tuple[int, ...]) -> list[int]:
    """A row up to its first end token, which is kept; what follows is padding."""
    return next((row[: index + 1] for index, token in enumerate(row) if token in ends), row)


def _new_rows(bench: Bench, inputs: dict[str, Tensor], sequences: Tensor) -> list[list[int]]:
    return [cut(row, bench.ends) for row in sequences[:, inputs["input_ids"].shape[1] :].tolist()]


def _plain(bench: Bench, **options: Any) -> Method:
    def run(inputs: dict[str, Tensor], tokens: int) -> Output:
        rounds = _Rounds()
        sequences = bench.model.generate(
            **inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=bench.pad,
            **(options | {"stopping_criteria": [rounds]} if options else {}),
        )  # fmt: skip
        rows = _new_rows(bench, inputs, sequences)
        return Output(rows, len(rows[0]) / rounds.count if rounds.count else None)

    return run


class _Rounds:
    """A stopping criterion that never stops: it is asked once a round, so it counts the target's forwards."""

    count = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.count += 1
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@contextmanager
def environment(**settings: str | None) -> Iterator[None]:
    """Environment variables for the time of a block; `None` for one that isn't set."""
    before = {name: os.environ.get(name) for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _ours(bench: Bench, drafter: str, eager: bool) -> Method:
    events: list[StepEvent] = []
    chosen: dict[str, Any] = {"drafter": drafter or None, "on_step": events.append}
    if drafter == "adversarial":
        chosen["drafter"] = Adversarial()
    elif drafter == "off":
        chosen |= {"drafter": None, "num_draft_tokens": 0}
    elif bench.draft is not None:
        chosen |= {"draft_model": bench.draft, "num_draft_tokens": MODEL_TOKENS, "draft_length": "fixed"}
        chosen["drafter"] = drafter or "draft_model"
    config = hf_specdec.SpecConfig(**chosen)

    def run(inputs: dict[str, Tensor], tokens: int) -> Output:
        events.clear()
        with environment(HF_SPECDEC_LEAN="0" if eager else "1"):
            sequences = hf_specdec.generate(
                bench.model,
                **inputs,
                speculative=config,
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=bench.pad,
            )
        stats = hf_specdec.last_stats(bench.model)
        assert stats is not None
        rows = _new_rows(bench, inputs, sequences)
        return Output(rows, stats.mean_acceptance_length, list(events), stats)

    return run


def _transformers_assisted(bench: Bench) -> Method:
    bench.draft.generation_config.update(
        num_assistant_tokens=MODEL_TOKENS, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0
    )
    return _plain(bench, assistant_model=bench.draft)


def _flashspec(bench: Bench, drafter: Callable[[], Any], tokens: int) -> Method:
    logging.getLogger("flashspec").setLevel(logging.ERROR)
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine.verifier import TargetModel

    model = bench.model
    config = FlashSpecConfig(
        device=str(model.device), dtype=str(model.dtype).removeprefix("torch."), drafter_strategy="bandit",
        bandit=BanditConfig(n_arms=1), sampling=SamplingConfig(gamma=tokens, temperature=0.0),
    )  # fmt: skip
    engine = SpeculativeEngine(config, [drafter()], TargetModel("target", model.device, model.dtype, model=model))

    def run(inputs: dict[str, Tensor], tokens: int) -> Output:
        _only_one_row(inputs)
        found = engine.generate(inputs["input_ids"], max_new_tokens=tokens, eos_token_ids=bench.ends)
        row = [token for token in found.output_ids[0].tolist() if token >= 0]  # padded with -1
        return Output([cut(row, bench.ends)], sum(step.emitted for step in found.arm_steps) / len(found.arm_steps))

    return run


def _flashspec_ngram(bench: Bench) -> Method:
    from flashspec.engine.ngram import NgramDrafter

    return _flashspec(bench, NgramDrafter, NGRAM_TOKENS)


def _flashspec_model(bench: Bench) -> Method:
    from flashspec.engine.hf_drafter import HuggingFaceDrafter

    model = bench.draft
    return _flashspec(
        bench, lambda: HuggingFaceDrafter("draft", model.device, model.dtype, 0.0, model=model), MODEL_TOKENS
    )


def _economize(bench: Bench, technique: Any, tokens: int) -> Method:
    """economize's own `decode`: its `generate` fails on recent versions of Transformers."""
    import economize

    wrapped = economize.apply(bench.model, technique)
    config = economize.DecodeConfig(cycle_length=tokens + 1)

    def run(inputs: dict[str, Tensor], tokens: int) -> Output:
        prompts = [ids[mask.bool()] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
        found = wrapped.decode_batch(prompts, tokens, decoding=config, stop=list(bench.ends) or None)
        rounds = sum(len(row.acceptance) for row in found)
        rows = [cut(row.tokens.tolist(), bench.ends) for row in found]
        return Output(rows, 1 + sum(kept for row in found for _, kept in row.acceptance) / max(rounds, 1))

    return run


def _economize_lookup(bench: Bench) -> Method:
    from economize.techniques.lookup import LookupConfig

    return _economize(bench, LookupConfig(), NGRAM_TOKENS)


def _economize_model(bench: Bench) -> Method:
    from economize.techniques.draft_model import DraftModelConfig

    with tempfile.TemporaryDirectory() as path:  # it loads its draft from a folder, when it is applied
        bench.draft.save_pretrained(path)
        return _economize(bench, DraftModelConfig(model=path), MODEL_TOKENS)


def _only_one_row(inputs: dict[str, Tensor]) -> None:
    if inputs["input_ids"].shape[0] > 1:
        raise ValueError("batches are not compared: it takes no attention mask")


BUILDERS: dict[str, Callable[[Bench], Method]] = {
    "plain": _plain,
    "transformers_lookup": lambda bench: _plain(bench, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    "transformers_assisted": _transformers_assisted,
    "flashspec_ngram": _flashspec_ngram,
    "flashspec_model": _flashspec_model,
    "economize_lookup": _economize_lookup,
    "economize_model": _economize_model,
}
