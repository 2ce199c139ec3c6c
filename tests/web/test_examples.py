"""The prompts to begin with, and the runs that were recorded for the first look."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_specdec.web import examples as module
from hf_specdec.web.examples import Example, examples, title_of, traces
from hf_specdec.web.settings import Limits, RunSettings
from hf_specdec.web.timeline import Comparison, Side


FAMILIES = {"smollm2": SimpleNamespace(draft=None)}


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.title)
def test_may_be_run(example: Example) -> None:
    settings = RunSettings.checked(
        Limits(), FAMILIES, prompt=example.text, temperature=example.temperature, max_new_tokens=example.max_new_tokens,
        strategy=example.strategy, num_draft_tokens=example.num_draft_tokens,
    )  # fmt: skip
    assert settings.prompt == example.text
    assert RunSettings.from_query(settings.query(), Limits(), FAMILIES, prompt="-") == (settings, [])


def test_kinds() -> None:
    chinese = [each for each in examples() if any("\u4e00" <= character <= "\u9fff" for character in each.text)]
    losing = [each for each in examples() if each.temperature >= 1 and each.max_new_tokens < 50]
    assert chinese
    assert [each.title for each in losing if "loses" in each.title]
    assert examples()[0].temperature == 0.0  # what the page opens with
    for word in ("edit", "ummary", "quest", "hat"):
        assert any(word in each.title for each in examples()), word


def test_titles() -> None:
    titles = [each.title for each in examples()]
    assert len(set(titles)) == len({each.text for each in examples()}) == len(titles)
    assert [title_of(each.text) for each in examples()] == titles
    for other in ("", "my own words", examples()[0].text + " ", titles[0]):
        assert title_of(other) == "own prompt"
        assert title_of(other, "another word") == "another word"


def test_traces_are_whole() -> None:
    assert [found.title for _, found in traces()] == [each.title for each in examples()]
    for recorded, found in traces():
        assert recorded
        assert found.complete
        assert found.same_text or found.near_tie
        assert found.speedup
        assert found.title
        assert (found.speedup < 1) == ("loses" in found.title)


def test_a_folder_of_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "files", lambda package: tmp_path)
    traces.cache_clear()
    try:
        assert traces() == ()  # there may be no folder
        folder = tmp_path / "traces"
        folder.mkdir()
        for name in "ba":
            run = Comparison(Side(), Side(), {}, name, "").to_dict()
            (folder / f"{name}.json").write_text(json.dumps({"recorded": f"where {name}", "run": run}))
        (folder / "README.md").write_text("no trace")
        traces.cache_clear()
        assert [(recorded, found.model) for recorded, found in traces()] == [("where a", "a"), ("where b", "b")]
    finally:
        traces.cache_clear()


@pytest.mark.smollm2
def test_prompts_fit(smollm2_path: str) -> None:
    """Within the tokens that a prompt may have, with the chat template."""
    from transformers import AutoTokenizer

    from hf_specdec.tools.loading import LoadedModel, tokenize

    loaded: Any = LoadedModel("SmolLM2", None, AutoTokenizer.from_pretrained(smollm2_path))
    for each in examples():
        length = tokenize(loaded, each.text)["input_ids"].shape[1]
        assert length <= Limits().prompt_tokens, each.title
