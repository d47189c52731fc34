"""The prefix cache for many users: a radix tree of sequences that share common prefixes.

Knows: token IDs, layer caches as `LayerKV`, the rules for the reuse of a prefix. Must not know:
tensors, models, requests, the structure of the tree (radix_tree.py).

Each sequence runs on its own contiguous caches, which start as a copy of the cached prefix. If the
prompt only continues a cached sequence, the cached layers themselves are used, so a single chat
never copies. `publish` makes the computed prefix of a running sequence available to other
sequences. While a sequence runs, a prefix that it shares with other sequences is stored twice. When
the sequence ends, the tree stores a shared prefix only once.

Layers are either divisible or indivisible. Any range of positions of a divisible layer can be
copied. The state of an indivisible layer is restored from checkpoints. `plan_checkpoints` chooses
the positions of the checkpoints.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, groupby
from typing import Generic

from app.core.jobs import CacheMiss, PrefixSnapshot
from app.engine.prefix.cache import (
    Layer,
    PrefixCacheConfig,
    can_trim_to,
    explain_miss,
    list_stored_lengths,
    usable_length,
)
from app.engine.prefix.radix_tree import (
    KVStore,
    LayerEvaluation,
    RadixNode,
    RadixTree,
)
from models.kv import LayerCache

# turn ends near the end of a prompt that get a checkpoint
_LAST_TURN_ENDS = 5

# further stops near the end of a prompt that get a checkpoint: the beginnings and ends of its last
# four images
_LAST_STOPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch(Generic[Layer]):
    """The match of a prompt with the tree.

    path: the nodes that match the prompt. The last one may match only partially.
    matched: the number of tokens that the prompt shares with the path.
    usable: the number of matched tokens that may be reused.
    cached: the number of tokens that are reused, limited to a position at which every layer can be
        restored.
    checkpoint: the node whose checkpoint is used, if any.
    exclusive: the nodes at the end of the path that only this prompt uses, last node first.
    """

    path: Sequence[RadixNode[Layer]] = ()
    matched: int = 0
    usable: int = 0
    cached: int = 0
    checkpoint: RadixNode[Layer] | None = None
    exclusive: Sequence[RadixNode[Layer]] = ()

    def extendable_store(self) -> KVStore[Layer] | None:
        """Returns the idle store that contains exactly this path, if no other sequence needs its
        content after the cached part, otherwise None."""
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

    def divisible_store(self) -> KVStore[Layer] | None:
        """Returns the idle store that contains the cached part of this path, if less follows in it
        than the cached part, otherwise None."""
        if self.cached == 0:
            return None
        store = self.path[0].store
        if store.live or store.end - self.cached >= self.cached:
            return None
        if any(node.store is not store for node in self.path if node.start < self.cached):
            return None
        return store

    def continued_store(self) -> KVStore[Layer] | None:
        """Returns the idle store whose layers can be leased without a copy of the prefix, otherwise
        None."""
        return self.extendable_store() or self.divisible_store()

    def nodes_to_move(self, store: KVStore[Layer]) -> list[RadixNode[Layer]]:
        """Returns the nodes of this store that other prompts may need after the cached part."""
        return [n for n in store.nodes if n.end > self.cached and n not in self.exclusive]

    def explain_miss(self) -> CacheMiss:
        """Returns the reason for the cache miss. Call this only if there is a miss."""
        return explain_miss(
            shared=self.matched,
            usable=self.usable,
            cached=self.cached,
            cached_ids=self._list_next_ids(),
        )

    def _list_next_ids(self) -> Sequence[int]:
        """Returns cached tokens after the matched ones."""
        if self.matched == 0:
            return ()
        last = self.path[-1]
        ids = last.ids[self.matched - last.start :]
        if not ids and last.children:
            return max(last.children.values(), key=_last_used).ids
        return ids


def match_prefix(
    tree: RadixTree[Layer],
    ids: tuple[int, ...],
    *,
    alignment: int,
    atomic: Sequence[tuple[int, int]] = (),
) -> PrefixMatch[Layer]:
    """Looks up a prompt without changing the tree. Takes time linear in the number of tokens,
    independent of the cache size. atomic: see `PrefixCache.begin`."""
    path, matched = tree.match(ids)
    # The last token must be computed, because the output starts from its hidden state.
    usable = cached = usable_length(min(matched, len(ids) - 1), alignment, atomic)
    checkpoint = None
    if tree.needs_checkpoints:
        cached, checkpoint = find_restorable(path, usable)
        while (allowed := usable_length(cached, alignment, atomic)) < cached:
            cached, checkpoint = find_restorable(path, allowed)
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
    """Returns the idle nodes at the end of a path that no other sequence uses. The prompt must
    match all of them."""
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


# The maximum number of nodes after the end of a prompt to search for a checkpoint that can be
# trimmed.
_MAX_LATER_NODES = 16


def find_restorable(
    path: Sequence[RadixNode[Layer]], usable: int
) -> tuple[int, RadixNode[Layer] | None]:
    """Returns how many of the first `usable` positions can be restored, and the node with the
    required checkpoint.

    `path` contains the nodes that cover these positions, and may be longer. A checkpoint after
    `usable` is preferred if it can be trimmed to `usable`, for example if a sliding window is not
    full yet. Otherwise, the last checkpoint before `usable` is chosen.
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
    atomic: Sequence[tuple[int, int]] = (),
    stops: Sequence[int] = (),
) -> tuple[int, ...]:
    """Returns the positions at which to create checkpoints during the prefill of a prompt with
    `length` tokens.

    Each checkpoint shortens a prefill chunk, and uses memory until it is evicted. Useful positions
    are:

    - the first turn end, where all conversations with this system prompt diverge;
    - the last five turn ends: the end of the prompt's messages, or the start of the part that an
    answer changes, for the next turn of a tool loop; the end of the user's last message, after
    which a template may omit the reasoning; the end of the message before it, for an edited turn;
    and the start of a temporary message;
    - the last eight of the other `stops`: another prompt may have a different image there, or
      different text after it;
    - `usable`, if it could not be restored, because other prompts diverge there as well;
    - every `interval` positions, to bound the loss if no other checkpoint can be used;
    - with an alignment, the last aligned position, because the state at the end of the output
    cannot be trimmed.
    """
    positions = {
        *turn_ends[:1],
        *turn_ends[-_LAST_TURN_ENDS:],
        *stops[-_LAST_STOPS:],
        usable,
        *range(interval, length, interval),
    }
    if alignment > 1:
        positions.add(length - 1)
    floors = {usable_length(position, alignment, atomic) for position in positions}
    return tuple(sorted(position for position in floors if cached < position < length))


def _no_evaluation(_: object) -> None:
    """The default `evaluate`, for layers that are not lazy."""


class RadixPrefixCache(Generic[Layer]):
    """A prefix cache with a radix tree.

    make_kv: creates fresh layer caches.
    evaluate: called with copied layers, to evaluate them before their source is written to.
    dispatch: called with copied layers whose source is not written to again. Does not wait for
        them. None uses `evaluate`.
    alignment: prefix lengths are multiples of this number of tokens (see `--exact`).
    checkpoint_every: the number of prompt positions between two checkpoints of indivisible layers.
    max_bytes: the maximum number of bytes to keep; None leaves eviction to the caller.
    """

    shares_live = True

    def __init__(
        self,
        make_kv: Callable[[], Sequence[Layer]],
        *,
        evaluate: Callable[[Sequence[Layer]], None] = _no_evaluation,
        dispatch: Callable[[Sequence[Layer]], None] | None = None,
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
        evaluation = LayerEvaluation(wait=evaluate, dispatch=dispatch or evaluate)
        self._tree = RadixTree[Layer](evaluation, needs_checkpoints=any(self._indivisible))
        self.evictions = 0

    def begin(
        self,
        ids: Sequence[int],
        *,
        turn_ends: Sequence[int] = (),
        reuse: bool = True,
        reserve_length: int = 0,
        atomic: Sequence[tuple[int, int]] = (),
        stops: Sequence[int] = (),
    ) -> "RadixLease[Layer]":
        assert ids, "the prompt is empty"
        ids = tuple(ids)
        found: PrefixMatch[Layer] = (
            match_prefix(self._tree, ids, alignment=self._alignment, atomic=atomic)
            if reuse
            else PrefixMatch()
        )
        miss = None
        if found.cached < self._align_down(len(ids) - 1):
            miss = found.explain_miss() if reuse else CacheMiss(position=0, reason="unwanted")
        self._tree.touch(found.path)
        checkpoints = self._plan_checkpoints(len(ids), turn_ends, atomic, stops, found)
        kv, store = self._lease_layers(found, reserve_length=max(reserve_length, len(ids) + 1))
        return RadixLease(
            self, kv, store, cached=found.cached, miss=miss, checkpoint_positions=checkpoints
        )

    def continued_bytes(
        self,
        ids: Sequence[int],
        *,
        reuse: bool = True,
        atomic: Sequence[tuple[int, int]] = (),
    ) -> int:
        if not reuse:
            return 0
        found = match_prefix(self._tree, tuple(ids), alignment=self._alignment, atomic=atomic)
        self._tree.touch(found.path)
        store = found.continued_store()
        if store is None:
            return 0
        # The positions after the prefix stay in the cache, in layers without spare capacity.
        end = max((node.end for node in found.nodes_to_move(store)), default=found.cached)
        return store.nbytes - store.nbytes * (end - found.cached) // (store.end - store.base)

    @property
    def needs_checkpoints(self) -> bool:
        return self._tree.needs_checkpoints

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    @property
    def num_layers(self) -> int:
        return self._tree.num_layers

    def evict(self, num_bytes: int) -> int:
        before = self.nbytes
        self.evictions += self._tree.evict(num_bytes)
        return before - self.nbytes

    def clear(self) -> None:
        self._tree.evict(self.nbytes)

    def check(self) -> None:
        self._tree.check()

    def snapshot(self, max_nodes: int) -> PrefixSnapshot:
        return self._tree.take_snapshot(max_nodes)

    def publish(
        self, store: KVStore[Layer], kv: Sequence[Layer], ids: Sequence[int], *, checkpoint: bool
    ) -> None:
        """Inserts the tokens of a running sequence. Called by the lease. `checkpoint` determines
        whether to store the state of the indivisible layers here."""
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
        """Stores the caches when a lease ends."""
        with self._discard_on_error(store):
            self._insert_kept(store, kv, ids, keep=keep)
            self._tree.mark_idle(store)
        if self._max_bytes is not None and self.nbytes > self._max_bytes:
            self.evict(self.nbytes - self._max_bytes)

    def discard(self, store: KVStore[Layer]) -> None:
        """Drops the store of a lease whose caches may be invalid."""
        self._tree.discard_store(store)

    @contextmanager
    def _discard_on_error(self, store: KVStore[Layer]) -> Generator[None]:
        """If an exception is raised in the context, drops a live store, which would otherwise stay
        in the tree without a lease."""
        try:
            yield
        except BaseException:
            self._tree.discard_store(store)
            raise

    def _insert_kept(
        self, store: KVStore[Layer], kv: Sequence[Layer], ids: Sequence[int], *, keep: int
    ) -> None:
        """Inserts the tokens to keep, and stores the state of the indivisible layers."""
        # Tokens that other sequences may already have used are kept.
        keep = max(keep, *(node.end for node in store.nodes), 0)
        state = tuple(compress(kv, self._indivisible))
        for length in list_stored_lengths(kv, len(ids), keep, self._alignment):
            if can_trim_to(state, length):
                path = self._tree.insert(tuple(ids[:length]), store)
                if state:
                    self._checkpoint(self._tree.split_at(path, length), state)
                break

    def _checkpoint(self, node: RadixNode[Layer], state: tuple[Layer, ...]) -> None:
        for layer in state:
            layer.trim(layer.offset - node.end)
        if node.checkpoint is None:
            self._tree.attach_checkpoint(node, state)

    def _lease_layers(
        self, found: PrefixMatch[Layer], *, reserve_length: int
    ) -> tuple[Sequence[Layer], KVStore[Layer]]:
        """Returns layer caches with the cached prefix of a prompt, and the live store to which they
        belong."""
        store = found.continued_store()
        if store is None:
            return self._copy_prefix(found, reserve_length)
        return self._extend_idle_store(store, found, reserve_length), store

    def _extend_idle_store(
        self, store: KVStore[Layer], found: PrefixMatch[Layer], reserve_length: int
    ) -> Sequence[Layer]:
        """Leases an idle store without copying the prefix. Its nodes stay in the tree and remain
        available to other prompts. Positions after the prefix that other prompts may need are
        copied to a separate store. They are usually the answer to the same prompt."""
        indivisible = found.checkpoint.checkpoint_at(found.cached) if found.checkpoint else ()
        others = found.nodes_to_move(store)
        if others:
            self._tree.move_tail(found.path, found.cached, others)
        for node in found.exclusive:
            self._tree.truncate_leaf(node, found.cached)
        self._tree.mark_live(store)
        with self._discard_on_error(store):
            self._tree.free_unused()
            kv = self._in_model_order(store.layers, indivisible)
            store.trim(found.cached)
            _reserve(store, kv, reserve_length)
            # moving the tail has evaluated the layers of the store
            unevaluated = indivisible if others else kv
            if unevaluated:
                self._evaluate(unevaluated)
            return kv

    def _copy_prefix(
        self, found: PrefixMatch[Layer], reserve_length: int
    ) -> tuple[Sequence[Layer], KVStore[Layer]]:
        """Creates fresh caches with a copy of the path. Nodes that are used only by this prompt are
        then backed by the copy, so that no conversation is stored twice while it is running."""
        fresh, cached = self._make_kv(), found.cached
        store = KVStore(list(compress(fresh, self._divisible)))
        indivisible = tuple(compress(fresh, self._indivisible))
        if found.checkpoint is not None:
            indivisible = found.checkpoint.checkpoint_at(cached)
        kv = self._in_model_order(store.layers, indivisible)
        _reserve(store, kv, reserve_length)
        served = [node for node in found.path if node.start < cached]
        for donor, nodes in groupby(served, key=lambda node: node.store):
            copied = list(nodes)
            start, end = copied[0].start - donor.base, min(copied[-1].end, cached) - donor.base
            for layer, source in zip(store.layers, donor.layers, strict=True):
                layer.append(source, start, end)
        if cached:
            self._evaluate(kv)
        self._tree.mark_live(store)
        with self._discard_on_error(store):
            for node in found.exclusive:
                self._tree.truncate_leaf(node, cached)
                if node.start < cached:
                    self._tree.assign_store(node, store)
            self._tree.free_unused()
        return kv, store

    def _in_model_order(
        self, divisible: Sequence[Layer], indivisible: Sequence[Layer]
    ) -> tuple[Layer, ...]:
        """Returns the layers of both types in the order of the model."""
        kinds = {True: iter(divisible), False: iter(indivisible)}
        return tuple(next(kinds[divisible]) for divisible in self._divisible)

    def _plan_checkpoints(
        self,
        length: int,
        turn_ends: Sequence[int],
        atomic: Sequence[tuple[int, int]],
        stops: Sequence[int],
        found: PrefixMatch[Layer],
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
            atomic=atomic,
            stops=stops,
        )

    def _align_down(self, length: int) -> int:
        return length - length % self._alignment


class RadixLease(Generic[Layer]):
    """The layer caches leased to one sequence. A lease ends exactly once."""

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


def create_cache(config: PrefixCacheConfig) -> RadixPrefixCache[LayerCache]:
    return RadixPrefixCache(
        config.make_kv,
        evaluate=config.evaluate,
        dispatch=config.dispatch,
        alignment=config.alignment,
    )
