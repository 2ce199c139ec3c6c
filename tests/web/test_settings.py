"""What a visitor may ask for, the link that says it, and the lines that do it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import parse_qs, parse_qsl

import pytest
import transformers

import hf_specdec
from hf_specdec import SpecDecError
from hf_specdec.web.models import Family
from hf_specdec.web.settings import (
    LEAST_TEMPERATURE,
    MOST_DRAFT_TOKENS,
    STRATEGIES,
    Limits,
    RunSettings,
)

from .conftest import recorded


FAMILIES = {"own": SimpleNamespace(draft="a draft"), "alone": SimpleNamespace(draft=None)}
LIMITS = Limits(prompt_characters=100, new_tokens=50)
ODD_PROMPTS = {
    "emoji": "👩‍👩‍👧 🏳️‍🌈 é",
    "right to left": "שלום עולם \u202eabc\u202c مرحبا",
    "control": "a\x00b\x07\x1b[31m\x7f\x85\u200b",
    "html": "<script>alert('1')</script>&amp;\"",
    "lines": "a\r\nb\rc\n\td  e",
    "quotes": "'''\"\"\"\\'\\n{0}%s{prompt}",
    "zero width": "\u200b",
}


def checked(**given: Any) -> RunSettings:
    return RunSettings.checked(LIMITS, FAMILIES, **{"prompt": "hello"} | given)


def refusal(**given: Any) -> str:
    with pytest.raises(SpecDecError) as caught:
        checked(**given)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 200
    return text


def test_defaults() -> None:
    assert RunSettings.checked(Limits(), FAMILIES, prompt="hello") == RunSettings(prompt="hello", family="own")
    assert checked().max_new_tokens == LIMITS.new_tokens


class TestPrompt:
    @pytest.mark.parametrize("prompt", ["", " ", "\n\t \u2003\r", None, 5, True, ["hello"], b"hello"])
    def test_nothing_in_it(self, prompt: Any) -> None:
        assert refusal(prompt=prompt) == "The prompt is empty. Write one, or choose an example."

    @pytest.mark.parametrize("prompt", ODD_PROMPTS.values(), ids=ODD_PROMPTS)
    def test_any_text_is_taken_as_it_is(self, prompt: str) -> None:
        assert checked(prompt=prompt).prompt == prompt

    def test_length(self) -> None:
        assert checked(prompt="a" * 100).prompt == "a" * 100
        assert refusal(prompt="a" * 12_345).startswith("The prompt has 12,345 characters; at most 100 are taken here.")

    @pytest.mark.parametrize("half", ["\ud83d", "a\udc00b"])
    def test_half_a_pair(self, half: str) -> None:
        assert "surrogate" in refusal(prompt=half)


BOUNDS = {
    "num_draft_tokens": ("draft length", 0, MOST_DRAFT_TOKENS),
    "temperature": ("temperature", 0, 2),
    "max_new_tokens": ("number of new tokens", 1, 50),
    "seed": ("seed", 0, 2**31 - 1),
}


@pytest.mark.parametrize("name", BOUNDS)
class TestNumbers:
    def test_bounds(self, name: str) -> None:
        title, low, high = BOUNDS[name]
        for good in (low, high, str(high), float(low)):
            assert getattr(checked(**{name: good}), name) == float(good)
        for bad in (low - 1, high + 1, str(high + 1), -(10**400), 10**400):
            text = refusal(**{name: bad})
            assert f"The {title} must be a number from {low:g} to {high:g}, got " in text
            assert repr(bad)[:10] in text

    @pytest.mark.parametrize(
        "bad", [True, False, None, "", "x", "1,5", [1], {"a": 1}, math.nan, math.inf, "nan", "-inf"]
    )
    def test_no_number(self, name: str, bad: Any) -> None:
        text = refusal(**{name: bad})
        assert text.startswith(f"The {BOUNDS[name][0]} must be a number")
        assert text.endswith(f"got {bad!r}.")

    def test_what_was_got_is_shortened(self, name: str) -> None:
        assert "..." in refusal(**{name: "9" * 5000})


@pytest.mark.parametrize("name", ["num_draft_tokens", "max_new_tokens", "seed"])
def test_halves(name: str) -> None:
    assert refusal(**{name: 2.5}) == f"The {BOUNDS[name][0]} must be a whole number, got 2.5."
    assert isinstance(getattr(checked(**{name: 2.0}), name), int)


def test_temperature_close_to_nothing() -> None:
    """Logits over it would be no finite numbers."""
    assert (
        refusal(temperature=1e-40) == f"The temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got 1e-40."
    )
    assert checked(temperature=LEAST_TEMPERATURE).temperature == LEAST_TEMPERATURE


@pytest.mark.parametrize("bad", ["other", "", None, 3, ["own"], "x" * 5000])
@pytest.mark.parametrize(
    ("name", "title", "known"), [("family", "model", "own, alone"), ("strategy", "strategy", "auto")]
)
def test_choices(name: str, title: str, known: str, bad: Any) -> None:
    assert refusal(**{name: bad}).startswith(f"The {title} must be one of {known}")


def test_no_draft_model() -> None:
    assert checked(strategy="draft_model").strategy == "draft_model"
    assert refusal(strategy="draft_model", family="alone") == (
        "There is no draft model for 'alone' here. Choose another strategy."
    )


def test_flag() -> None:
    for on, off in ((True, False), ("true", "false"), ("True", "False"), (1, 0), ("1", "0")):
        assert checked(chat=on).chat is True
        assert checked(chat=off).chat is False
    for bad in (None, "", "on", 2, [], 1.0, "yes" * 999):
        assert refusal(chat=bad).startswith("The chat template must be on or off, got ")


@pytest.mark.parametrize("prompt", ODD_PROMPTS.values(), ids=ODD_PROMPTS)
def test_link(prompt: str) -> None:
    settings = checked(
        prompt=prompt, family="own", strategy="draft_model", num_draft_tokens=3, temperature=0.123456789,
        max_new_tokens=7, chat=False, seed=2**31 - 1,
    )  # fmt: skip
    query = settings.query()
    assert query.isascii()
    assert all(len(values) == 1 for values in parse_qs(query, strict_parsing=True).values())
    assert checked(**dict(parse_qsl(query, strict_parsing=True))) == settings


class TestFromLink:
    KNOWN: ClassVar[dict[str, Any]] = {"prompt": "known", "max_new_tokens": 7}

    def read(self, query: Any) -> tuple[RunSettings | None, list[str]]:
        return RunSettings.from_query(query, LIMITS, FAMILIES, **self.KNOWN)

    @pytest.mark.parametrize("prompt", [*ODD_PROMPTS.values(), "长" * 100], ids=[*ODD_PROMPTS, "longest"])
    def test_all_there(self, prompt: str) -> None:
        settings = checked(prompt=prompt, strategy="draft_model", temperature=0.3, chat=False, seed=5)
        assert self.read(settings.query()) == (settings, [])

    @pytest.mark.parametrize("query", ["", "__theme=dark", "elsewhere", "&&=&", None, 5, ["prompt=a"]])
    def test_nothing_there(self, query: Any) -> None:
        assert self.read(query) == (None, [])

    def test_what_it_says_wrongly_is_named_and_the_rest_taken(self) -> None:
        settings, refused = self.read(f"prompt={'a' * 101}&seed=-1&temperature=0.5&other=1")
        assert settings == checked(**self.KNOWN, temperature=0.5)
        assert [each.partition(";")[0] for each in refused] == [
            "The prompt has 101 characters",
            f"The seed must be a number from 0 to {2**31 - 1:g}, got '-1'.",
        ]

    def test_a_strategy_is_looked_at_with_the_links_model(self) -> None:
        assert self.read("strategy=draft_model&family=own")[1] == []
        settings, (refused,) = self.read("strategy=draft_model&family=alone")
        assert "no draft model for 'alone'" in refused
        assert settings == checked(**self.KNOWN, family="alone")

    @pytest.mark.parametrize(
        "query", ["prompt=%ff%fe&seed=1", "prompt=\ud83d&seed=1", "prompt=%&seed=1", "prompt=&seed=1"]
    )
    def test_no_text(self, query: str) -> None:
        settings, _ = self.read(query)
        assert settings is not None
        assert settings.seed == 1
        settings.prompt.encode()


class TestCode:
    """The lines of the page run, and say what its right pane says."""

    @pytest.fixture(autouse=True)
    def _quick(self, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Load what the lines load once."""
        for name in ("AutoModelForCausalLM", "AutoTokenizer"):
            loader = getattr(transformers, name)
            monkeypatch.setattr(loader, "from_pretrained", cache(loader.from_pretrained))
        yield
        hf_specdec.disable()

    @pytest.mark.parametrize("chat", [True, False])
    @pytest.mark.parametrize("temperature", [0.0, 0.7654321])
    def test_runs(
        self, family: Family, folders: tuple[Path, Path], temperature: float, chat: bool,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        given = {"temperature": temperature, "chat": chat, "max_new_tokens": 8, "seed": 7}
        given["prompt"] = "'quoted' \"twice\" \\ and\nlines, quoted"
        found = recorded(family, **given, strategy="draft_model")
        ids = [token.id for token in found.on.tokens]  # with each strategy, see test_recording.py
        for strategy in STRATEGIES:
            for length in (0, 3):
                settings = RunSettings(**found.settings | {"strategy": strategy, "num_draft_tokens": length})
                names: dict[str, Any] = {}
                exec(compile(settings.code(str(folders[0]), str(folders[1]), "float32"), "page", "exec"), names)
                begin = names["inputs"]["input_ids"].shape[1]
                assert names["output"][0, begin:].tolist() == ids, (strategy, length)
                text = names["tokenizer"].decode(names["output"][0], skip_special_tokens=True)
                assert capsys.readouterr().out == text + "\n"
                stats = hf_specdec.last_stats(names["model"])
                assert stats is not None
                assert stats.drafter == ("hybrid" if strategy == "auto" else strategy)
                assert stats.fallback_reason is None
                if length and strategy == "draft_model":  # it always has a draft, so its length shows
                    assert max(row for row, count in enumerate(stats.drafted_at, 1) if count) == length

    @pytest.mark.parametrize(
        ("given", "draft", "argument"),
        [
            ({}, None, "True"),
            ({}, "D", "hf_specdec.SpecConfig(draft_model='D')"),
            ({"strategy": "recycling"}, "D", "'recycling'"),
            ({"strategy": "draft_model"}, "D", "hf_specdec.SpecConfig(drafter='draft_model', draft_model='D')"),
            ({"num_draft_tokens": 4}, None, 'hf_specdec.SpecConfig(num_draft_tokens=4, draft_length="fixed")'),
            ({"temperature": 0.5, "seed": 3}, None, 'hf_specdec.SpecConfig(verification="coupled", seed=3)'),
        ],
    )
    def test_argument(self, given: dict[str, Any], draft: str | None, argument: str) -> None:
        code = checked(**given).code("T", draft, "bfloat16")
        assert f"speculative={argument})" in code
        assert code.count("'T'") == 2
        assert 'dtype="bfloat16"' in code

    def test_temperature_is_whole(self) -> None:
        assert "do_sample=True, temperature=0.123456789, top_k=0, top_p=1.0" in checked(temperature=0.123456789).code(
            "T", None, "f"
        )
