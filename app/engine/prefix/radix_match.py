"""The match of a prompt with the radix tree: which cached prefix can be reused, and whether its
layers can be leased without a copy.

Knows: nodes and stores of the tree, positions. Must not know: tensors, leases, the changes to the
tree that a lease makes (radix.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from app.core.jobs import CacheMiss
from app.engine.prefix.cache import Layer, usable_length
from app.engine.prefix.radix_tree import KVStore, RadixNode, RadixTree

# The number of cached tokens after the point of divergence that a cache miss reports.
_MISS_IDS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch(Generic[Layer]):
    """The match of a prompt with the tree.

    path: the nodes that match the prompt. The last one may match only partially.
    matched: the number of tokens that the prompt shares with the path.
    usable: the number of matched tokens that may be reused.
    cached: the number of tokens that are reused, limited to a position at which every layer can be
        restored.
    checkpoint: the node whose checkpoint is used, if any.
    exclusive: the nodes at the end of the path that only this prompt uses, last node first.
    """

    path: Sequence[RadixNode[Layer]] = ()
    matched: int = 0
    usable: int = 0
    cached: int = 0
    checkpoint: RadixNode[Layer] | None = None
    exclusive: Sequence[RadixNode[Layer]] = ()

    def extendable_store(self) -> KVStore[Layer] | None:
        """Returns the idle store that contains exactly this path, if no other sequence needs its
        content after the cached part, otherwise None."""
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

    def divisible_store(self) -> KVStore[Layer] | None:
        """Returns the idle store that contains the cached part of this path, if less follows in it
        than the cached part, otherwise None."""
        if self.cached == 0:
            return None
        store = self.path[0].store
        if store.live or store.end - self.cached >= self.cached:
            return None
        if any(node.store is not store for node in self.path if node.start < self.cached):
            return None
        return store

    def continued_store(self) -> KVStore[Layer] | None:
        """Returns the idle store whose layers can be leased without a copy of the prefix, otherwise
        None."""
        return self.extendable_store() or self.divisible_store()

    def nodes_to_move(self, store: KVStore[Layer]) -> list[RadixNode[Layer]]:
        """Returns the nodes of this store that other prompts may need after the cached part."""
        return [n for n in store.nodes if n.end > self.cached and n not in self.exclusive]

    def explain_miss(self) -> CacheMiss:
        """Returns the reason for the cache miss. Call this only if there is a miss."""
        if self.cached < self.usable:
            return CacheMiss(position=self.cached, reason="no_state")
        if self.matched == 0:
            return CacheMiss(position=0, reason="empty")
        last = self.path[-1]
        cached_ids = last.ids[self.matched - last.start :]
        if not cached_ids and last.children:
            cached_ids = max(last.children.values(), key=_last_used).ids
        return CacheMiss(
            position=self.matched, reason="diverged", cached_ids=cached_ids[:_MISS_IDS_SHOWN]
        )


def match_prefix(
    tree: RadixTree[Layer],
    ids: tuple[int, ...],
    *,
    alignment: int,
    atomic: Sequence[tuple[int, int]] = (),
) -> PrefixMatch[Layer]:
    """Looks up a prompt without changing the tree. Takes time linear in the number of tokens,
    independent of the cache size. atomic: see `PrefixCache.begin`."""
    path, matched = tree.match(ids)
    # The last token must be computed, because the output starts from its hidden state.
    usable = cached = usable_length(min(matched, len(ids) - 1), alignment, atomic)
    checkpoint = None
    if tree.needs_checkpoints:
        cached, checkpoint = find_restorable(path, usable)
        while (allowed := usable_length(cached, alignment, atomic)) < cached:
            cached, checkpoint = find_restorable(path, allowed)
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
    """Returns the idle nodes at the end of a path that no other sequence uses. The prompt must
    match all of them."""
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


# The maximum number of nodes after the end of a prompt to search for a checkpoint that can be
# trimmed.
_MAX_LATER_NODES = 16


def find_restorable(
    path: Sequence[RadixNode[Layer]], usable: int
) -> tuple[int, RadixNode[Layer] | None]:
    """Returns how many of the first `usable` positions can be restored, and the node with the
    required checkpoint.

    `path` contains the nodes that cover these positions, and may be longer. A checkpoint after
    `usable` is preferred if it can be trimmed to `usable`, for example if a sliding window is not
    full yet. Otherwise, the last checkpoint before `usable` is chosen.
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
