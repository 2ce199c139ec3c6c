"""The report as Markdown, for an issue or a pull request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .tables import Section, code_line, conditions, headline, notes, reasons, sections


SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~$&!])")


def to_markdown(report: Mapping[str, Any]) -> str:
    """Write the report as Markdown.

    Args:
        report: From `report.assemble`.
    """
    code = code_line(report)
    parts = [
        f"# {_text(headline(report))}",
        _items(reasons(report)),
        f"Pass to `generate`: `{code}`" if code else "",
        _items(notes(report)),
        *(_section(section) for section in sections(report)),
        _text(conditions(report)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(section: Section) -> str:
    align = [":--", *["--:"] * (len(section.columns) - 1)]
    lines = [_row(section.columns), f"|{'|'.join(align)}|", *map(_row, section.rows)]
    remarks = [_text(note) for note in section.notes]
    return "\n\n".join([f"## {_text(section.title)}", "\n".join(lines), *remarks])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _items(texts: Sequence[str]) -> str:
    return "\n".join(f"- {_text(text)}" for text in texts)


def _text(text: str) -> str:
    """A text that stays what it is: no markup, no line of its own."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))
