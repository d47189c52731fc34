"""The snapshot of a radix tree.

Knows: the nodes of the tree. Must not know: the users of snapshots.
"""

from collections import Counter

from app.core.jobs import PrefixNode, PrefixSnapshot
from app.engine.prefix.cache import Layer
from app.engine.prefix.radix_node import RadixNode
from app.engine.prefix.radix_tree import RadixTree


def take_radix_snapshot(tree: RadixTree[Layer], max_nodes: int) -> PrefixSnapshot:
    """Returns the `max_nodes` most recently used nodes. The time depends on this number, and not on
    the size of the tree."""
    nodes = tree.recently_used(max_nodes)
    places = {node: place for place, node in enumerate(nodes)}
    running = Counter[RadixNode[Layer]]()
    for store in tree.live:
        node = store.deepest
        while node is not None and node in places:
            running[node] += 1
            node = node.parent
    return PrefixSnapshot(
        nodes=tuple(
            PrefixNode(
                parent=None if node.parent is None else places.get(node.parent),
                start=node.start,
                tokens=len(node.ids),
                last_used=node.used_at,
                branches=len(node.children),
                running=running[node],
            )
            for node in nodes
        ),
        total_nodes=len(tree),
    )
