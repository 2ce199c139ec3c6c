"""What a benchmark found: its cases, its conditions, what failed, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .costs import Costs
from .suites import ALL, Suite
from .summaries import MAX_SPREAD, Summary, summarise, summarise_plain, trusted
from .trials import PLAIN, Case, Run


if TYPE_CHECKING:
    from .bench import BenchSettings

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """A method that didn't run, at one batch size or (`None`) at all; `skipped` where it was left out on purpose."""

    method: str
    batch: int | None
    reason: str
    skipped: bool = False

    def __str__(self) -> str:
        place = "" if self.batch is None else f" at batch {self.batch}"
        return f"{self.method}{place}: {'left out, ' if self.skipped else ''}{self.reason}"


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Everything that was measured, and the conditions.

    Attributes:
        ours: Names of the methods that ran our loop.
        too_long: Prompts left out because of their length.
        incomplete: Prompts left out at each batch size because they don't fill a batch.
        curves: Isolated forwards of many widths, by batch size.
        interrupted: Whether the run was stopped before its end.
    """

    date: str
    command: tuple[str, ...]
    git_revision: str | None
    environment: Mapping[str, Any]
    target: Mapping[str, Any]
    draft: Mapping[str, Any] | None
    settings: BenchSettings
    methods: tuple[str, ...]
    ours: tuple[str, ...]
    suite: Suite
    too_long: int
    incomplete: Mapping[int, int]
    cases: tuple[Case, ...]
    curves: Mapping[int, Costs]
    failures: tuple[Failure, ...]
    interrupted: bool

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes that have a finished case."""
        return list(dict.fromkeys(case.batch for case in self.cases))

    def groups(self, batch: int) -> dict[str, list[Case]]:
        """The finished cases of a batch size by category, then all of them if there are several categories."""
        own = [case for case in self.cases if case.batch == batch]
        by_category = {name: [case for case in own if case.category == name] for name in _categories(own)}
        return by_category | ({ALL: own} if len(by_category) > 1 else {})

    def summaries(self) -> list[Summary]:
        """One summary for each batch size, category and method, plain decoding first."""
        return [
            summary
            for batch in self.batch_sizes
            for category, cases in self.groups(batch).items()
            for summary in self._group(batch, category, cases)
        ]

    def _group(self, batch: int, category: str, cases: Sequence[Case]) -> Iterator[Summary]:
        yield summarise_plain(batch, category, cases)
        for method in self.methods:
            done = [case for case in cases if method in case.trials]
            if done:
                yield summarise(batch, category, done, method)

    def _refused(self, summary: Summary) -> list[str]:
        """The categories that are part of a summary but not of its speed-up."""
        cases = self.groups(summary.batch)[summary.category]
        kept = _categories(trusted(cases))
        return [name for name in _categories(cases) if name not in kept]

    @property
    def mismatches(self) -> int:
        """Texts of our loop that differ by more than rounding explains."""
        found = (each for case in self.cases for name in self.ours for each in case.differences.get(name, ()))
        return sum(each is not None and not each.near_tie for each in found)

    @property
    def ok(self) -> bool:
        """Whether our loop gave plain decoding's texts, up to near-ties, and none of its methods failed."""
        broken = [each for each in self.failures if not each.skipped and each.method in (*self.ours, PLAIN.name)]
        return not self.mismatches and not broken

    def notes(self) -> list[str]:
        """What a reader of the figures has to know, one sentence each."""
        notes = []
        if self.interrupted:
            notes.append("The run was interrupted; these are the figures of what was finished.")
        if self.too_long:
            notes.append(f"Prompts left out for more than {self.settings.max_prompt_tokens} tokens: {self.too_long}.")
        notes += [
            f"Prompts left out because they don't fill a batch of {size}: {number}."
            for size, number in self.incomplete.items()
            if number
        ]
        notes += [str(failure) for failure in self.failures]
        for summary in self.summaries():
            place = f"batch {summary.batch}, {summary.category}"
            if summary.method == PLAIN.name and summary.refused:
                notes.append(f"{place}: {summary.refused}")
            elif summary.method == PLAIN.name and (refused := self._refused(summary)):
                notes.append(f"{place}: the speed-up leaves out {', '.join(refused)}, whose own is refused.")
            if summary.category == ALL or len(self.groups(summary.batch)) == 1:
                notes += [
                    f"{summary.method} at batch {summary.batch}: wholly or partly decoded plainly ({number} of "
                    f"{summary.cases} cases): {why}"
                    for why, number in summary.fallback_reasons.items()
                ]
        if any(each.refused for each in self.summaries()):
            notes.append(
                "For a speed-up let the machine do nothing else meanwhile, or raise --trials and --max-new-tokens."
            )
        if self.mismatches:
            notes.append(f"Texts that differ from plain decoding's by more than rounding explains: {self.mismatches}.")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain JSON types."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "bench",
            "ok": self.ok,
            "interrupted": self.interrupted,
            "date": self.date,
            "command": list(self.command),
            "git_revision": self.git_revision,
            "environment": dict(self.environment),
            "target": dict(self.target),
            "draft": None if self.draft is None else dict(self.draft),
            "settings": asdict(self.settings) | {"decoding": "greedy", "seed": None, "max_spread": MAX_SPREAD},
            "methods": list(self.methods),
            "prompts": {
                "file": self.suite.name,
                "sha256": self.suite.sha256,
                "ids": [prompt.id for prompt in self.suite.prompts],
                "left_out_too_long": self.too_long,
                "left_out_incomplete_batch": dict(self.incomplete),
            },
            "summaries": [asdict(summary) for summary in self.summaries()],
            "cost_curves": [asdict(costs) for costs in self.curves.values()],
            "failures": [asdict(failure) for failure in self.failures],
            "notes": self.notes(),
            "cases": [self._case(case) for case in self.cases],
        }

    def _case(self, case: Case) -> dict[str, Any]:
        """One case's raw figures; its ratios only where its category's are given."""
        refused = not trusted(self.groups(case.batch)[case.category])
        methods = {
            name: _raw([trial.run for trial in trials])
            | {
                "plain_before": [trial.before for trial in trials],
                "speedup": None if refused else case.speedup(name),
                "ideal": None if refused else case.ideal(name),
                "differences": [None if each is None else asdict(each) | {"kind": each.kind} for each in differences],
                "stats": trials[-1].run.stats,
            }
            for name, trials in case.trials.items()
            for differences in [case.differences.get(name, ())]
        }
        return {
            "batch": case.batch,
            "category": case.category,
            "prompts": list(case.prompts),
            "prompt_tokens": list(case.prompt_tokens),
            "spread": case.spread,
            "plain": _raw(case.plain),
            "methods": methods,
        }


def _categories(cases: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(case.category for case in cases))


def _raw(runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "seconds": [run.seconds for run in runs],
        "tokens": [run.num_tokens for run in runs],
        "first_token": [run.first_token for run in runs],
        "forward_seconds": [run.forward_seconds for run in runs],
    }
