"""A compressed tree of ids, and what of it is given up when memory is short.

Knows: ids, nodes, stores, bytes, ages. Must not know: leases, grids, what a prompt may reuse.

    root ── [0, 40) ──┬── [40, 90)                two conversations that share 40 ids
                      └── [40, 75) ── [75, 80)

    store   live   [0 ................... 90)     caches of a running sequence: hold all of its
                                                  path, are only appended to, and lend what is in
                                                  the tree
    store   idle         [40 ........ 80)         left by one that ended: the part it backed

The tree is that of SGLang's RadixAttention (Zheng et al. 2023, arXiv:2312.07104) with two changes:
stores are contiguous, as attention wants them, so that a running sequence holds a copy of what it
shares; and a running sequence lends before it ends.

Where the radix cache keeps layer states: stores and the nodes they back.

Each node is backed by one store, which holds its positions of the divisible layers; a store backs
nodes of one path. The state of the other layers is kept whole, in a checkpoint at a node's end.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic

from app.core.ports import Layer
from app.engine.prefix.matching import common_prefix_length


@dataclass(slots=True, eq=False)
class KVStore(Generic[Layer]):
    """Positions [base, end) of the divisible layers, in the order of the model.

    live: on loan to a sequence that runs. Then base is 0, and its layers grow beyond what the nodes
    need of them; it is not counted here but by whoever borrowed it. reserved: positions that were
    reserved in all.
    """

    layers: list[Layer]
    live: bool = False
    base: int = 0
    end: int = 0
    reserved: int = 0
    nbytes: int = 0
    nodes: "set[RadixNode[Layer]]" = field(default_factory=lambda: set[RadixNode[Layer]]())

    @property
    def span(self) -> tuple[int, int]:
        """The positions that the nodes need."""
        start = min((node.start for node in self.nodes), default=0)
        return start, max((node.end for node in self.nodes), default=start)

    @property
    def deepest(self) -> "RadixNode[Layer] | None":
        return max(self.nodes, key=end_of, default=None)

    def update_nbytes(self) -> int:
        """Look at the layers' bytes again; by how many they changed."""
        before, self.nbytes = self.nbytes, sum(layer.nbytes for layer in self.layers)
        return self.nbytes - before

    def trim(self, end: int) -> None:
        """Forget what lies behind `end`, and keep the room."""
        for layer in self.layers:
            layer.trim(layer.offset - (end - self.base))
        self.end = end

    def keep_range(self, start: int, end: int, evaluate: Callable[[Sequence[Layer]], None]) -> None:
        """Keep [start, end) only, free the rest. If this fails, the content is in doubt."""
        # one layer at a time, so that never more than one is held twice
        for index, layer in enumerate(self.layers):
            piece = layer.slice(start - self.base, end - self.base)
            evaluate((piece,))
            self.layers[index] = piece
        self.base, self.end, self.reserved = start, end, end

    def check(self) -> None:
        start, end = self.span
        for upper, lower in pairwise(sorted(self.nodes, key=end_of)):
            assert lower.is_descendant_of(upper), "a store backs nodes of two paths"
        if self.live:
            assert (self.base, self.nbytes) == (0, 0)
            assert all(layer.offset >= end for layer in self.layers)
            return
        assert (self.base, self.end) == (start, end)
        assert all(layer.offset == end - start for layer in self.layers)
        assert self.nbytes == sum(layer.nbytes for layer in self.layers)


@dataclass(slots=True, eq=False)
class RadixNode(Generic[Layer]):
    """The ids of positions [start, end). children: by their first id. checkpoint: the whole layers,
    as they are at `end`. last_used: a count of uses, never less than that of any child."""

    ids: tuple[int, ...]
    start: int
    parent: "RadixNode[Layer] | None"
    store: KVStore[Layer]
    children: "dict[int, RadixNode[Layer]]" = field(
        default_factory=lambda: dict[int, RadixNode[Layer]]()
    )
    checkpoint: tuple[Layer, ...] | None = None
    last_used: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def checkpoint_bytes(self) -> int:
        return 0 if self.checkpoint is None else sum(layer.nbytes for layer in self.checkpoint)

    def checkpoint_at(self, position: int) -> tuple[Layer, ...]:
        """Copies of the whole layers, cut back to `position`, which must be possible."""
        state = tuple(layer.copy() for layer in self.checkpoint or ())
        for layer in state:
            layer.trim(layer.offset - position)
        return state

    def subtree(self) -> "list[RadixNode[Layer]]":
        """Each before its children. A loop: paths may be deeper than Python's stack."""
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
    """evaluate: makes copied layers independent of what they were copied from. needs_checkpoints:
    whether there are layers that checkpoints are needed for; then an idle leaf without one is of no
    use, and is not kept."""

    def __init__(
        self, evaluate: Callable[[Sequence[Layer]], None], *, needs_checkpoints: bool
    ) -> None:
        self._evaluate = evaluate
        self.needs_checkpoints = needs_checkpoints
        self.root = RadixNode[Layer]((), 0, None, KVStore[Layer]([]))
        self.nbytes = 0
        self.live: dict[KVStore[Layer], None] = {}
        # Every node before its parent, since a use moves a path to the end, deepest node first.
        # So the first one that could be given up is also the one used longest ago.
        self._lru = OrderedDict[RadixNode[Layer], None]()
        self._clock = 0
        self._oversized: dict[KVStore[Layer], None] = {}  # may hold more than their nodes need

    def match(self, ids: tuple[int, ...]) -> tuple[list[RadixNode[Layer]], int]:
        """The nodes which `ids` go through, and how many ids they share: the last node may be
        matched in part. Time is that of comparing the ids once, however much else is cached."""
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
        """Put a live sequence into the tree. Its store backs only what nobody else does already."""
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
        """The last node of a path that goes to `end` at least: split, if it goes on behind."""
        if not path:
            return self.root
        lower = path[-1]
        if end < lower.end:
            # the lower part stays the same object: its children and its place by age are right
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
        for node in reversed(path):
            node.last_used = self._clock
            self._lru.move_to_end(node)

    def assign_store(self, node: RadixNode[Layer], store: KVStore[Layer]) -> None:
        """From now on `store`, which holds the same, backs the node. Ends with `fit`."""
        self._detach_from_store(node)
        node.store = store
        store.nodes.add(node)

    def attach_checkpoint(self, node: RadixNode[Layer], checkpoint: tuple[Layer, ...]) -> None:
        assert node.checkpoint is None
        node.checkpoint = checkpoint
        self.nbytes += node.checkpoint_bytes

    def detach_checkpoint(self, node: RadixNode[Layer]) -> int:
        """The bytes it came to."""
        freed = node.checkpoint_bytes
        self.nbytes -= freed
        node.checkpoint = None
        return freed

    def mark_live(self, store: KVStore[Layer]) -> None:
        """A store goes on loan: a new one, or an idle one that begins at 0."""
        assert store.base == 0
        self.nbytes -= store.nbytes
        store.nbytes, store.live = 0, True
        self.live[store] = None

    def mark_idle(self, store: KVStore[Layer]) -> None:
        """A live store becomes idle and keeps what it backs."""
        del self.live[store]
        store.live = False
        if store.deepest is not None:
            self.prune(store.deepest)
        start, end = store.span
        if start == 0 and store.reserved <= 2 * end:
            # kept as it is, free room included: it is likely to be continued
            store.trim(end)
        else:
            store.end = 0  # whatever it held: to be cut
        self._oversized[store] = None
        self.free_unused()

    def discard_store(self, store: KVStore[Layer]) -> None:
        """The content of a store is in doubt. Nodes which lie on another live sequence's path are
        backed by that one; the others go, with all that hangs below them."""
        self.live.pop(store, None)
        for node in sorted(store.nodes, key=end_of):
            if node not in store.nodes:
                continue  # went with one above
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
        """Forget what an idle leaf holds behind `end`, if anything. Ends with `fit`."""
        if leaf.start >= end:
            self.remove_leaf(leaf)
        elif leaf.end > end:
            assert not leaf.children
            self.detach_checkpoint(leaf)
            leaf.ids = leaf.ids[: end - leaf.start]
            self._oversized[leaf.store] = None

    def remove_leaf(self, leaf: RadixNode[Layer]) -> int:
        """Ends with `fit`. Returns a guess at the bytes that this will free."""
        assert not leaf.children
        assert leaf.parent is not None
        store = leaf.store
        freed = store.nbytes * len(leaf.ids) // max(1, store.end - store.base)
        self._detach_from_store(leaf)
        del leaf.parent.children[leaf.ids[0]]
        del self._lru[leaf]
        return freed + self.detach_checkpoint(leaf)

    def prune(self, node: RadixNode[Layer]) -> int:
        """Unlink a leaf that serves nobody, and then its parent if that serves nobody."""
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
        """Free what stores hold and no node needs."""
        while self._oversized:
            store, _ = self._oversized.popitem()
            if store.live:
                continue
            start, end = store.span
            if start == end:
                store.layers.clear()
            elif (start, end) != (store.base, store.end):
                self._keep_range(store, start, end)
            self.nbytes += store.update_nbytes()

    def evict(self, count: int) -> int:
        """Free `count` bytes, or all that can be. Returns how many things were given up.

        First what live stores hold as well: that is lost to nobody. Then leaves, longest unused
        first; but before the leaf of a path that nobody branched off, the checkpoints on it.
        """
        if count <= 0:
            return 0
        goal, given_up = self.nbytes - count, 0
        self._reassign_to_live()
        while self.nbytes > goal and (dropped := self._evict_leaves(self.nbytes - goal)):
            given_up += dropped
            self.free_unused()
        for node in self._lru:  # what is left are checkpoints along live paths
            if self.nbytes <= goal:
                break
            if node.checkpoint is not None:
                self.detach_checkpoint(node)
                given_up += 1
        return given_up

    def _evict_leaves(self, wanted: int) -> int:
        given_up = freed = 0
        while freed < wanted and (leaf := self._oldest_leaf()) is not None:
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
        # the nodes passed over are on live paths: few, and mostly at the other end
        return next((n for n in self._lru if not n.children and not n.store.live), None)

    def _reassign_to_live(self) -> None:
        """Let live stores back the whole of their paths."""
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
        """In place of what begins alike, if anything. Whoever calls it touches the path."""
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
            store.keep_range(start, end, self._evaluate)
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
            assert useful, "a leaf that serves nobody"
        stores = {node.store for node in nodes}
        for store in stores | set(self.live):
            store.check()
            assert store.nodes <= set(nodes)
            assert store.live == (store in self.live)
        checkpoints = sum(node.checkpoint_bytes for node in nodes)
        assert self.nbytes == checkpoints + sum(store.nbytes for store in stores)


def _spare_checkpoint(leaf: RadixNode[Layer]) -> RadixNode[Layer] | None:
    """The first node of a leaf's path that has a checkpoint and served nobody but this path. What
    ends last is likeliest to be continued, so it goes last."""
    spare, node = None, leaf.parent
    while node is not None and node.last_used == leaf.last_used and len(node.children) == 1:
        spare = node if node.checkpoint is not None else spare
        node = node.parent
    return spare
