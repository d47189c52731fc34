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
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic

from app.core.ports import Layer
from app.engine.prefix.matching import common_prefix
from app.engine.prefix.stores import Node, Store, end_of


class Tree(Generic[Layer]):
    """settle: makes copied layers independent of what they were copied from. whole: whether there
    are layers that checkpoints are needed for; then an idle leaf without one is of no use, and is
    not kept."""

    def __init__(self, settle: Callable[[Sequence[Layer]], None], *, whole: bool) -> None:
        self._settle = settle
        self.whole = whole
        self.root = Node[Layer]((), 0, None, Store[Layer]([]))
        self.nbytes = 0
        self.live: dict[Store[Layer], None] = {}
        # Every node before its parent, since a use moves a path to the end, deepest node first.
        # So the first one that could be given up is also the one used longest ago.
        self._order = OrderedDict[Node[Layer], None]()
        self._uses = 0
        self._loose: dict[Store[Layer], None] = {}  # may hold more than their nodes need

    def walk(self, ids: tuple[int, ...]) -> tuple[list[Node[Layer]], int]:
        """The nodes which `ids` go through, and how many ids they share: the last node may be
        matched in part. Time is that of comparing the ids once, however much else is cached."""
        path: list[Node[Layer]] = []
        node, at = self.root, 0
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            path.append(child)
            at += common_prefix(child.ids, ids, at)
            if at < child.end:
                break
            node = child
        return path, at

    def extend(self, ids: tuple[int, ...], store: Store[Layer]) -> list[Node[Layer]]:
        """Put a live sequence into the tree. Its store backs only what nobody else does already."""
        path, at = self.walk(ids)
        if at < len(ids):
            last = self.node_at(path, at)
            if last.store is store and not last.children and last.checkpoint is None:
                last.ids += ids[at:]
            else:
                path.append(self._new(ids[at:], at, last, store))
        self.touch(path)
        return path

    def node_at(self, path: list[Node[Layer]], end: int) -> Node[Layer]:
        """The last node of a path that goes to `end` at least: split, if it goes on behind."""
        if not path:
            return self.root
        lower = path[-1]
        if end < lower.end:
            # the lower part stays the same object: its children and its place by age are right
            assert lower.parent is not None
            cut = end - lower.start
            upper = self._new(lower.ids[:cut], lower.start, lower.parent, lower.store)
            lower.ids, lower.start, lower.parent = lower.ids[cut:], end, upper
            upper.children[lower.ids[0]] = lower
            path[-1] = upper
            self.touch(path)
        return path[-1]

    def touch(self, path: Sequence[Node[Layer]]) -> None:
        self._uses += 1
        for node in reversed(path):
            node.used = self._uses
            self._order.move_to_end(node)

    def back(self, node: Node[Layer], store: Store[Layer]) -> None:
        """From now on `store`, which holds the same, backs the node. Ends with `fit`."""
        self._let_go(node)
        node.store = store
        store.nodes.add(node)

    def attach(self, node: Node[Layer], checkpoint: tuple[Layer, ...]) -> None:
        assert node.checkpoint is None
        node.checkpoint = checkpoint
        self.nbytes += node.checkpoint_bytes

    def detach(self, node: Node[Layer]) -> int:
        """The bytes it came to."""
        freed = node.checkpoint_bytes
        self.nbytes -= freed
        node.checkpoint = None
        return freed

    def lend(self, store: Store[Layer]) -> None:
        """A store goes on loan: a new one, or an idle one that begins at 0."""
        assert store.base == 0
        self.nbytes -= store.nbytes
        store.nbytes, store.live = 0, True
        self.live[store] = None

    def take_back(self, store: Store[Layer]) -> None:
        """A live store becomes idle and keeps what it backs."""
        del self.live[store]
        store.live = False
        if store.deepest is not None:
            self.prune(store.deepest)
        start, end = store.span
        if start == 0 and store.room <= 2 * end:
            # kept as it is, free room included: it is likely to be continued
            store.trim(end)
        else:
            store.end = 0  # whatever it held: to be cut
        self._loose[store] = None
        self.fit()

    def drop(self, store: Store[Layer]) -> None:
        """The content of a store is in doubt. Nodes which lie on another live sequence's path are
        backed by that one; the others go, with all that hangs below them."""
        self.live.pop(store, None)
        for node in sorted(store.nodes, key=end_of):
            if node not in store.nodes:
                continue  # went with one above
            below = node.subtree()
            heir = next((n.store for n in below if n.store.live and n.store is not store), None)
            if heir is not None:
                self.back(node, heir)
                continue
            for each in reversed(below):
                self.unlink(each)
            assert node.parent is not None
            self.prune(node.parent)
        store.live = False
        self._loose[store] = None
        self.fit()

    def cut_back(self, leaf: Node[Layer], end: int) -> None:
        """Forget what an idle leaf holds behind `end`, if anything. Ends with `fit`."""
        if leaf.start >= end:
            self.unlink(leaf)
        elif leaf.end > end:
            assert not leaf.children
            self.detach(leaf)
            leaf.ids = leaf.ids[: end - leaf.start]
            self._loose[leaf.store] = None

    def unlink(self, leaf: Node[Layer]) -> int:
        """Ends with `fit`. Returns a guess at the bytes that this will free."""
        assert not leaf.children
        assert leaf.parent is not None
        store = leaf.store
        freed = store.nbytes * len(leaf.ids) // max(1, store.end - store.base)
        self._let_go(leaf)
        del leaf.parent.children[leaf.ids[0]]
        del self._order[leaf]
        return freed + self.detach(leaf)

    def prune(self, node: Node[Layer]) -> int:
        """Unlink a leaf that serves nobody, and then its parent if that serves nobody."""
        freed = 0
        while (
            self.whole
            and node.parent is not None
            and not (node.children or node.store.live or node.checkpoint)
        ):
            parent = node.parent
            freed += self.unlink(node)
            node = parent
        return freed

    def fit(self) -> None:
        """Free what stores hold and no node needs."""
        while self._loose:
            store, _ = self._loose.popitem()
            if store.live:
                continue
            start, end = store.span
            if start == end:
                store.layers.clear()
            elif (start, end) != (store.base, store.end):
                self._cut(store, start, end)
            self.nbytes += store.count()

    def evict(self, count: int) -> int:
        """Free `count` bytes, or all that can be. Returns how many things were given up.

        First what live stores hold as well: that is lost to nobody. Then leaves, longest unused
        first; but before the leaf of a path that nobody branched off, the checkpoints on it.
        """
        if count <= 0:
            return 0
        goal, given_up = self.nbytes - count, 0
        self._hand_over()
        while self.nbytes > goal and (dropped := self._evict_leaves(self.nbytes - goal)):
            given_up += dropped
            self.fit()
        for node in self._order:  # what is left are checkpoints along live paths
            if self.nbytes <= goal:
                break
            if node.checkpoint is not None:
                self.detach(node)
                given_up += 1
        return given_up

    def _evict_leaves(self, wanted: int) -> int:
        given_up = freed = 0
        while freed < wanted and (leaf := self._oldest_leaf()) is not None:
            spare = _spare_checkpoint(leaf)
            if spare is not None:
                freed += self.detach(spare)
            else:
                parent = leaf.parent
                assert parent is not None
                freed += self.unlink(leaf) + self.prune(parent)
            given_up += 1
        return given_up

    def _oldest_leaf(self) -> Node[Layer] | None:
        # the nodes passed over are on live paths: few, and mostly at the other end
        return next((n for n in self._order if not n.children and not n.store.live), None)

    def _hand_over(self) -> None:
        """Let live stores back the whole of their paths."""
        for store in self.live:
            node = store.deepest or self.root
            while node.parent is not None:
                if not node.store.live:
                    self.back(node, store)
                node = node.parent
        self.fit()

    def _new(
        self, ids: tuple[int, ...], start: int, parent: Node[Layer], store: Store[Layer]
    ) -> Node[Layer]:
        """In place of what begins alike, if anything. Whoever calls it touches the path."""
        node = Node(ids, start, parent, store)
        parent.children[ids[0]] = node
        store.nodes.add(node)
        self._order[node] = None
        return node

    def _let_go(self, node: Node[Layer]) -> None:
        node.store.nodes.discard(node)
        self._loose[node.store] = None

    def _cut(self, store: Store[Layer], start: int, end: int) -> None:
        try:
            store.cut(start, end, self._settle)
        except BaseException:
            self.drop(store)
            raise

    def check(self) -> None:
        nodes = self.root.subtree()[1:]
        assert set(nodes) == set(self._order)
        assert not self._loose
        places = {node: place for place, node in enumerate(self._order)}
        for node in nodes:
            node.check()
            assert node.parent is not None
            if node.parent is not self.root:
                assert places[node] < places[node.parent]
                assert node.used <= node.parent.used
            assert self.whole or node.checkpoint is None
            useful = node.children or node.store.live or node.checkpoint or not self.whole
            assert useful, "a leaf that serves nobody"
        stores = {node.store for node in nodes}
        for store in stores | set(self.live):
            store.check()
            assert store.nodes <= set(nodes)
            assert store.live == (store in self.live)
        checkpoints = sum(node.checkpoint_bytes for node in nodes)
        assert self.nbytes == checkpoints + sum(store.nbytes for store in stores)


def _spare_checkpoint(leaf: Node[Layer]) -> Node[Layer] | None:
    """The first node of a leaf's path that has a checkpoint and served nobody but this path. What
    ends last is likeliest to be continued, so it goes last."""
    spare, node = None, leaf.parent
    while node is not None and node.used == leaf.used and len(node.children) == 1:
        spare = node if node.checkpoint is not None else spare
        node = node.parent
    return spare
