"""A key/value cache with one write offset per row, so that rolling back costs one integer per row.

Row `b` owns slots `0 … length_b - 1`; a forward writes token `j` of its block at slot `length_b + j`; a rejected token
is forgotten by not moving `length_b` past it, and is overwritten by the next block. Slots are positions: there is no
padding inside a row, and sliding-window layers keep the full buffer and use a windowed mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from . import compat


@dataclass
class Offsets:
    """Where a cache's forwards write. The cache shares it with its layers: were these to refer to the cache, keys and
    values would wait for the garbage collector.

    Attributes:
        lengths: Committed slots of each row, on the host.
        reserve: Slots to allocate at first; the buffers double when they are full.
        most: Slots that will be needed at most, where doubling ends; `None` where that isn't known.
        stop: One past the last slot that the current forward writes.
        uniform: The offset that all rows have in the current forward, or `None`: then `slots` has each token's.
        rows: The row of every token, int64 `[rows, n]`.
        slots: The slot of every token, int64 `[rows, n]`.
    """

    lengths: list[int]
    reserve: int
    stop: int = 0
    uniform: int | None = 0
    most: int | None = None
    rows: Tensor = field(default_factory=lambda: torch.empty(0))
    slots: Tensor = field(default_factory=lambda: torch.empty(0))


class RowLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer: buffers `[rows, heads, capacity, head_dim]`, written at the cache's offsets."""

    is_initialized: bool

    def __init__(self, offsets: Offsets) -> None:
        super().__init__()
        self.offsets = offsets

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write a block `[rows, heads, n, head_dim]` and return every slot that the block may attend to."""
        offsets = self.offsets
        stop = offsets.stop
        if not self.is_initialized or stop > self.keys.shape[2]:
            self._reserve(key_states, value_states, stop)
        if offsets.uniform is not None:
            width = key_states.shape[2]
            self.keys.narrow(2, offsets.uniform, width).copy_(key_states)
            self.values.narrow(2, offsets.uniform, width).copy_(value_states)
        else:
            rows, slots = offsets.rows, offsets.slots
            if self.keys.device != slots.device:
                rows, slots = rows.to(self.keys.device), slots.to(self.keys.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys.narrow(2, 0, stop), self.values.narrow(2, 0, stop)

    def _reserve(self, keys: Tensor, values: Tensor, slots: int) -> None:
        """Make room for `slots` slots, doubling what is there."""
        if not self.is_initialized:
            capacity = max(slots, self.offsets.reserve)
            self.keys, self.values = _zeros(keys, capacity), _zeros(values, capacity)
            self.device, self.is_initialized = keys.device, True
        else:
            doubled, most = 2 * self.keys.shape[2], self.offsets.most
            capacity = max(slots, doubled if most is None or slots > most else min(doubled, most))
            self.keys, self.values = _grown(self.keys, capacity), _grown(self.values, capacity)

    def get_seq_length(self) -> int:
        """Slots in use by the longest row."""
        return max(self.offsets.lengths, default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots that the coming forward can see, and the first of them."""
        return self.offsets.stop, 0


class RowCache(Cache):  # type: ignore[misc]
    """The cache of a batch whose rows have different lengths.

    Attributes:
        offsets: What its layers know of it.
    """

    def __init__(self, num_layers: int, rows: int, reserve: int = 256) -> None:
        self.offsets = Offsets([0] * rows, reserve)
        super().__init__(layers=[RowLayer(self.offsets) for _ in range(num_layers)])

    @property
    def lengths(self) -> list[int]:
        """Committed slots of each row, on the host."""
        return self.offsets.lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self.offsets.lengths = lengths

    @property
    def stop(self) -> int:
        """One past the last slot that the current forward writes."""
        return self.offsets.stop

    @property
    def uniform(self) -> int | None:
        """The offset that all rows have in the current forward, if they have the same."""
        return self.offsets.uniform

    def begin(self, ladder: Tensor, width: int) -> Tensor:
        """Prepare a forward of `width` tokens a row.

        Args:
            ladder: 0, 1, 2 …, int64 on the device, long enough for every slot.
            width: Tokens a row.

        Returns:
            The slot of every token, which is its position: int64 `[rows, width]`, or `[1, width]` where all rows are
            equally long.
        """
        longest = max(self.lengths)
        self.offsets.stop = longest + width
        self.offsets.uniform = longest if min(self.lengths) == longest else None
        if self.uniform is not None:
            return ladder[None, longest : self.stop]
        return self.begin_at(ladder[: self.stop], upload(self.lengths, ladder.device), width)

    def begin_at(self, ladder: Tensor, lengths: Tensor, width: int) -> Tensor:
        """Prepare a forward whose offsets are on the device: nothing of it depends on `self.lengths`.

        Args:
            ladder: 0, 1, 2 … for every slot that the forward sees; those behind a row's own are masked.
            lengths: Committed slots of each row, int64 `[rows]`.
            width: Tokens a row.

        Returns:
            The slot of every token, int64 `[rows, width]`.
        """
        slots = lengths[:, None] + ladder[:width]
        rows = torch.arange(lengths.shape[0], device=ladder.device)[:, None].expand_as(slots)
        offsets = self.offsets
        offsets.stop, offsets.uniform, offsets.rows, offsets.slots = ladder.shape[0], None, rows, slots
        return slots

    def compact(self, paths: Sequence[Sequence[int]]) -> None:
        """Move the accepted tokens of a tree to where a chain would have them; `commit` follows.

        Args:
            paths: For each row the block indices of its accepted tokens, in order, without the root.
        """
        longest = max(map(len, paths))
        straight = list(range(1, longest + 1))
        if all(list(path) == straight[: len(path)] for path in paths):
            return
        starts = torch.tensor(self.lengths, device="cpu")[:, None]
        target = starts + torch.tensor(straight, device="cpu")
        source = starts + torch.tensor([[*path, *straight[len(path) :]] for path in paths], device="cpu")
        rows = torch.arange(len(paths), device="cpu")[:, None]
        placed: dict[torch.device, tuple[Tensor, ...]] = {}
        for layer in self.layers:
            device = layer.keys.device
            if device not in placed:
                placed[device] = (source.to(device), target.to(device), rows.to(device))
            at, to, of = placed[device]
            layer.keys[of, :, to] = layer.keys[of, :, at]
            layer.values[of, :, to] = layer.values[of, :, at]

    def commit(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[b]` tokens of the last block in row `b`; forget the others."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def roll_back(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` slots of row `b`."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        used = max(self.lengths, default=0)
        for layer in self.layers:
            if layer.is_initialized:
                index = upload(rows, layer.keys.device)
                for states in (layer.keys, layer.values):
                    states[: len(rows), :, :used] = states[index, :, :used]
                layer.keys, layer.values = layer.keys[: len(rows)], layer.values[: len(rows)]

    @property
    def capacity(self) -> int:
        """Slots that the buffers have; 0 before the first forward."""
        return min((layer.keys.shape[2] if layer.is_initialized else 0 for layer in self.layers), default=0)

    def make_room(self, slots: int) -> None:
        """Let the buffers have that many slots."""
        for layer in self.layers:
            if slots > layer.keys.shape[2]:
                layer._reserve(layer.keys, layer.values, slots)

    def alike(self, rows: int, slots: int) -> RowCache:
        """An empty cache for that many rows and slots, with layers like these."""
        other = RowCache(len(self.layers), rows, slots)
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            for name in ("keys", "values"):
                like = getattr(ours, name)
                setattr(theirs, name, like.new_zeros(rows, like.shape[1], slots, like.shape[3]))
            theirs.device, theirs.is_initialized = theirs.keys.device, True
        return other

    def view(self) -> RowCache:
        """A cache over the same buffers that knows nothing of their lengths, for forwards prepared with `begin_at`."""
        other = RowCache(len(self.layers), len(self.lengths), self.offsets.reserve)
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            theirs.keys, theirs.values = ours.keys, ours.values
            theirs.device, theirs.is_initialized = ours.keys.device, True
        return other

    def move_to(self, other: RowCache) -> None:
        """Copy what is committed into the first rows of another cache's buffers, and go on there."""
        rows, used = len(self.lengths), max(self.lengths)
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            for name in ("keys", "values"):
                place = getattr(theirs, name)[:rows]
                place[:, :, :used] = getattr(ours, name)[:, :, :used]
                setattr(ours, name, place)

    def lies_in(self, other: RowCache) -> bool:
        """Whether the keys and values are in another cache's buffers; layers move together."""
        ours: Tensor = self.layers[0].keys
        return ours.data_ptr() == other.layers[0].keys.data_ptr() and ours.shape[2] == other.capacity

    def load(self, cache: Cache, keep: Tensor) -> None:
        """Copy what a user's cache holds.

        Args:
            cache: A `DynamicCache` of `past` tokens a row, all layers full attention.
            keep: Which of its slots are real tokens, bool `[rows, past]`; the others are padding.
        """
        lengths = keep.sum(-1).tolist()
        order = torch.sort(~keep, dim=-1, stable=True).indices[:, : max(lengths)]
        for ours, theirs in zip(self.layers, cache.layers, strict=True):
            index = order.to(theirs.keys.device)[:, None, :, None]
            for name in ("keys", "values"):
                source = getattr(theirs, name)
                packed = source.gather(2, index.expand(-1, source.shape[1], -1, source.shape[3]))
                setattr(ours, name, _grown(packed, max(self.offsets.reserve, packed.shape[2])))
            ours.device, ours.is_initialized = ours.keys.device, True
        self.lengths = lengths

    def take(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """One row's keys and values, `[heads, length, head_dim]` for each layer."""
        length = self.lengths[row]
        return [
            (layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone())
            for layer in self.layers
            if layer.is_initialized
        ]

    def put(self, rows: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        """Hold these rows again, each as `take` gave it."""
        self.lengths = [row[0][0].shape[1] for row in rows]
        places = [torch.arange(length) for length in self.lengths]
        for index, layer in enumerate(self.layers):
            layer.keys, layer.values = (
                torch.stack(
                    [_laid(row[index][part], at, max(self.lengths)) for row, at in zip(rows, places, strict=True)]
                )
                for part in (0, 1)
            )


def fill(cache: Cache, rows: Sequence[Sequence[tuple[Tensor, Tensor]]], slots: Sequence[Tensor], total: int) -> None:
    """Write rows into a user's cache, laid out as Transformers would have.

    Args:
        cache: The `DynamicCache` to fill; what it held is replaced.
        rows: What `RowCache.take` gave for each row of the batch.
        slots: Where each row's tokens go: the slots that are neither padding nor a hole in the mask, int64 `[length]`.
        total: Slots a row in the result; those that no token fills are zero.
    """
    while len(cache.layers) < len(rows[0]):
        cache.layers.append(cache.layer_class_to_replicate())
    for index, layer in enumerate(cache.layers):
        pair = [
            torch.stack([_laid(row[index][part], places, total) for row, places in zip(rows, slots, strict=True)])
            for part in (0, 1)
        ]
        layer.lazy_initialization(*pair)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = total
            pair = [states[:, :, -(layer.sliding_window - 1) :] for states in pair]
        layer.keys, layer.values = pair


def layer_count(config: object) -> tuple[int, str | None]:
    """How many layers a decoder's cache has, or why a `RowCache` can't stand in for it.

    Args:
        config: The decoder's text config.

    Returns:
        The number of layers and `None`, or 0 and the reason.
    """
    layers = DynamicCache(config=config).layers
    other = sorted(
        {type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    )
    if other or not layers:
        return 0, f"its cache has layers of another kind ({', '.join(other) or 'unknown'})"
    return len(layers), None


def unsupported_reason(cache: Any) -> str | None:
    """Why a cache that the user passed can't be continued by a `RowCache`, or `None`."""
    if cache is None:
        return None
    if type(cache) is not DynamicCache or cache.offloading:
        return f"a {type(cache).__name__} was passed (only a plain DynamicCache can be continued)"
    if compat.seq_length(cache) == 0:
        return None
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return "the cache that was passed has sliding-window layers, which have already dropped older tokens"
    return None


def upload(values: Sequence[Any], device: torch.device) -> Tensor:
    """A list of numbers, on the device; where that is a GPU the host doesn't wait for it."""
    pinned = device.type == "cuda"
    return torch.tensor(values, device="cpu", pin_memory=pinned).to(device, non_blocking=pinned)


def _laid(states: Tensor, places: Tensor, total: int) -> Tensor:
    """`[heads, length, head_dim]` placed at these of `total` slots."""
    laid = states.new_zeros(states.shape[0], total, states.shape[2])
    laid[:, places.to(states.device)] = states
    return laid


def _zeros(like: Tensor, slots: int) -> Tensor:
    return like.new_zeros(like.shape[0], like.shape[1], slots, like.shape[3])


def _grown(buffer: Tensor, slots: int) -> Tensor:
    grown = _zeros(buffer, slots)
    grown[:, :, : buffer.shape[2]] = buffer
    return grown
