"""The pictures of a benchmark: that they are written, show the figures, and leave out what was refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hf_specdec import SpecDecError
from hf_specdec.tools import plots
from hf_specdec.tools.bench import BenchSettings
from hf_specdec.tools.bench_report import BenchReport
from hf_specdec.tools.costs import Costs
from hf_specdec.tools.plots import write_plots
from hf_specdec.tools.suites import BenchPrompt, Suite
from hf_specdec.tools.trials import Case, Run, Trial


METHODS = ("prompt_lookup", "recycling", "none", "transformers_lookup")


def made_up_report(batches: tuple[int, ...] = (1, 8), plain: float = 4.0, **changes: Any) -> BenchReport:
    """A report with two categories of three cases each; speed-ups and acceptances are made up."""
    stats = {
        "num_spec_steps": 40, "num_draft_tokens": 60, "num_accepted_draft_tokens": 45,
        "steps_by_source": {"prompt_lookup": 30, "none": 10}, "drafted_at": [30, 20, 15, 12, 3],
        "accepted_at": [20, 16, 13, 10, 3], "fallback_reason": None,
    }  # fmt: skip
    cases = []
    for batch in batches:
        for category in ("chat", "code_edit"):
            for number in range(3):
                seconds = {
                    name: 1.6 + 0.5 * index + 0.3 * number + 0.05 * batch - 0.4 * (category == "code_edit")
                    for index, name in enumerate(METHODS)
                }
                runs = [Run(each, (tuple(range(64)),) * batch) for each in (4.0, plain, 4.0)]
                trials = {
                    name: (Trial(0, Run(value, (tuple(range(64)),) * batch, stats=stats)),)
                    for name, value in seconds.items()
                }
                cases.append(Case(batch, category, (f"{category}/{number}",), (30,), tuple(runs), trials))
    curves = {
        batch: Costs(batch, 200, 0.05 * batch**0.5, {n * batch: 0.03 + 0.004 * n * batch for n in (1, 2, 4, 8, 16)})
        for batch in batches
    }  # fmt: skip
    fields: dict[str, Any] = {
        "date": "2026-01-01T00:00:00+00:00", "command": ("hf-specdec", "bench"), "git_revision": None,
        "environment": {
            "cpu": "A processor", "torch_threads": 2, "versions": {"torch": "2.13.0", "transformers": "5.24.0"}
        },
        "target": {
            "name": "org/Model-1B", "parameters": 1_234_000_000, "dtype": "bfloat16", "device": "cpu", "hardware": None
        },
        "draft": None, "settings": BenchSettings(batch_sizes=batches), "methods": METHODS, "ours": METHODS[:3],
        "suite": Suite("built-in", "0" * 64, (BenchPrompt("chat/0", "chat", "a"),)), "too_long": 0, "incomplete": {},
        "cases": tuple(cases), "curves": curves, "failures": (), "interrupted": False,
    }  # fmt: skip
    return BenchReport(**(fields | changes))


def names(paths: list[Path]) -> set[str]:
    return {path.name for path in paths}


def text_of(figure: Any) -> str:
    axes = figure.get_axes()
    shown = [text.get_text() for each in axes for text in each.texts]
    return " ".join([*shown, *(each.get_title(loc="left") for each in axes)])


def test_written(tmp_path: Path) -> None:
    written = write_plots(made_up_report(), tmp_path)
    drawn = {"speedup_by_category", "acceptance_by_position", "cost_curve", "speedup_by_batch"}
    assert names(written) == {f"{name}.{suffix}" for name in drawn for suffix in ("png", "svg")}
    for path in written:
        data = path.read_bytes()
        assert len(data) > 4000
        if path.suffix == ".png":
            assert data.startswith(b"\x89PNG")
        else:
            assert ElementTree.fromstring(data).tag.endswith("svg")


def test_dollar_signs_are_no_mathematics(tmp_path: Path) -> None:
    report = made_up_report((1,))
    cases = tuple(replace(case, category=rf"${case.category}\x$") for case in report.cases)
    target = {**report.target, "name": r"$\wrong{$"}
    assert write_plots(made_up_report((1,), cases=cases, target=target), tmp_path)


def test_what_there_is_nothing_for_is_left_out(tmp_path: Path) -> None:
    assert names(write_plots(made_up_report((1,), curves={}), tmp_path)) == {
        "speedup_by_category.png", "speedup_by_category.svg", "acceptance_by_position.png", "acceptance_by_position.svg",
    }  # fmt: skip
    assert write_plots(made_up_report(cases=(), curves={}), tmp_path) == []


def test_refused_speedups_are_not_drawn(tmp_path: Path) -> None:
    assert plots.speedup_by_category(made_up_report(plain=9.0)) is None
    assert plots.speedup_by_batch(made_up_report(plain=9.0)) is None
    steady, noisy = made_up_report((1,)), made_up_report((8,), plain=9.0)
    both = made_up_report(cases=steady.cases + noisy.cases)
    figure = plots.speedup_by_category(both)
    assert figure is not None
    first, second = figure.get_axes()
    assert len(first.patches) == 3 * len(METHODS)
    assert not second.patches
    assert text_of(figure).count("refused") == 3


def test_bars_are_the_geometric_means() -> None:
    report = made_up_report((1,))
    figure = plots.speedup_by_category(report)
    assert figure is not None
    heights = sorted(bar.get_height() for bar in figure.get_axes()[0].patches)
    ratios = sorted(each.speedup.geometric_mean for each in report.summaries() if each.speedup)
    assert heights == pytest.approx(ratios)


def test_positions_that_were_hardly_reached_are_not_drawn() -> None:
    figure = plots.acceptance_by_position(made_up_report((1,)))
    assert figure is not None
    line = figure.get_axes()[0].lines[0]
    assert list(line.get_xdata()) == [1, 2, 3, 4, 5]  # the fifth was reached 3 times in each of 6 cases
    few = made_up_report((1,))
    figure = plots.acceptance_by_position(made_up_report((1,), cases=few.cases[:1]))
    assert figure is not None
    assert list(figure.get_axes()[0].lines[0].get_xdata()) == [1, 2, 3, 4]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "has_matplotlib", lambda: False)
    with pytest.raises(SpecDecError, match=r"pip install 'hf-specdec\[bench\]'"):
        write_plots(made_up_report(), tmp_path)
