"""How fast, on and off: at the user's batch sizes, by length of the output, by temperature, and what passes cost.

Runs take turns, as in `hf-specdec bench`, whose parts do the work. Everything is returned as plain JSON types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice
from statistics import fmean
from typing import Any

import torch

from ..tools.bench import BenchSettings, Tell, run_bench
from ..tools.bench_report import BenchReport
from ..tools.costs import CURVE_WIDTHS, measure_costs
from ..tools.loading import LoadedModel, encode_batch, pad_token
from ..tools.suites import ALL, BenchPrompt, Suite
from ..tools.summaries import refusal, typical_spread
from ..tools.timing import geometric_mean
from ..tools.trials import PLAIN, Case, Learnt, Method, Run, decode, interleave


MIXED = "mixed"
LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512)
COST_TOKENS, COST_PASSES = 16, 2


def measure_batch(
    loaded: LoadedModel, prompts: Sequence[BenchPrompt], method: Method, batch: int, *, max_new_tokens: int, trials: int,
    most: int = 1, draft: Any = None, tell: Tell | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Decode batches plainly and with a method, in turns.

    Args:
        loaded: The target.
        prompts: The prompts; those of a larger batch are mixed, and repeated where there are too few.
        method: What to compare with plain decoding.
        batch: Prompts decoded at once.
        max_new_tokens: Most tokens a prompt.
        trials: Runs on each prompt.
        most: Most batches of a size above 1.
        draft: The draft model, if there is one.
        tell: Called with what is done now, parts done, parts in all.

    Raises:
        KeyboardInterrupt: If it is stopped before its end.
    """
    chosen = list(prompts) if batch == 1 else _filled(prompts, batch, most)
    settings = BenchSettings(
        per_category=len(chosen), batch_sizes=(batch,), max_new_tokens=max_new_tokens, max_prompt_tokens=2**31,
        trials=trials, ideal=False,
    )  # fmt: skip
    report = run_bench(loaded, Suite("check", "", tuple(chosen)), [method], settings, draft=draft, tell=tell)
    if report.interrupted:
        raise KeyboardInterrupt
    return _figures(report, method.name, batch)


def _filled(prompts: Sequence[BenchPrompt], batch: int, most: int) -> list[BenchPrompt]:
    number = batch * min(max(len(prompts) // batch, 1), most)
    again = islice(cycle(prompts), number)
    return [
        replace(prompt, id=f"{prompt.id} ({place})", category=MIXED) for place, prompt in enumerate(again, start=1)
    ]


def _figures(report: BenchReport, name: str, batch: int) -> dict[str, Any]:
    summaries = {(each.category, each.method): each for each in report.summaries()}
    groups = report.groups(batch)
    every = list(groups)[-1] if groups else ALL
    cases = [case for case in report.cases if name in case.trials]
    ours, plain = summaries.get((every, name)), summaries.get((every, PLAIN.name))
    return {
        "batch": batch,
        "failures": [str(failure) for failure in report.failures],
        "mismatches": report.mismatches,
        "plain": None if plain is None else asdict(plain),
        "on": None if ours is None else asdict(ours),
        "categories": {
            category: asdict(summary)
            for category in groups
            if category != ALL and (summary := summaries.get((category, name))) is not None
        },
        "cases": [{"category": case.category, "speedup": case.speedup(name), "spread": case.spread} for case in cases],
        "lengths": by_length(cases, name) if batch == 1 else [],
    }


def by_length(cases: Sequence[Case], name: str) -> list[dict[str, Any]]:
    """The speed-up if texts ended after 4, 8, 16, … tokens, from when these arrived; of the cases that got that far."""
    found = []
    for tokens in LENGTHS:
        ratios = []
        for case in cases:
            pairs = [
                (_seconds_to(case.plain[trial.before + side], tokens), _seconds_to(trial.run, tokens))
                for trial in case.trials[name]
                for side in (0, 1)
            ]
            known = [(off, on) for off, on in pairs if off and on]
            if len(known) == len(pairs):
                ratios.append(fmean(off for off, _ in known) / fmean(on for _, on in known))
        if ratios:
            found.append({"tokens": tokens, "cases": len(ratios), "speedup": geometric_mean(ratios)})
    return found


def _seconds_to(run: Run, tokens: int) -> float | None:
    """When a run had that many tokens of its first row; `None` if it never had."""
    count = 0
    for seconds, number in run.arrivals[0] if run.arrivals else ():
        count += number
        if count >= tokens:
            return seconds
    return None


def measure_temperatures(
    loaded: LoadedModel, prompts: Sequence[BenchPrompt], method: Method, temperatures: Sequence[float], *,
    max_new_tokens: int, trials: int, seed: int = 0, tell: Tell | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Decode prompts at several temperatures, plainly and with a method, in turns.

    Args:
        loaded: The target.
        prompts: The prompts, one at a time.
        method: What to compare with plain decoding.
        temperatures: 0 is greedy.
        max_new_tokens: Most tokens a prompt.
        trials: Runs on each prompt.
        seed: Of the sampling noise.
        tell: Called with what is done now, parts done, parts in all.
    """
    found, done, learnt = [], 0, Learnt(loaded.model)
    for temperature in temperatures:
        options = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        cases = []
        for prompt in prompts:
            if tell is not None:
                tell(f"temperature {temperature:g}", done, len(temperatures) * len(prompts))
            done += 1
            inputs = encode_batch(loaded, [prompt.text])
            torch.manual_seed(seed)

            def run(one: Method, inputs: Any = inputs, options: Any = options) -> Run:
                if one.ours:
                    learnt.restore()
                return decode(loaded, inputs, replace(one, options={**one.options, **options}), max_new_tokens)

            failed: dict[str, str] = {}
            plain, trial = interleave(run, [method], trials, failed)
            if failed:
                raise RuntimeError(failed[method.name])
            cases.append(Case(1, prompt.category, (prompt.id,), (inputs["input_ids"].shape[1],), plain, trial))
        stats = [trial.run.stats or {} for case in cases for trial in case.trials[method.name]]
        steps = sum(each.get("num_spec_steps", 0) for each in stats)
        accepted = sum(each.get("num_accepted_draft_tokens", 0) for each in stats)
        spread = typical_spread(cases)
        found.append({
            "temperature": temperature,
            "cases": len(cases),
            "speedup": geometric_mean([case.speedup(method.name) for case in cases]),
            "spread": spread,
            "refused": refusal(spread),
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        })  # fmt: skip
    learnt.restore()
    return found


def measure_pass_costs(
    loaded: LoadedModel, prompts: Sequence[BenchPrompt], batch_sizes: Sequence[int], longest: int, draft: Any = None,
    tell: Tell | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What passes over one token a row and more cost, at each batch size; sizes that can't be measured are left out.

    Args:
        loaded: The target.
        prompts: The prompts whose middle is looked at.
        batch_sizes: Rows.
        longest: Longest draft whose cost is wanted.
        draft: The draft model, if there is one.
        tell: Called with what is done now, parts done, parts in all.
    """
    found = {}
    enough = next((width for width in CURVE_WIDTHS if width > longest), CURVE_WIDTHS[-1])
    for number, batch in enumerate(batch_sizes):
        if tell is not None:
            tell(f"batch {batch}: cost of passes", number, len(batch_sizes))
        inputs = encode_batch(loaded, [prompt.text for prompt in islice(cycle(prompts), batch)])
        plain = decode(loaded, inputs, PLAIN, COST_TOKENS)
        options = {"pad_token_id": pad_token(loaded)}
        widths = [width * batch for width in CURVE_WIDTHS if width <= enough]
        costs = measure_costs(loaded.model, inputs, plain.tokens, widths, draft, options, COST_PASSES)
        if costs is not None:
            found[str(batch)] = {
                "context": costs.context,
                "plain_step": costs.plain_step,
                "draft_step": costs.draft_step,
                "forward": {str(tokens // batch): seconds for tokens, seconds in costs.forward.items()},
            }
    return found
