"""Forwards of fixed shape: replayed from CUDA graphs, or compiled; eager wherever that isn't possible.

A small forward on a GPU waits for Python, which launches its kernels one by one. A graph launches them all at once, and
the whole draft of a draft model with them. The price is that shapes are fixed: widths and slots are rounded up, with
dummies that nothing looks at.
"""

from __future__ import annotations

import logging
import threading
import time
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from . import graphs
from .cache import RowCache, upload
from .clock import standing_still
from .graphs import SMALL, WIDTHS, Lease, Pool, bucket, tall, wide
from .masks import Branches
from .products import Way
from .tree import Tree


if TYPE_CHECKING:
    from .forward import RowModel

logger = logging.getLogger(__name__)

T = TypeVar("T")
COMPILER = "inductor"
_local = threading.local()
_told: set[str] = set()


class Tally(NamedTuple):
    """What a thread has done so far.

    Attributes:
        replays: Graphs replayed.
        compiled: Forwards that ran compiled code.
        seconds: Seconds spent on capturing and compiling.
    """

    replays: int = 0
    compiled: int = 0
    seconds: float = 0.0

    def since(self, other: Tally) -> Tally:
        """What was done after another tally was taken."""
        return Tally(self.replays - other.replays, self.compiled - other.compiled, self.seconds - other.seconds)


def tally() -> Tally:
    """What this thread has done so far."""
    return getattr(_local, "tally", Tally())


def _count(replays: int = 0, compiled: int = 0, seconds: float = 0.0) -> None:
    before = tally()
    _local.tally = Tally(before.replays + replays, before.compiled + compiled, before.seconds + seconds)


@dataclass
class Compiled:
    """A model's compiled forward.

    Attributes:
        function: `RowModel.at`, compiled.
        shapes: Kinds of shapes that it was called with; each may compile.
        reason: Why it is not used any more, or `None`.
    """

    function: Callable[..., Tensor]
    shapes: set[Hashable] = field(default_factory=set)
    reason: str | None = None


_compiled: weakref.WeakKeyDictionary[nn.Module, Compiled] = weakref.WeakKeyDictionary()


class FastForward:
    """The fixed-shape forwards of one generation.

    Attributes:
        pool: The model's captured forwards, or `None` where nothing is captured.
        compiled: The model's compiled forward, or `None`.
        obstacle: Why nothing is captured in this generation, though it may be in another.
        lease: The buffers that this generation has.
    """

    def __init__(
        self, pool: Pool | None, backend: Any, compiled: Compiled | None, obstacle: str | None = None
    ) -> None:
        self.pool, self.backend, self.compiled, self.obstacle = pool, backend, compiled, obstacle
        self.lease: Lease | None = None
        self._return: weakref.finalize[Any, Any] | None = None
        self._view: RowCache | None = None

    @classmethod
    def of(cls, model: Any, function: Callable[..., Tensor] | None, shared: bool = False) -> FastForward | None:
        """The fast forwards of a model, or `None` if there are none: on a CPU, with nothing to compile.

        Args:
            model: The model.
            function: `RowModel.at`, if it is to be compiled.
            shared: Whether other processes take part in the model's forwards.
        """
        backend = graphs.backend_for(model.device)
        if backend is None and function is None:
            return None
        pool, obstacle = None, None
        if shared:
            obstacle = "it is neither captured nor compiled where other processes take part in it"
        elif backend is not None and torch.is_autocast_enabled(model.device.type):
            obstacle = "it isn't captured under autocast, whose copies of the weights are freed when it ends"
        elif backend is not None:
            try:
                pool = graphs.pool_of(model)
            except Exception as error:
                obstacle = _why("captured", error)
        if obstacle is not None:
            _tell(obstacle)
        if function is None or shared:
            return cls(pool, backend, None, obstacle)
        if model not in _compiled:
            _compiled[model] = Compiled(torch.compile(_copied(function), backend=COMPILER))
        return cls(pool, backend, _compiled[model], obstacle)

    @property
    def reason(self) -> str | None:
        """Why forwards run eagerly that were asked to be fast."""
        reasons = [self.obstacle, *(each.reason for each in (self.pool, self.compiled) if each is not None)]
        return "; ".join(each for each in reasons if each is not None) or None

    @property
    def captures(self) -> bool:
        """Whether forwards are captured once that pays."""
        return self.pool is not None and self.pool.reason is None

    @property
    def compiles(self) -> bool:
        """Whether forwards run compiled code, captured or not."""
        return self.compiled is not None and self.compiled.reason is None

    def block(self, runner: RowModel, tokens: Tensor, tree: Tree | None) -> Tensor | None:
        """Logits of a block `[rows, n, vocabulary]`, or `None`: run it eagerly.

        Args:
            runner: The model with its cache.
            tokens: The block, int64 `[rows, n]`.
            tree: The shape of the block, if it is more than a chain.
        """
        if not runner.cache.capacity or tokens.shape[1] > WIDTHS[-1]:
            return None  # the prompt
        branches = None if tree is None else Branches(tree.depth, tree.ancestors)
        if self.captures:
            return self._replayed_block(runner, tokens, branches)
        if self.compiles:
            return self._compiled_block(runner, tokens, branches)
        return None

    def chain(
        self, runner: RowModel, pending: Sequence[Sequence[int]], length: int, vocabulary: int
    ) -> tuple[Tensor, Tensor] | None:
        """Draft greedily, all steps in one replay; or `None`: draft step by step.

        Args:
            runner: The draft model with its cache.
            pending: One or two tokens of each row that the cache hasn't seen.
            length: Tokens to draft.
            vocabulary: Ids that may be drafted.

        Returns:
            Tokens and their logits, both `[rows, length]`. The cache holds them, all but the last, not yet committed.
        """
        if not self.captures or length > WIDTHS[-1] or not runner.cache.capacity:
            return None
        steps, cache = wide(length), runner.cache
        lease = self._leased(runner, max(cache.lengths) + steps + 1)
        stop = bucket(max(cache.lengths) + steps + 1)
        shape = ("chain", steps, stop, vocabulary, self.compiles)
        if lease is None or not lease.pays(shape):
            return None
        fed = [len(tokens) for tokens in pending]
        ones = [1] * (lease.rows - len(fed))
        table = upload([[*tokens, tokens[-1]][:2] for tokens in pending], lease.tokens.device)
        lease.fill(cache.lengths, table)
        lease.fed.copy_(upload([*fed, *ones], lease.fed.device), non_blocking=True)
        forward, ways = self._function(runner), [_way(runner, tokens * lease.rows) for tokens in (2, 1)]

        def body() -> None:
            """Feed what is pending, then each token behind the other."""
            logits = forward(lease.tokens[:, :2], lease.lengths, lease.cache, lease.ladder[:stop], None, ways[0])
            last = logits.gather(1, (lease.fed - 1)[:, None, None].expand(-1, 1, logits.shape[2]))
            lengths, drafted = lease.lengths + lease.fed, []
            for step in range(steps):
                highest, token = last[:, :, :vocabulary].max(-1)  # NaN counts as highest
                drafted.append((token, highest))
                if step < steps - 1:
                    last = forward(token, lengths, lease.cache, lease.ladder[:stop], None, ways[1])
                    lengths = lengths + 1
            for name, parts in zip(("tokens", "highest"), zip(*drafted, strict=True), strict=True):
                lease.hold(name, torch.cat(parts, 1), WIDTHS[-1])

        if not self._replay(lease, shape, body):
            return None
        tokens, highest = (lease.outputs[name][: len(fed), :length].clone() for name in ("tokens", "highest"))
        return tokens, highest

    def _replayed_block(self, runner: RowModel, tokens: Tensor, branches: Branches | None) -> Tensor | None:
        rows, width = tokens.shape
        padded, longest = wide(width), max(runner.cache.lengths)
        lease, stop = self._leased(runner, longest + padded), bucket(longest + padded)
        shape = ("block", padded, stop, branches is not None, self.compiles)
        if lease is None or not lease.pays(shape):
            return None
        lease.fill(runner.cache.lengths, tokens, branches)
        forward, way = self._function(runner), _way(runner, padded * lease.rows)
        most = SMALL if padded <= SMALL else WIDTHS[-1]
        depth, ancestors = lease.branches
        static = None if branches is None else Branches(depth[:, :padded], ancestors[:, :padded, :padded])

        def body() -> None:
            """One forward over the buffers."""
            block = lease.tokens[:, :padded]
            logits = forward(block, lease.lengths, lease.cache, lease.ladder[:stop], static, way)
            lease.hold(f"logits {most}", logits, most)

        if not self._replay(lease, shape, body):
            return None
        return lease.outputs[f"logits {most}"][:rows, :width].clone()  # the next replay overwrites them

    def _replay(self, lease: Lease, shape: Hashable, body: Callable[[], None]) -> bool:
        """Replay a shape's graph, captured now if it isn't yet; False if that failed."""
        try:
            if shape not in lease.graphs:
                began = time.perf_counter()
                with standing_still():
                    _relieved(lambda: lease.capture(shape, body, watched=not self.compiles))
                _count(seconds=time.perf_counter() - began)
            lease.replay(shape)
        except Exception as error:
            if self.compiles and not _out_of_memory(error):  # the next time it is captured as it is
                self._give_up(self.compiled, "compiled", error)
            else:
                self._give_up(self.pool, "captured", error)
            return False
        _count(replays=1)
        return True

    def _leased(self, runner: RowModel, slots: int) -> Lease | None:
        """The buffers for the runner's rows with room for `slots` slots; the cache is in them from then on."""
        cache, lease, pool = runner.cache, self.lease, self.pool
        rows = len(cache.lengths)
        if (
            lease is not None
            and lease.rows // 2 < rows <= lease.rows
            and slots <= lease.capacity
            and cache.lies_in(lease.cache)
        ):
            return lease
        assert pool is not None
        room = cache.capacity if slots <= cache.capacity else max(slots, 2 * cache.capacity)
        try:
            lease = _relieved(lambda: pool.lend(cache, tall(rows), room, runner.device, self.backend))
        except Exception as error:  # no memory for it
            self._give_up(pool, "captured", error)
            return None
        if self.compiled is not None:
            _vary_states(lease.cache)
        cache.move_to(lease.cache)
        if self._return is not None:
            self._return()
            pool.take_back()
        self.lease, self._return = lease, weakref.finalize(self, pool.returned.append, lease)
        self._return.atexit = False
        return lease

    def _function(self, runner: RowModel) -> Callable[..., Tensor]:
        """`runner.at`, compiled if that was asked for."""
        if self.compiled is None or not self.compiles:
            return runner.at
        compiled = self.compiled.function

        def forward(
            tokens: Tensor,
            lengths: Tensor,
            cache: RowCache,
            ladder: Tensor,
            branches: Branches | None,
            way: Way | None,
        ) -> Tensor:
            for each in (tokens, lengths, ladder, *(branches or ())):
                _vary(each, *range(each.ndim))
            return compiled(runner, tokens, lengths, cache, ladder, branches, way)

        return forward

    def _compiled_block(self, runner: RowModel, tokens: Tensor, branches: Branches | None) -> Tensor | None:
        cache, compiled, (rows, width) = runner.cache, self.compiled, tokens.shape
        assert compiled is not None
        stop = max(cache.lengths) + width
        cache.make_room(stop)
        if self._view is None or not cache.lies_in(self._view) or len(self._view.lengths) != rows:
            self._view = cache.view()
            _vary_states(self._view)
        lengths, ladder = upload(cache.lengths, runner.device), torch.arange(stop, device=runner.device)
        way = _way(runner, tokens.numel())
        kind = (rows == 1, width == 1, branches is not None, way)
        forward, arguments = self._function(runner), (tokens, lengths, self._view, ladder, branches, way)
        try:
            if kind in compiled.shapes:
                logits = forward(*arguments)
            else:
                began = time.perf_counter()
                with standing_still():
                    forward(*arguments)
                _count(seconds=time.perf_counter() - began)
                compiled.shapes.add(kind)
                logits = forward(*arguments)  # once more on the running clock; it writes the same keys and values
        except Exception as error:
            self._give_up(compiled, "compiled", error)
            return None
        _count(compiled=1)
        return logits

    def _give_up(self, what: Pool | Compiled | None, how: str, error: Exception) -> None:
        """Run the model eagerly from now on, or to the end of the generation if memory ran out; say why, once."""
        assert what is not None
        if what is self.pool and _out_of_memory(error):
            self.pool, self.obstacle = None, _why(how, error)
            _tell(self.obstacle)
        else:
            what.reason = _why(how, error)
            logger.warning("the model's forward runs eagerly: %s", what.reason)


def _relieved(make: Callable[[], T]) -> T:
    """Make something, once more with the memory of all idle leases if there wasn't enough."""
    try:
        return make()
    except Exception as error:
        if not _out_of_memory(error):
            raise
    graphs.relieve()
    return make()


def _out_of_memory(error: BaseException) -> bool:
    """Whether that is what went wrong; the end of a broken capture raises an error of its own."""
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError)


def _why(how: str, error: Exception) -> str:
    cause = getattr(error, "inner_exception", None) or error.__context__ or error  # what went wrong first
    text = str(cause).strip().partition("\n")[0]
    return f"it can't be {how}: {type(cause).__name__}: {text}"


def _tell(reason: str) -> None:
    """Say why a generation runs eagerly, once a process."""
    if reason not in _told:
        _told.add(reason)
        logger.warning("the model's forward runs eagerly: %s", reason)


def _copied(function: Any) -> Callable[..., Tensor]:
    """The function with a code object of its own: what torch compiles, and how much of it, goes by code object."""
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


def _vary(tensor: Tensor, *dims: int) -> None:
    """Tell torch that these sizes will change; what has size 1 gets code of its own."""
    for dim in dims:
        if tensor.shape[dim] > 1:
            torch._dynamo.mark_dynamic(tensor, dim)


def _vary_states(cache: RowCache) -> None:
    """The same for keys and values: rows and slots."""
    for layer in cache.layers:
        _vary(layer.keys, 0, 2)
        _vary(layer.values, 0, 2)


def _way(runner: RowModel, tokens: int) -> Way | None:
    """How a lean forward multiplies: chosen before it is captured or compiled, as choosing may mean measuring."""
    return None if runner.lean is None else runner.lean.products.way(tokens)
