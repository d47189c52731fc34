"""The nodes of the radix tree, and the stores of layer caches that back them.

Knows: token IDs, layer caches as `LayerKV`, bytes. Must not know: the tree as a whole, leases.

    store   live   [0 ................... 90)     the caches of a running sequence: they hold its
                                                  whole path, are only appended to, and may be
                                                  copied as far as they are in the tree
    store   idle         [40 ........ 80)         the part that a finished sequence backed

Each node is backed by one store, which contains the node's positions of the divisible layers. A
store backs only nodes on one path. The state of indivisible layers is stored in a checkpoint at the
end of a node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic

from app.engine.prefix.cache import Layer

# The number of bytes of a store that are copied before the copies are awaited, so that at most this
# much of a store, or one layer, is in memory twice.
MAX_COPY_BYTES = 256 << 20


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
