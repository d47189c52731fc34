"""A picture of a prefix cache at one moment, for people who watch an engine.

Knows: lengths, times, the relations of nodes. Must not know: token IDs, text, layer caches. A
snapshot therefore reveals nothing about the content of prompts except their lengths.
"""

from dataclasses import dataclass

# The maximum number of nodes in a snapshot. The most recently used nodes are included.
MAX_SNAPSHOT_NODES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixNode:
    """The cached tokens of positions [start, start + tokens).

    parent: the index of the parent in `PrefixSnapshot.nodes`; None if the node starts at 0.
    last_used: the Unix time of the last use. branches: the number of child nodes, including those
    that the snapshot omits. running: the number of running sequences that contain these tokens.
    """

    parent: int | None
    start: int
    tokens: int
    last_used: float
    branches: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSnapshot:
    """nodes: the most recently used nodes; each parent precedes its children. total_nodes: the
    number of nodes in the cache."""

    nodes: tuple[PrefixNode, ...] = ()
    total_nodes: int = 0
