"""What the radix tree has of a prompt, and what can be done with it.

Knows: nodes, stores, positions. Must not know: how layers are copied or lent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from app.core.jobs import CacheMiss
from app.core.ports import Layer
from app.engine.prefix.checkpoints import find_restorable
from app.engine.prefix.stores import KVStore, RadixNode
from app.engine.prefix.tree import RadixTree

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
