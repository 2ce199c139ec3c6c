"""The report as one HTML file: nothing is loaded from elsewhere, and every text in it is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from ..tools.drawing import has_matplotlib
from .tables import Section, code_line, conditions, headline, notes, reasons, sections


class Html(str):
    """Markup; any other text is escaped on its way into the page."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str) -> Html:
    """An element.

    Args:
        name: Its name.
        children: Markup (`Html`), or texts, which are escaped.
        **attributes: Their values are escaped; `class_` is `class`.
    """
    inner = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{inner}</{name}>")


def to_html(report: Mapping[str, Any]) -> str:
    """Write the report as a page.

    Args:
        report: From `report.assemble`.
    """
    figures: Mapping[str, str] = {}
    if has_matplotlib():
        from .figures import draw_figures

        figures = draw_figures(report)
    title = f"Check of {report['target']['name']}"
    code = code_line(report)
    remarks = (
        notes(report)
        if figures
        else [*notes(report), "No pictures: they need matplotlib (pip install 'hf-specdec[check]')."]
    )
    verdict = tag(
        "header",
        tag("p", title, class_="title"),
        tag("h1", headline(report)),
        tag("ul", *(tag("li", reason) for reason in reasons(report))),
        *([tag("p", "Pass to ", tag("code", "generate"), ": ", tag("code", code))] if code else []),
        class_=_mood(report),
    )
    body = tag(
        "main",
        verdict,
        *([tag("ul", *(tag("li", note) for note in remarks), class_="notes")] if remarks else []),
        *(_section(section, figures) for section in sections(report)),
        tag("footer", conditions(report)),
    )
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        Html(
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        ),
        tag("title", title),
        tag("style", Html(files(__package__).joinpath("report.css").read_text(encoding="utf-8"))),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', body), lang='en')}\n"


def _section(section: Section, figures: Mapping[str, str]) -> Html:
    picture = figures.get(section.figure or "")
    return tag(
        "section",
        tag("h2", section.title),
        *([tag("figure", Html(picture))] if picture else []),
        _table(section),
        *(tag("p", note, class_="remark") for note in section.notes),
        **({} if picture else {"class_": "wide"}),
    )


def _table(section: Section) -> Html:
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in section.columns)))
    wordy = len(section.columns) == 2 or any(len(cell) > 30 for row in section.rows for cell in row)
    return tag(
        "div",
        tag(
            "table",
            *([head] if any(section.columns) else []),
            tag("tbody", *(_row(row) for row in section.rows)),
            class_="words" if wordy else "numbers",
        ),
        class_="table",
    )


def _row(row: Iterable[str]) -> Html:
    first, *others = row
    return tag("tr", tag("th", first, scope="row"), *(tag("td", cell, **_marked(cell)) for cell in others))


def _marked(cell: str) -> dict[str, str]:
    return {"class_": "bad"} if cell == "FAIL" else {}


def _mood(report: Mapping[str, Any]) -> str:
    """The colour of the verdict."""
    if report["interrupted"] or report["static_only"]:
        return "verdict"
    if not report["passed"]:
        return "verdict bad"
    return "verdict off" if report["recommendation"]["verdict"] == "off" else "verdict good"
