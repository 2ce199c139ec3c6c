"""Ids to text, token by token: what each token adds, with characters of several tokens kept whole."""

from __future__ import annotations

from typing import Any


UNFINISHED = "\ufffd"  # what a tokenizer makes of half a character


class Detokenizer:
    """The text of a growing list of ids.

    Decoding one id alone loses spaces and halves of characters, decoding all of them each time takes ever longer. So the
    last tokens are decoded with and without the new one, and the difference is its text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.ids = tokenizer, list[int]()
        self._begin = self._end = 0  # the ids between them are known, and decoded again as context

    def add(self, id: int) -> str:
        """Take the next id, and say what it adds to the text."""
        self.ids.append(id)
        before = self._decode(self._begin, self._end)
        after = self._decode(self._begin, len(self.ids))
        if len(after) <= len(before) or after.endswith(UNFINISHED):
            return ""
        self._begin, self._end = self._end, len(self.ids)
        return after[len(before) :]

    def rest(self) -> str:
        """What the last ids add although a character isn't complete."""
        text = self._decode(self._begin, len(self.ids))[len(self._decode(self._begin, self._end)) :]
        self._begin = self._end = len(self.ids)
        return text

    def _decode(self, begin: int, end: int) -> str:
        text: str = self.tokenizer.decode(
            self.ids[begin:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
