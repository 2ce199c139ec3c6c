"""Feeding a streamer as plain decoding does: one `put` a token, all rows at once."""

from __future__ import annotations

from typing import Any

import torch

from .rows import Rows


class Stream:
    """What a streamer has been given."""

    def __init__(self, streamer: Any, rows: Rows) -> None:
        self.streamer, self.rows = streamer, rows
        self.given = 0

    def advance(self) -> None:
        """Give every token of the batch that all rows have."""
        if self.streamer is None:
            return
        rows = self.rows
        batch = range(len(rows.texts))
        ready = min((rows.num_new(row) for row in rows.live), default=max(map(rows.num_new, batch)))
        for position in range(self.given, ready):
            column = [
                rows.texts[row][rows.prompt_lengths[row] + position]
                if position < rows.num_new(row)
                else rows.pad_token
                for row in batch
            ]
            self.streamer.put(torch.tensor(column, device="cpu"))
        self.given = max(self.given, ready)

    def end(self) -> None:
        """Tell the streamer that there is no more."""
        if self.streamer is not None:
            self.streamer.end()
