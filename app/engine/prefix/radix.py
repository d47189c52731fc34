"""Many remembered sequences that share what they have in common: the prefix cache for many users.

Knows: ids, layer caches as `LayerKV`, what a prompt may reuse. Must not know: tensors, models,
requests; how the tree is kept (tree.py).

A sequence runs on caches of its own, contiguous ones. They begin as a copy of what is cached; or
they are the cached ones themselves, when the prompt only goes on where these end: the single chat
never copies. What a sequence has computed serves others as soon as it says `reached`; what it
shares with them is held by the tree once when it ends. While it runs, only a prefix which others
share as well is held twice.

What the radix tree has of a prompt, and what can be done with it.

Layers that cannot be divided: which checkpoint restores them, and where to take new ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from typing import Generic

from app.core.jobs import CacheMiss
from app.core.ports import Layer
from app.engine.prefix.radix_tree import KVStore, RadixNode, RadixTree

# how many of the cached ids a miss tells, where other ones were wanted
_MISS_IDS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch(Generic[Layer]):
    """path: the nodes that a prompt goes through, the last perhaps in part. matched: ids in common
    with them. usable: how many of these may be cached at all. cached: how many are, since every
    layer can be restored there, by that checkpoint if one is needed. exclusive: the nodes at the
    path's end, last first, that nobody but this prompt has a use for."""

    path: Sequence[RadixNode[Layer]] = ()
    matched: int = 0
    usable: int = 0
    cached: int = 0
    checkpoint: RadixNode[Layer] | None = None
    exclusive: Sequence[RadixNode[Layer]] = ()

    def extendable_store(self) -> KVStore[Layer] | None:
        """The idle store that holds all of the path and nothing else, if there is one, and if
        nobody else needs what it holds behind the cached part."""
        if self.cached == 0:
            return None
        store = self.path[0].store
        if store.live or store.end != self.path[-1].end:
            return None
        if any(node.store is not store for node in self.path):
            return None
        if any(node.end > self.cached and node not in self.exclusive for node in self.path):
            return None
        return store

    def explain_miss(self) -> CacheMiss:
        """Why no more is cached. Only when more was asked for."""
        if self.cached < self.usable:
            return CacheMiss(position=self.cached, reason="no_state")
        if self.matched == 0:
            return CacheMiss(position=0, reason="empty")
        last = self.path[-1]
        had = last.ids[self.matched - last.start :]
        if not had and last.children:
            had = max(last.children.values(), key=_last_used).ids
        return CacheMiss(position=self.matched, reason="diverged", cached_ids=had[:_MISS_IDS_SHOWN])


def match_prefix(
    tree: RadixTree[Layer], ids: tuple[int, ...], *, alignment: int
) -> PrefixMatch[Layer]:
    """Changes nothing. Time is that of comparing the ids, however much is cached."""
    path, matched = tree.match(ids)
    # the last id must be evaluated: its hidden state is where the answer starts
    usable = min(matched, len(ids) - 1)
    usable -= usable % alignment
    cached, checkpoint = find_restorable(path, usable) if tree.needs_checkpoints else (usable, None)
    own = _exclusive_nodes(path, matched) if cached == usable > 0 else ()
    return PrefixMatch(
        path=path,
        matched=matched,
        usable=usable,
        cached=cached,
        checkpoint=checkpoint,
        exclusive=own,
    )


def _exclusive_nodes(path: Sequence[RadixNode[Layer]], matched: int) -> Sequence[RadixNode[Layer]]:
    """The nodes at the end of a path which idle and lead to nothing else than the end of a prompt
    that matches them all."""
    own: list[RadixNode[Layer]] = []
    if matched < path[-1].end:
        return own
    for node in reversed(path):
        if node.store.live or len(node.children) > bool(own):
            break
        own.append(node)
    return own


def _last_used(node: RadixNode[Layer]) -> int:
    return node.last_used


# how many nodes behind a prompt's end are asked for a checkpoint that could be cut back to it
_MAX_LATER_NODES = 16


def find_restorable(
    path: Sequence[RadixNode[Layer]], usable: int
) -> tuple[int, RadixNode[Layer] | None]:
    """How many of the first `usable` positions can be restored, and the node whose checkpoint does.

    path: the nodes that go through these positions, and perhaps on. Best is a checkpoint behind
    `usable` that can be cut back to it, as that of a window that did not slide yet; next the last
    one before.
    """
    if usable == 0:
        return 0, None
    behind = [next(node for node in path if node.end >= usable)]
    for node in behind:
        excess = node.end - usable
        if node.checkpoint and all(layer.can_trim(excess) for layer in node.checkpoint):
            return usable, node
        behind += list(node.children.values())[: _MAX_LATER_NODES - len(behind)]
    for node in reversed(path):
        if node.end <= usable and node.checkpoint:
            return node.end, node
    return 0, None


def plan_checkpoints(
    length: int,
    turn_ends: Sequence[int],
    *,
    cached: int,
    usable: int,
    alignment: int,
    interval: int,
) -> tuple[int, ...]:
    """Where prefill of a prompt of `length` ids should leave a checkpoint. Each costs a chunk that
    ends early, and a state in memory until that is evicted. They pay:

    at the first mark, where all conversations with this system prompt part; at the last two, where
    an answer is asked for again, a turn is edited, or a template leaves out what was thought; at
    `usable`, what matched but could not be restored, as a place where prompts were seen to part;
    every so many positions, to bound the loss when no other fits; and on a grid at its last point,
    because the state at the end of the answer cannot be cut back to the grid.
    """
    wanted = {*turn_ends[:1], *turn_ends[-2:], usable, *range(interval, length, interval)}
    if alignment > 1:
        wanted.add(length - 1)
    floors = {position - position % alignment for position in wanted}
    return tuple(sorted(position for position in floors if cached < position < length))


def _no_evaluation(_: object) -> None:
    """Layers that are real as soon as they are written have nothing to settle."""


class RadixPrefixCache(Generic[Layer]):
    """make_kv: fresh layer caches. evaluate: told of layers that were copied, so that they are made
    real before anybody writes to what they were copied from. alignment: prefixes end at multiples
    of it only (see `--exact`). checkpoint_every: positions of a prompt between two checkpoints, for
    layers that cannot be divided. max_bytes: bytes to keep at most; None leaves it to the
    caller."""

    def __init__(
        self,
        make_kv: Callable[[], Sequence[Layer]],
        *,
        evaluate: Callable[[Sequence[Layer]], None] = _no_evaluation,
        alignment: int = 1,
        checkpoint_every: int = 8192,
        max_bytes: int | None = None,
    ) -> None:
        assert alignment > 0
        assert checkpoint_every > 0
        self._make_kv = make_kv
        self._evaluate = evaluate
        self._alignment = alignment
        self._checkpoint_every = checkpoint_every
        self._max_bytes = max_bytes
        self._divisible = [layer.sliceable for layer in make_kv()]
        self._indivisible = [not divisible for divisible in self._divisible]
        self._tree = RadixTree[Layer](evaluate, needs_checkpoints=any(self._indivisible))
        self._evictions = 0

    def begin(
        self,
        ids: Sequence[int],
        *,
        turn_ends: Sequence[int] = (),
        reuse: bool = True,
        reserve_length: int = 0,
    ) -> "RadixLease[Layer]":
        assert ids, "an empty prompt has nothing to evaluate"
        ids = tuple(ids)
        found: PrefixMatch[Layer] = (
            match_prefix(self._tree, ids, alignment=self._alignment) if reuse else PrefixMatch()
        )
        miss = None
        if found.cached < self._align_down(len(ids) - 1):
            miss = found.explain_miss() if reuse else CacheMiss(position=0, reason="unwanted")
        self._tree.touch(found.path)
        stops = self._plan_checkpoints(len(ids), turn_ends, found)
        kv, store = self._lease_layers(found, reserve_length=max(reserve_length, len(ids) + 1))
        return RadixLease(
            self, kv, store, cached=found.cached, miss=miss, checkpoint_positions=stops
        )

    @property
    def shares_live(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    @property
    def evictions(self) -> int:
        return self._evictions

    def evict(self, num_bytes: int) -> int:
        before = self.nbytes
        self._evictions += self._tree.evict(num_bytes)
        return before - self.nbytes

    def clear(self) -> None:
        self._tree.evict(self.nbytes)

    def check(self) -> None:
        self._tree.check()

    def publish(
        self, store: KVStore[Layer], kv: Sequence[Layer], ids: Sequence[int], *, checkpoint: bool
    ) -> None:
        """Called by a lease. checkpoint: whether the whole layers' state is wanted here."""
        assert all(layer.offset >= len(ids) for layer in kv)
        length = self._align_down(len(ids))
        if length == 0:
            return
        path = self._tree.insert(tuple(ids[:length]), store)
        if not checkpoint:
            return
        node = self._tree.split_at(path, length)
        if node.checkpoint is None:
            state = tuple(layer.copy() for layer in compress(kv, self._indivisible))
            self._evaluate(state)
            self._tree.attach_checkpoint(node, state)

    def store_prefix(
        self, store: KVStore[Layer], kv: Sequence[Layer], ids: Sequence[int], *, keep: int
    ) -> None:
        """Called by a lease that ends."""
        # layers may differ after a step that failed half-way: only what all of them got counts
        offset = min(min((layer.offset for layer in kv), default=0), len(ids))
        # what others may have been served already stays
        held = max((node.end for node in store.nodes), default=0)
        wanted = self._align_down(min(offset, max(keep, held)))
        # where a layer cannot be cut to what was wanted, remember all: longer, but as true
        lengths = (wanted, offset) if self._alignment == 1 else (wanted,)
        state = tuple(compress(kv, self._indivisible))
        for length in lengths:
            if length > 0 and all(layer.can_trim(layer.offset - length) for layer in state):
                path = self._tree.insert(tuple(ids[:length]), store)
                if state:
                    self._checkpoint(self._tree.split_at(path, length), state)
                break
        self._tree.mark_idle(store)
        if self._max_bytes is not None and self.nbytes > self._max_bytes:
            self.evict(self.nbytes - self._max_bytes)

    def discard(self, store: KVStore[Layer]) -> None:
        """Called by a lease whose caches are in doubt."""
        self._tree.discard_store(store)

    def _checkpoint(self, node: RadixNode[Layer], state: tuple[Layer, ...]) -> None:
        for layer in state:
            layer.trim(layer.offset - node.end)
        if node.checkpoint is None:
            self._tree.attach_checkpoint(node, state)

    def _lease_layers(
        self, found: PrefixMatch[Layer], *, reserve_length: int
    ) -> tuple[Sequence[Layer], KVStore[Layer]]:
        """Caches that stand for what is cached of a prompt, and the live store behind them."""
        store = found.extendable_store()
        if store is None:
            return self._copy_prefix(found, reserve_length)
        return self._extend_idle_store(store, found, reserve_length), store

    def _extend_idle_store(
        self, store: KVStore[Layer], found: PrefixMatch[Layer], reserve_length: int
    ) -> Sequence[Layer]:
        """An idle store itself goes on loan. Its nodes stay where they are, and serve others."""
        whole = found.checkpoint.checkpoint_at(found.cached) if found.checkpoint else ()
        for node in found.exclusive:
            self._tree.truncate_leaf(node, found.cached)
        self._tree.mark_live(store)
        self._tree.free_unused()
        kv = self._in_model_order(store.layers, whole)
        try:
            store.trim(found.cached)
            _reserve(store, kv, reserve_length)
            self._evaluate(kv)
        except BaseException:
            self._tree.discard_store(store)
            raise
        return kv

    def _copy_prefix(
        self, found: PrefixMatch[Layer], reserve_length: int
    ) -> tuple[Sequence[Layer], KVStore[Layer]]:
        """Fresh caches with a copy of the path. What nobody else goes through is backed by the copy
        from now on, so that no conversation is held twice while it goes on."""
        fresh, cached = self._make_kv(), found.cached
        store = KVStore(list(compress(fresh, self._divisible)))
        whole = tuple(compress(fresh, self._indivisible))
        if found.checkpoint is not None:
            whole = found.checkpoint.checkpoint_at(cached)
        kv = self._in_model_order(store.layers, whole)
        _reserve(store, kv, reserve_length)
        served = [node for node in found.path if node.start < cached]
        for donor, nodes in groupby(served, key=lambda node: node.store):
            held = list(nodes)
            start, end = held[0].start - donor.base, min(held[-1].end, cached) - donor.base
            for layer, lent in zip(store.layers, donor.layers, strict=True):
                layer.append(lent, start, end)
        if cached:
            self._evaluate(kv)
        self._tree.mark_live(store)
        for node in found.exclusive:
            self._tree.truncate_leaf(node, cached)
            if node.start < cached:
                self._tree.assign_store(node, store)
        self._tree.free_unused()
        return kv, store

    def _in_model_order(
        self, divisible: Sequence[Layer], whole: Sequence[Layer]
    ) -> tuple[Layer, ...]:
        """The layers of both kinds in the order of the model."""
        kinds = {True: iter(divisible), False: iter(whole)}
        return tuple(next(kinds[divisible]) for divisible in self._divisible)

    def _plan_checkpoints(
        self, length: int, turn_ends: Sequence[int], found: PrefixMatch[Layer]
    ) -> Sequence[int]:
        if not self._tree.needs_checkpoints:
            return ()
        return plan_checkpoints(
            length,
            turn_ends,
            cached=found.cached,
            usable=found.usable,
            alignment=self._alignment,
            interval=self._checkpoint_every,
        )

    def _align_down(self, length: int) -> int:
        return length - length % self._alignment


class RadixLease(Generic[Layer]):
    """Layer caches on loan to one sequence; ends once."""

    def __init__(
        self,
        cache: RadixPrefixCache[Layer],
        kv: Sequence[Layer],
        store: KVStore[Layer],
        *,
        cached: int,
        miss: CacheMiss | None,
        checkpoint_positions: Sequence[int],
    ) -> None:
        self._cache = cache
        self._store: KVStore[Layer] | None = store
        self.kv = kv
        self.cached = cached
        self.miss = miss
        self.checkpoint_positions = checkpoint_positions

    def publish(self, ids: Sequence[int]) -> None:
        assert self._store is not None, "the lease has ended"
        self._cache.publish(
            self._store, self.kv, ids, checkpoint=len(ids) in self.checkpoint_positions
        )

    def commit(self, ids: Sequence[int], *, keep: int) -> None:
        store, kv = self._end()
        self._cache.store_prefix(store, kv, ids, keep=keep)

    def discard(self) -> None:
        store, _ = self._end()
        self._cache.discard(store)

    def _end(self) -> tuple[KVStore[Layer], Sequence[Layer]]:
        assert self._store is not None, "the lease has ended"
        store, kv = self._store, self.kv
        self._store, self.kv = None, ()
        return store, kv


def _reserve(store: KVStore[Layer], kv: Sequence[Layer], length: int) -> None:
    store.reserved = max(store.reserved, length)
    for layer in kv:
        layer.reserve(length)
