"""Layers that cannot be divided: which checkpoint restores them, and where to take new ones.

Knows: nodes with checkpoints, positions. Must not know: ids, stores, the tree's upkeep.
"""

from collections.abc import Sequence

from app.core.ports import Layer
from app.engine.prefix.stores import RadixNode

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
