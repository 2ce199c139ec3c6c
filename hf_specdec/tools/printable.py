"""Texts of others (prompts, ids, names, a server's answers) on their way to a terminal."""

from __future__ import annotations


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# C0 and C1 but tab and line feed, and the marks that turn the direction of a text: a terminal acts on all of them
CONTROLS = dict.fromkeys(
    [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], REPLACEMENT
)


def printable(text: str) -> str:
    """The text without what could move a cursor, colour a line or hide a part of it."""
    return text.translate(CONTROLS)
