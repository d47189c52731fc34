"""Where the radix cache keeps layer states: stores and the nodes they back.

Knows: layers as `LayerKV`, ranges of positions, bytes. Must not know: which node is looked for,
which is given up.

Each node is backed by one store, which holds its positions of the divisible layers; a store backs
nodes of one path. The state of the other layers is kept whole, in a checkpoint at a node's end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic

from app.core.ports import Layer


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
