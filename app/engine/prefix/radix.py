"""Many remembered sequences that share what they have in common: the prefix cache for many users.

Knows: ids, layer caches as `LayerKV`, what a prompt may reuse. Must not know: tensors, models,
requests; how the tree is kept (tree.py).

A sequence runs on caches of its own, contiguous ones. They begin as a copy of what is cached; or
they are the cached ones themselves, when the prompt only goes on where these end: the single chat
never copies. What a sequence has computed serves others as soon as it says `reached`; what it
shares with them is held by the tree once when it ends. While it runs, only a prefix which others
share as well is held twice.
"""

from collections.abc import Callable, Sequence
from itertools import compress, groupby
from typing import Generic

from app.core.jobs import Miss
from app.core.ports import Layer
from app.engine.prefix.checkpoints import pauses
from app.engine.prefix.found import Found, find
from app.engine.prefix.stores import Node, Store
from app.engine.prefix.tree import Tree


def _nothing(_: object) -> None:
    """Layers that are real as soon as they are written have nothing to settle."""


class RadixPrefixCache(Generic[Layer]):
    """make_kv: fresh layer caches. settle: told of layers that were copied, so that they are made
    real before anybody writes to what they were copied from. grid: prefixes end at multiples of it
    only (see `--exact`). checkpoint_every: positions of a prompt between two checkpoints, for
    layers that cannot be divided. limit: bytes to keep at most; None leaves it to the caller."""

    def __init__(
        self,
        make_kv: Callable[[], Sequence[Layer]],
        *,
        settle: Callable[[Sequence[Layer]], None] = _nothing,
        grid: int = 1,
        checkpoint_every: int = 8192,
        limit: int | None = None,
    ) -> None:
        assert grid > 0
        assert checkpoint_every > 0
        self._make_kv = make_kv
        self._settle = settle
        self._grid = grid
        self._checkpoint_every = checkpoint_every
        self._limit = limit
        self._divisible = [layer.divisible for layer in make_kv()]
        self._whole = [not divisible for divisible in self._divisible]
        self._tree = Tree[Layer](settle, whole=any(self._whole))
        self._evictions = 0

    def begin(
        self, ids: Sequence[int], *, marks: Sequence[int] = (), reuse: bool = True, room: int = 0
    ) -> "RadixLease[Layer]":
        assert ids, "an empty prompt has nothing to evaluate"
        ids = tuple(ids)
        found: Found[Layer] = find(self._tree, ids, grid=self._grid) if reuse else Found()
        miss = None
        if found.cached < self._floor(len(ids) - 1):
            miss = found.miss() if reuse else Miss(at=0, reason="unwanted")
        self._tree.touch(found.path)
        stops = self._pauses(len(ids), marks, found)
        kv, store = self._borrow(found, room=max(room, len(ids) + 1))
        return RadixLease(self, kv, store, cached=found.cached, miss=miss, pauses=stops)

    @property
    def lends(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    @property
    def evictions(self) -> int:
        return self._evictions

    def shrink(self, count: int) -> int:
        before = self.nbytes
        self._evictions += self._tree.evict(count)
        return before - self.nbytes

    def clear(self) -> None:
        self._tree.evict(self.nbytes)

    def check(self) -> None:
        self._tree.check()

    def reached(
        self, store: Store[Layer], kv: Sequence[Layer], ids: Sequence[int], *, pause: bool
    ) -> None:
        """Called by a lease. pause: whether the whole layers' state is wanted here."""
        assert all(layer.offset >= len(ids) for layer in kv)
        length = self._floor(len(ids))
        if length == 0:
            return
        path = self._tree.extend(tuple(ids[:length]), store)
        if not pause:
            return
        node = self._tree.node_at(path, length)
        if node.checkpoint is None:
            state = tuple(layer.copy() for layer in compress(kv, self._whole))
            self._settle(state)
            self._tree.attach(node, state)

    def remember(
        self, store: Store[Layer], kv: Sequence[Layer], ids: Sequence[int], *, keep: int
    ) -> None:
        """Called by a lease that ends."""
        # layers may differ after a step that failed half-way: only what all of them got counts
        offset = min(min((layer.offset for layer in kv), default=0), len(ids))
        # what others may have been served already stays
        held = max((node.end for node in store.nodes), default=0)
        wanted = self._floor(min(offset, max(keep, held)))
        # where a layer cannot be cut to what was wanted, remember all: longer, but as true
        lengths = (wanted, offset) if self._grid == 1 else (wanted,)
        state = tuple(compress(kv, self._whole))
        for length in lengths:
            if length > 0 and all(layer.can_trim(layer.offset - length) for layer in state):
                path = self._tree.extend(tuple(ids[:length]), store)
                if state:
                    self._checkpoint(self._tree.node_at(path, length), state)
                break
        self._tree.take_back(store)
        if self._limit is not None and self.nbytes > self._limit:
            self.shrink(self.nbytes - self._limit)

    def forget(self, store: Store[Layer]) -> None:
        """Called by a lease whose caches are in doubt."""
        self._tree.drop(store)

    def _checkpoint(self, node: Node[Layer], state: tuple[Layer, ...]) -> None:
        for layer in state:
            layer.trim(layer.offset - node.end)
        if node.checkpoint is None:
            self._tree.attach(node, state)

    def _borrow(self, found: Found[Layer], *, room: int) -> tuple[Sequence[Layer], Store[Layer]]:
        """Caches that stand for what is cached of a prompt, and the live store behind them."""
        store = found.continuable()
        if store is None:
            return self._copy(found, room)
        return self._lend(store, found, room), store

    def _lend(self, store: Store[Layer], found: Found[Layer], room: int) -> Sequence[Layer]:
        """An idle store itself goes on loan. Its nodes stay where they are, and serve others."""
        whole = found.checkpoint.checkpoint_at(found.cached) if found.checkpoint else ()
        for node in found.own:
            self._tree.cut_back(node, found.cached)
        self._tree.lend(store)
        self._tree.fit()
        kv = self._in_order(store.layers, whole)
        try:
            store.trim(found.cached)
            _reserve(store, kv, room)
            self._settle(kv)
        except BaseException:
            self._tree.drop(store)
            raise
        return kv

    def _copy(self, found: Found[Layer], room: int) -> tuple[Sequence[Layer], Store[Layer]]:
        """Fresh caches with a copy of the path. What nobody else goes through is backed by the copy
        from now on, so that no conversation is held twice while it goes on."""
        fresh, cached = self._make_kv(), found.cached
        store = Store(list(compress(fresh, self._divisible)))
        whole = tuple(compress(fresh, self._whole))
        if found.checkpoint is not None:
            whole = found.checkpoint.checkpoint_at(cached)
        kv = self._in_order(store.layers, whole)
        _reserve(store, kv, room)
        served = [node for node in found.path if node.start < cached]
        for donor, nodes in groupby(served, key=lambda node: node.store):
            held = list(nodes)
            start, end = held[0].start - donor.base, min(held[-1].end, cached) - donor.base
            for layer, lent in zip(store.layers, donor.layers, strict=True):
                layer.append(lent, start, end)
        if cached:
            self._settle(kv)
        self._tree.lend(store)
        for node in found.own:
            self._tree.cut_back(node, cached)
            if node.start < cached:
                self._tree.back(node, store)
        self._tree.fit()
        return kv, store

    def _in_order(self, divisible: Sequence[Layer], whole: Sequence[Layer]) -> tuple[Layer, ...]:
        """The layers of both kinds in the order of the model."""
        kinds = {True: iter(divisible), False: iter(whole)}
        return tuple(next(kinds[divisible]) for divisible in self._divisible)

    def _pauses(self, length: int, marks: Sequence[int], found: Found[Layer]) -> Sequence[int]:
        if not self._tree.whole:
            return ()
        return pauses(
            length,
            marks,
            cached=found.cached,
            usable=found.usable,
            grid=self._grid,
            every=self._checkpoint_every,
        )

    def _floor(self, length: int) -> int:
        return length - length % self._grid


class RadixLease(Generic[Layer]):
    """Layer caches on loan to one sequence; ends once."""

    def __init__(
        self,
        cache: RadixPrefixCache[Layer],
        kv: Sequence[Layer],
        store: Store[Layer],
        *,
        cached: int,
        miss: Miss | None,
        pauses: Sequence[int],
    ) -> None:
        self._cache = cache
        self._store: Store[Layer] | None = store
        self.kv = kv
        self.cached = cached
        self.miss = miss
        self.pauses = pauses

    def reached(self, ids: Sequence[int]) -> None:
        assert self._store is not None, "the lease has ended"
        self._cache.reached(self._store, self.kv, ids, pause=len(ids) in self.pauses)

    def commit(self, ids: Sequence[int], *, keep: int) -> None:
        store, kv = self._end()
        self._cache.remember(store, kv, ids, keep=keep)

    def discard(self) -> None:
        store, _ = self._end()
        self._cache.forget(store)

    def _end(self) -> tuple[Store[Layer], Sequence[Layer]]:
        assert self._store is not None, "the lease has ended"
        store, kv = self._store, self.kv
        self._store, self.kv = None, ()
        return store, kv


def _reserve(store: Store[Layer], kv: Sequence[Layer], room: int) -> None:
    store.room = max(store.room, room)
    for layer in kv:
        layer.reserve(room)
