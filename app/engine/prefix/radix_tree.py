"""The radix tree of cached tokens, the stores of layer caches that back its nodes, and the eviction
of both.

Knows: token IDs, layer caches as `LayerKV`, bytes, times of use. Must not know: leases, alignment,
the rules for reusing a prefix.

    root ── [0, 40) ──┬── [40, 90)                two conversations that share 40 tokens
                      └── [40, 75) ── [75, 80)

    store   live   [0 ................... 90)     the caches of a running sequence: they hold its
                                                  whole path, are only appended to, and may be
                                                  copied as far as they are in the tree
    store   idle         [40 ........ 80)         the part that a finished sequence backed

Each node is backed by one store, which contains the node's positions of the divisible layers. A
store backs only nodes on one path. The state of indivisible layers is stored in a checkpoint at the
end of a node.

The design follows SGLang's RadixAttention (Zheng et al. 2023, arXiv:2312.07104) with two changes.
Stores are contiguous, as attention requires, so a running sequence has its own copy of a shared
prefix. The prefix of a running sequence can be reused before the sequence ends.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Generic

from app.core.jobs import PrefixNode, PrefixSnapshot
from app.engine.prefix.cache import Layer, common_prefix_length

# The number of bytes of a store that are copied before the copies are awaited, so that at most this
# much of a store, or one layer, is in memory twice.
MAX_COPY_BYTES = 256 << 20

# A leaf that ends at or before this position has weight 1. Longer leaves have a higher weight, up
# to a limit, so that a long prompt without further requests is eventually evicted.
_LIGHT_TOKENS, _MAX_WEIGHT = 1024, 16.0

# the number of least recently used leaves to compare, so that an eviction takes constant time
_EVICTION_WINDOW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEvaluation(Generic[Layer]):
    """How copied layers become independent of their source. wait: evaluates the layers, and returns
    when they are complete. dispatch: starts the evaluation and does not wait for it."""

    wait: Callable[[Sequence[Layer]], None]
    dispatch: Callable[[Sequence[Layer]], None]


@dataclass(slots=True, eq=False)
class KVStore(Generic[Layer]):
    """Positions [base, end) of the divisible layers, in the order of the model.

    live: whether the store is leased to a running sequence. If so, base is 0, the layers may
        contain more positions than the nodes need, and the bytes are charged to the sequence
        instead of the tree.
    reserved: the total number of reserved positions.
    nbytes, num_layers: the size that is charged to the tree; 0 while the store is live.
    """

    layers: list[Layer]
    live: bool = False
    base: int = 0
    end: int = 0
    reserved: int = 0
    nbytes: int = 0
    num_layers: int = 0
    nodes: "set[RadixNode[Layer]]" = field(default_factory=lambda: set[RadixNode[Layer]]())

    @property
    def span(self) -> tuple[int, int]:
        """The range of positions that the nodes need."""
        start = min((node.start for node in self.nodes), default=0)
        return start, max((node.end for node in self.nodes), default=start)

    @property
    def deepest(self) -> "RadixNode[Layer] | None":
        return max(self.nodes, key=end_of, default=None)

    def update_size(self) -> tuple[int, int]:
        """Recomputes the size, and returns the changes in bytes and in layer caches."""
        bytes_before, layers_before = self.nbytes, self.num_layers
        self.nbytes, self.num_layers = sum(layer.nbytes for layer in self.layers), len(self.layers)
        return self.nbytes - bytes_before, self.num_layers - layers_before

    def trim(self, end: int) -> None:
        """Removes all positions from `end` on, but keeps their capacity."""
        for layer in self.layers:
            layer.trim(layer.offset - (end - self.base))
        self.end = end

    def keep_range(self, start: int, end: int, evaluation: LayerEvaluation[Layer]) -> None:
        """Keeps only [start, end) and frees the rest. If an exception is raised, the content is
        invalid. Waits for the device only if the copies are larger than MAX_COPY_BYTES."""
        group, group_bytes = list[Layer](), 0
        for index, layer in enumerate(self.layers):
            piece = layer.slice(start - self.base, end - self.base)
            if group and group_bytes + piece.nbytes > MAX_COPY_BYTES:
                evaluation.wait(group)
                group, group_bytes = [], 0
            group.append(piece)
            group_bytes += piece.nbytes
            self.layers[index] = piece
        # Nothing waits for the last group, because nothing writes to its source again.
        evaluation.dispatch(group)
        self.base, self.end, self.reserved = start, end, end

    def check(self) -> None:
        start, end = self.span
        for upper, lower in pairwise(sorted(self.nodes, key=end_of)):
            assert lower.is_descendant_of(upper), "a store backs nodes of two paths"
        if self.live:
            assert (self.base, self.nbytes, self.num_layers) == (0, 0, 0)
            assert all(layer.offset >= end for layer in self.layers)
            return
        assert (self.base, self.end) == (start, end)
        assert all(layer.offset == end - start for layer in self.layers)
        assert self.nbytes == sum(layer.nbytes for layer in self.layers)
        assert self.num_layers == len(self.layers)


@dataclass(slots=True, eq=False)
class RadixNode(Generic[Layer]):
    """The tokens of positions [start, end).

    children: the child nodes, by their first token.
    checkpoint: the state of the indivisible layers at `end`.
    last_used: the tree's use counter at the last use of this node. It is never less than a child's.
    used_at: the Unix time of this use. Only snapshots show it; no decision depends on it.
    """

    ids: tuple[int, ...]
    start: int
    parent: "RadixNode[Layer] | None"
    store: KVStore[Layer]
    children: "dict[int, RadixNode[Layer]]" = field(
        default_factory=lambda: dict[int, RadixNode[Layer]]()
    )
    checkpoint: tuple[Layer, ...] | None = None
    last_used: int = 0
    used_at: float = 0.0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def checkpoint_bytes(self) -> int:
        return 0 if self.checkpoint is None else sum(layer.nbytes for layer in self.checkpoint)

    def checkpoint_at(self, position: int) -> tuple[Layer, ...]:
        """Returns copies of the indivisible layers, trimmed to `position`. The checkpoint must
        support trimming to it."""
        state = tuple(layer.copy() for layer in self.checkpoint or ())
        for layer in state:
            layer.trim(layer.offset - position)
        return state

    def subtree(self) -> "list[RadixNode[Layer]]":
        """Returns this node and all nodes below it, parents before children. The implementation is
        iterative, because paths may be deeper than Python's stack."""
        nodes: list[RadixNode[Layer]] = [self]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes

    def is_descendant_of(self, other: "RadixNode[Layer]") -> bool:
        node = self.parent
        while node is not None and node is not other:
            node = node.parent
        return node is other

    def check(self) -> None:
        assert self.ids
        assert self.parent is not None
        assert self.parent.end == self.start
        assert self.parent.children[self.ids[0]] is self
        assert self in self.store.nodes
        assert all(layer.offset == self.end for layer in self.checkpoint or ())


def end_of(node: RadixNode[Layer]) -> int:
    return node.end


class RadixTree(Generic[Layer]):
    """A radix tree of token sequences.

    evaluation: makes copied layers independent of their source.
    needs_checkpoints: whether the model has indivisible layers. If it does, an idle leaf without a
        checkpoint is useless and is removed.
    """

    def __init__(self, evaluation: LayerEvaluation[Layer], *, needs_checkpoints: bool) -> None:
        self._evaluation = evaluation
        self.needs_checkpoints = needs_checkpoints
        self.root = RadixNode[Layer]((), 0, None, KVStore[Layer]([]))
        self.nbytes = self.num_layers = 0  # of idle stores and checkpoints
        self.live: dict[KVStore[Layer], None] = {}
        # Every node comes before its parent, because each use moves a path to the end, deepest node
        # first. The first evictable node is therefore the least recently used.
        self._lru = OrderedDict[RadixNode[Layer], None]()
        self._clock = 0
        self._oversized: dict[KVStore[Layer], None] = {}  # may hold more than the nodes need

    def __len__(self) -> int:
        """Returns the number of nodes besides the root."""
        return len(self._lru)

    def recently_used(self, count: int) -> list[RadixNode[Layer]]:
        """Returns up to `count` nodes, the most recently used first. Each parent of a node precedes
        it, because every node precedes its parent in the LRU order."""
        return list(islice(reversed(self._lru), count))

    def take_snapshot(self, max_nodes: int) -> PrefixSnapshot:
        """Returns the `max_nodes` most recently used nodes. The time depends on this number, and
        not on the size of the tree."""
        nodes = self.recently_used(max_nodes)
        indices = {node: index for index, node in enumerate(nodes)}
        running = Counter[RadixNode[Layer]]()
        for store in self.live:
            node = store.deepest
            while node is not None and node in indices:
                running[node] += 1
                node = node.parent
        return PrefixSnapshot(
            nodes=tuple(
                PrefixNode(
                    parent=None if node.parent is None else indices.get(node.parent),
                    start=node.start,
                    tokens=len(node.ids),
                    last_used=node.used_at,
                    branches=len(node.children),
                    running=running[node],
                )
                for node in nodes
            ),
            total_nodes=len(self),
        )

    def match(self, ids: tuple[int, ...]) -> tuple[list[RadixNode[Layer]], int]:
        """Returns the nodes that match `ids`, and the number of shared tokens. The last node may
        match only partially. Takes time linear in the number of tokens, independent of the size of
        the tree."""
        path: list[RadixNode[Layer]] = []
        node, at = self.root, 0
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            path.append(child)
            at += common_prefix_length(child.ids, ids, at)
            if at < child.end:
                break
            node = child
        return path, at

    def insert(self, ids: tuple[int, ...], store: KVStore[Layer]) -> list[RadixNode[Layer]]:
        """Inserts a live sequence. Its store backs only tokens that are not in the tree yet."""
        path, at = self.match(ids)
        if at < len(ids):
            last = self.split_at(path, at)
            if last.store is store and not last.children and last.checkpoint is None:
                last.ids += ids[at:]
            else:
                path.append(self._add_node(ids[at:], at, last, store))
        self.touch(path)
        return path

    def split_at(self, path: list[RadixNode[Layer]], end: int) -> RadixNode[Layer]:
        """Returns the node of a path that ends at `end`, and splits the last node if it is longer.
        The path must reach `end`."""
        if not path:
            return self.root
        lower = path[-1]
        if end < lower.end:
            # The lower part remains the same object, because its children and its position in the
            # LRU order are already correct.
            assert lower.parent is not None
            cut = end - lower.start
            upper = self._add_node(lower.ids[:cut], lower.start, lower.parent, lower.store)
            lower.ids, lower.start, lower.parent = lower.ids[cut:], end, upper
            upper.children[lower.ids[0]] = lower
            path[-1] = upper
            self.touch(path)
        return path[-1]

    def touch(self, path: Sequence[RadixNode[Layer]]) -> None:
        self._clock += 1
        now = time.time()
        for node in reversed(path):
            node.last_used, node.used_at = self._clock, now
            self._lru.move_to_end(node)

    def assign_store(self, node: RadixNode[Layer], store: KVStore[Layer]) -> None:
        """Assigns `store`, which has the same content, to the node. Call `free_unused`
        afterwards."""
        self._detach_from_store(node)
        node.store = store
        store.nodes.add(node)

    def move_tail(
        self, path: Sequence[RadixNode[Layer]], start: int, nodes: Sequence[RadixNode[Layer]]
    ) -> None:
        """Moves the positions of these nodes from `start` on to a separate store. The nodes are
        backed by one idle store and end after `start`. One of them may contain `start`, and is then
        part of the path. Call `free_unused` afterwards."""
        store, end = nodes[0].store, max(node.end for node in nodes)
        layers = [layer.slice(start - store.base, end - store.base) for layer in store.layers]
        self._evaluation.wait(layers)
        self.split_at([node for node in path if node.start < start], start)
        tail = KVStore(layers, base=start, end=end, reserved=end)
        self._oversized[tail] = None
        for node in nodes:
            self.assign_store(node, tail)

    def attach_checkpoint(self, node: RadixNode[Layer], checkpoint: tuple[Layer, ...]) -> None:
        assert node.checkpoint is None
        node.checkpoint = checkpoint
        self.nbytes += node.checkpoint_bytes
        self.num_layers += len(checkpoint)

    def detach_checkpoint(self, node: RadixNode[Layer]) -> int:
        """Removes the checkpoint of a node, and returns its size in bytes."""
        freed = node.checkpoint_bytes
        self.nbytes -= freed
        self.num_layers -= len(node.checkpoint or ())
        node.checkpoint = None
        return freed

    def mark_live(self, store: KVStore[Layer]) -> None:
        """Marks a store as leased. The store is either new, or idle with a base of 0."""
        assert store.base == 0
        self.nbytes -= store.nbytes
        self.num_layers -= store.num_layers
        store.nbytes, store.num_layers, store.live = 0, 0, True
        self.live[store] = None

    def mark_idle(self, store: KVStore[Layer]) -> None:
        """Marks a live store as idle. The store keeps the positions that it backs."""
        del self.live[store]
        store.live = False
        if store.deepest is not None:
            self.prune(store.deepest)
        start, end = store.span
        if start == 0 and store.reserved <= 2 * end:
            # Unused capacity is kept, because the sequence is likely to be continued.
            store.trim(end)
        else:
            store.end = 0  # forces keep_range in free_unused
        self._oversized[store] = None
        self.free_unused()

    def discard_store(self, store: KVStore[Layer]) -> None:
        """Drops a store whose content may be invalid. Nodes on the path of another live sequence
        are assigned to its store. All other nodes of the store are removed with their subtrees."""
        self.live.pop(store, None)
        for node in sorted(store.nodes, key=end_of):
            if node not in store.nodes:
                continue  # removed with an ancestor
            below = node.subtree()
            heir = next((n.store for n in below if n.store.live and n.store is not store), None)
            if heir is not None:
                self.assign_store(node, heir)
                continue
            for each in reversed(below):
                self.remove_leaf(each)
            assert node.parent is not None
            self.prune(node.parent)
        store.live = False
        self._oversized[store] = None
        self.free_unused()

    def truncate_leaf(self, leaf: RadixNode[Layer], end: int) -> None:
        """Removes all positions of an idle leaf from `end` on, if there are any. Call `free_unused`
        afterwards."""
        if leaf.start >= end:
            self.remove_leaf(leaf)
        elif leaf.end > end:
            assert not leaf.children
            self.detach_checkpoint(leaf)
            leaf.ids = leaf.ids[: end - leaf.start]
            self._oversized[leaf.store] = None

    def remove_leaf(self, leaf: RadixNode[Layer]) -> int:
        """Removes a leaf. Returns an estimate of the freed bytes. Call `free_unused` afterwards."""
        assert not leaf.children
        assert leaf.parent is not None
        store = leaf.store
        freed = store.nbytes * len(leaf.ids) // max(1, store.end - store.base)
        self._detach_from_store(leaf)
        del leaf.parent.children[leaf.ids[0]]
        del self._lru[leaf]
        return freed + self.detach_checkpoint(leaf)

    def prune(self, node: RadixNode[Layer]) -> int:
        """Removes a useless leaf, and then each ancestor that is useless as well. Returns an
        estimate of the freed bytes."""
        freed = 0
        while (
            self.needs_checkpoints
            and node.parent is not None
            and not (node.children or node.store.live or node.checkpoint)
        ):
            parent = node.parent
            freed += self.remove_leaf(node)
            node = parent
        return freed

    def free_unused(self) -> None:
        """Frees the memory of stores that no node needs."""
        while self._oversized:
            store, _ = self._oversized.popitem()
            if store.live:
                continue
            start, end = store.span
            if start == end:
                store.layers.clear()
            elif (start, end) != (store.base, store.end):
                self._keep_range(store, start, end)
            num_bytes, num_layers = store.update_size()
            self.nbytes += num_bytes
            self.num_layers += num_layers

    def evict(self, count: int) -> int:
        """Frees at least `count` bytes, or all bytes that can be freed. Returns the number of
        evicted leaves and checkpoints.

        First frees memory that is duplicated in live stores, which loses no cached tokens. Then
        evicts leaves in LRU order, weighted by length (`_relative_age`). On a path without
        branches, checkpoints are evicted before the leaf.
        """
        if count <= 0:
            return 0
        goal, given_up = self.nbytes - count, 0
        self._reassign_to_live()
        while self.nbytes > goal and (dropped := self._evict_leaves(self.nbytes - goal)):
            given_up += dropped
            self.free_unused()
        for node in self._lru:  # only checkpoints on live paths remain
            if self.nbytes <= goal:
                break
            if node.checkpoint is not None:
                self.detach_checkpoint(node)
                given_up += 1
        return given_up

    def _evict_leaves(self, num_bytes: int) -> int:
        given_up = freed = 0
        while freed < num_bytes and (leaf := self._oldest_leaf()) is not None:
            spare = _spare_checkpoint(leaf)
            if spare is not None:
                freed += self.detach_checkpoint(spare)
            else:
                parent = leaf.parent
                assert parent is not None
                freed += self.remove_leaf(leaf) + self.prune(parent)
            given_up += 1
        return given_up

    def _oldest_leaf(self) -> RadixNode[Layer] | None:
        """Returns the leaf to evict: among the least recently used leaves, the leaf with the
        highest relative age."""
        # skips nodes on live paths, which are few and mostly at the other end
        leaves = (n for n in self._lru if not n.children and not n.store.live)
        return max(islice(leaves, _EVICTION_WINDOW), key=self._relative_age, default=None)

    def _relative_age(self, leaf: RadixNode[Layer]) -> float:
        """Returns the number of tree uses since the leaf's last use, divided by the leaf's weight.
        A long prompt therefore survives many short requests of the same session (titles,
        sub-agents), but not forever."""
        weight = min(max(leaf.end / _LIGHT_TOKENS, 1.0), _MAX_WEIGHT)
        return (self._clock - leaf.last_used + 1) / weight

    def _reassign_to_live(self) -> None:
        """Assigns the live store of each sequence to all nodes on its path."""
        for store in self.live:
            node = store.deepest or self.root
            while node.parent is not None:
                if not node.store.live:
                    self.assign_store(node, store)
                node = node.parent
        self.free_unused()

    def _add_node(
        self, ids: tuple[int, ...], start: int, parent: RadixNode[Layer], store: KVStore[Layer]
    ) -> RadixNode[Layer]:
        """Adds a node, in place of a child that begins with the same token. The caller must touch
        the path."""
        node = RadixNode(ids, start, parent, store)
        parent.children[ids[0]] = node
        store.nodes.add(node)
        self._lru[node] = None
        return node

    def _detach_from_store(self, node: RadixNode[Layer]) -> None:
        node.store.nodes.discard(node)
        self._oversized[node.store] = None

    def _keep_range(self, store: KVStore[Layer], start: int, end: int) -> None:
        try:
            store.keep_range(start, end, self._evaluation)
        except BaseException:
            self.discard_store(store)
            raise

    def check(self) -> None:
        nodes = self.root.subtree()[1:]
        assert set(nodes) == set(self._lru)
        assert not self._oversized
        places = {node: place for place, node in enumerate(self._lru)}
        for node in nodes:
            node.check()
            assert node.parent is not None
            if node.parent is not self.root:
                assert places[node] < places[node.parent]
                assert node.last_used <= node.parent.last_used
            assert self.needs_checkpoints or node.checkpoint is None
            useful = (
                node.children or node.store.live or node.checkpoint or not self.needs_checkpoints
            )
            assert useful, "a leaf without users"
        stores = {node.store for node in nodes}
        for store in stores | set(self.live):
            store.check()
            assert store.nodes <= set(nodes)
            assert store.live == (store in self.live)
        checkpoints = sum(node.checkpoint_bytes for node in nodes)
        assert self.nbytes == checkpoints + sum(store.nbytes for store in stores)
        states = sum(len(node.checkpoint or ()) for node in nodes)
        assert self.num_layers == states + sum(store.num_layers for store in stores)


def _spare_checkpoint(leaf: RadixNode[Layer]) -> RadixNode[Layer] | None:
    """Returns the first node with a checkpoint on the path to a leaf, among the nodes used only by
    this path. The end of the path is evicted last, because it is most likely to be continued."""
    spare, node = None, leaf.parent
    while node is not None and node.last_used == leaf.last_used and len(node.children) == 1:
        spare = node if node.checkpoint is not None else spare
        node = node.parent
    return spare
