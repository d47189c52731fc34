"""What the radix tree has of a prompt, and what can be done with it.

Knows: nodes, stores, positions. Must not know: how layers are copied or lent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from app.core.jobs import Miss
from app.core.ports import Layer
from app.engine.prefix.checkpoints import restorable
from app.engine.prefix.stores import Node, Store
from app.engine.prefix.tree import Tree

# how many of the cached ids a miss tells, where other ones were wanted
_TOLD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[Layer]):
    """path: the nodes that a prompt goes through, the last perhaps in part. matched: ids in common
    with them. usable: how many of these may be cached at all. cached: how many are, since every
    layer can be restored there, by that checkpoint if one is needed. own: the nodes at the path's
    end, last first, that nobody but this prompt has a use for."""

    path: Sequence[Node[Layer]] = ()
    matched: int = 0
    usable: int = 0
    cached: int = 0
    checkpoint: Node[Layer] | None = None
    own: Sequence[Node[Layer]] = ()

    def continuable(self) -> Store[Layer] | None:
        """The idle store that holds all of the path and nothing else, if there is one, and if
        nobody else needs what it holds behind the cached part."""
        if self.cached == 0:
            return None
        store = self.path[0].store
        if store.live or store.end != self.path[-1].end:
            return None
        if any(node.store is not store for node in self.path):
            return None
        if any(node.end > self.cached and node not in self.own for node in self.path):
            return None
        return store

    def miss(self) -> Miss:
        """Why no more is cached. Only when more was asked for."""
        if self.cached < self.usable:
            return Miss(at=self.cached, reason="no_state")
        if self.matched == 0:
            return Miss(at=0, reason="empty")
        last = self.path[-1]
        had = last.ids[self.matched - last.start :]
        if not had and last.children:
            had = max(last.children.values(), key=_used).ids
        return Miss(at=self.matched, reason="diverged", had=had[:_TOLD])


def find(tree: Tree[Layer], ids: tuple[int, ...], *, grid: int) -> Found[Layer]:
    """Changes nothing. Time is that of comparing the ids, however much is cached."""
    path, matched = tree.walk(ids)
    # the last id must be evaluated: its hidden state is where the answer starts
    usable = min(matched, len(ids) - 1)
    usable -= usable % grid
    cached, checkpoint = restorable(path, usable) if tree.whole else (usable, None)
    own = _own(path, matched) if cached == usable > 0 else ()
    return Found(
        path=path,
        matched=matched,
        usable=usable,
        cached=cached,
        checkpoint=checkpoint,
        own=own,
    )


def _own(path: Sequence[Node[Layer]], matched: int) -> Sequence[Node[Layer]]:
    """The nodes at the end of a path which idle and lead to nothing else than the end of a prompt
    that matches them all."""
    own: list[Node[Layer]] = []
    if matched < path[-1].end:
        return own
    for node in reversed(path):
        if node.store.live or len(node.children) > bool(own):
            break
        own.append(node)
    return own


def _used(node: Node[Layer]) -> int:
    return node.used
