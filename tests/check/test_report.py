"""The report as tables, page, pictures and Markdown."""

from __future__ import annotations

import json
import re
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest

from hf_specdec.check import html
from hf_specdec.check.figures import draw_figures
from hf_specdec.check.html import Html, tag, to_html
from hf_specdec.check.markdown import to_markdown
from hf_specdec.check.prompts import BadRecord
from hf_specdec.check.report import assemble
from hf_specdec.check.tables import code_line, notes, sections
from hf_specdec.tools.measured import conditions_of
from hf_specdec.tools.suites import BenchPrompt, built_in_suite

from .made_up import HEADER, counts, reading, refused, report, speed, stages


HOSTILE = "<script>alert(1)</script>\"'&|`*$x$ https://evil.example/a.png"
VOID = {"meta", "br", "path", "use", "rect"}


class Page(HTMLParser):
    """Which elements a page has, their attributes, and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def hostile_report() -> dict[str, Any]:
    """A report in which whatever a user's files can set is markup."""
    names = [HOSTILE, "b"]
    rows = [counts(name, number) for name in names for number in range(4)]
    fast = speed(1)
    fast["categories"] = dict(zip(names, fast["categories"].values(), strict=True))
    prompts = tuple(BenchPrompt(f"{HOSTILE} {number}", HOSTILE, HOSTILE) for number in range(8))
    header = HEADER | {"target": HEADER["target"] | {"name": HOSTILE}}
    return assemble(
        header, reading(BadRecord(3, HOSTILE), prompts=prompts), stages(acceptance=rows, **{"speed 1": fast}), {},
        interrupted=False,
    )  # fmt: skip


def test_schema() -> None:
    found = report()
    assert (found["schema_version"], found["kind"], found["passed"], found["interrupted"]) == (1, "check", True, False)
    assert set(found["acceptance"]["families"]) == {"A1", "A2", "B1", "B2"}
    assert found["acceptance"]["per_position"] == pytest.approx([104 / 200, 52 / 104, 32 / 52])
    assert found["speed"]["1"]["on"]["speedup"]["geometric_mean"] == 1.8
    assert set(found["recommendation"]) >= {"verdict", "drafter", "draft_model", "num_draft_tokens", "reasons"}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_explain_reads_it() -> None:
    conditions, origin = conditions_of(report())
    assert conditions["acceptance"] == tuple(report()["acceptance"]["per_position"])
    assert "from a check" in origin


def test_tables() -> None:
    found = {section.title: section for section in sections(report())}
    assert list(found) == [
        "Is it lossless here?", "Does it pay?", "Acceptance by category", "Acceptance by position", "Best fixed draft length, predicted",
        "By length of the output", "By temperature", "What other engines would accept", "Without weights",
    ]  # fmt: skip
    for section in found.values():
        assert all(len(row) == len(section.columns) for row in section.rows)
    assert found["Does it pay?"].rows[0][:4] == ("batch 1", "20.0", "36.0", "1.80×")
    assert found["Acceptance by category"].rows[-1][0] == "all"
    assert found["Acceptance by category"].rows[-1][-1] == "1.80×"


def test_a_refused_speed_is_shown_nowhere() -> None:
    found = report(**{"speed 1": refused(1), "speed 8": refused(8)})
    titles = [section.title for section in sections(found)]
    assert "By length of the output" not in titles
    (pays,) = (section for section in sections(found) if section.title == "Does it pay?")
    assert [row[3] for row in pays.rows] == ["–", "–"]
    assert "no speed-up is given" in " ".join(pays.notes)


def test_notes() -> None:
    assert notes(report()) == []
    built_in = assemble(HEADER, reading(prompts=built_in_suite().prompts), stages(), {}, interrupted=False)
    built_in["prompts"]["file"] = "built-in"
    assert "not yours" in notes(built_in)[0]
    assert "SciPy" in notes(report(sampled=None))[0]


def test_what_to_pass() -> None:
    assert code_line(report()) == "speculative=True"
    found = report()
    found["settings"] |= {"draft": "org/Draft", "drafter": "draft_model"}
    assert code_line(found) == "speculative=hf_specdec.SpecConfig(drafter='draft_model', draft_model='org/Draft')"
    assert code_line(report(**{"speed 1": speed(1, 0.9), "speed 8": speed(8, 0.9)})) is None


@cache
def good_page() -> str:
    return to_html(report())


def test_page_loads_nothing() -> None:
    text = good_page()
    page = Page(text)
    assert page.open == []
    assert not re.search(r"https?:|//[a-z]|@import", text)
    assert "default-src 'none'" in text
    for name, attributes in page.elements:
        assert name not in ("script", "link", "img", "iframe", "object", "embed", "base", "form")
        assert "src" not in attributes
        for key in ("href", "xlink:href"):
            assert (attributes.get(key) or "#").startswith("#")


def test_page_has_figures_with_names_of_their_own() -> None:
    page = Page(good_page())
    pictures = [attributes for name, attributes in page.elements if name == "svg"]
    assert len(pictures) == 6
    assert all(each["role"] == "img" and each["aria-label"] for each in pictures)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = re.findall(r"url\(#([^)]+)\)", " ".join(str(each) for each in page.elements))
    linked = [str(attributes["xlink:href"])[1:] for _, attributes in page.elements if "xlink:href" in attributes]
    assert {*used, *linked} <= set(ids)


def test_figures_take_the_page_s_colours() -> None:
    text = good_page()
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "var(--ink)" in pictures
    assert "var(--line)" in pictures
    assert set(re.findall(r"#[0-9a-f]{6}\b", pictures)) <= {"#000000"}
    for variable in set(re.findall(r"var\((--\w+)\)", text)):
        assert text.count(f"{variable}:") == 3  # light, dark, print


def test_markup_in_a_user_s_texts_stays_text() -> None:
    text = to_html(hostile_report())
    page = Page(text)
    assert page.open == []
    assert "script" not in [name for name, _ in page.elements]
    assert "<script" not in text
    assert any("<script>alert(1)</script>" in each for each in page.texts)
    for _, attributes in page.elements:
        assert not [key for key in attributes if key.startswith("on")]
        assert "evil" not in str(attributes)


def test_markdown() -> None:
    text = to_markdown(report())
    assert text.startswith("# PASS, lossless. Verdict: on.\n")
    assert "| batch 1 | 20.0 | 36.0 | 1.80× |" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_markup_in_markdown_stays_text() -> None:
    text = to_markdown(hostile_report())
    assert "<script" not in text.replace("\\<script", "")
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_page_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "has_matplotlib", lambda: False)
    text = to_html(report())
    assert "<svg" not in text
    assert "they need matplotlib" in text


@pytest.mark.parametrize(
    "missing",
    [["speed 1", "speed 8"], ["acceptance"], ["costs"], ["temperatures"], ["acceptance sampled"], list(stages())],
    ids=str,
)
def test_what_is_missing_is_left_out(missing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "has_matplotlib", lambda: False)
    found = report(interrupted=True, **dict.fromkeys(missing))
    assert "Interrupted" in to_html(found)
    assert "Interrupted" in to_markdown(found)


def test_pictures_of_nothing() -> None:
    assert draw_figures(report(**dict.fromkeys(stages()))) == {}


def test_one_category() -> None:
    rows = [counts("own", number) for number in range(6)]
    found = report(acceptance=rows)
    (table,) = (section for section in sections(found) if section.title == "Acceptance by category")
    assert [row[0] for row in table.rows] == ["own"]


def test_tag() -> None:
    assert tag("p", "<b>", Html("<br>"), class_='a"b') == '<p class="a&quot;b">&lt;b&gt;<br></p>'
