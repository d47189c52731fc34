"""Checks of the content of the radix cache."""

from app.engine.prefix.radix import RadixPrefixCache
from app.engine.prefix.radix_tree import RadixNode
from tests.engine.prefix.layers import FakeLayer, layers

Cache = RadixPrefixCache[FakeLayer]


def cache_of(kinds: str = "k", alignment: int = 1, **options) -> Cache:
    return RadixPrefixCache(lambda: layers(kinds), alignment=alignment, **options)


def assert_consistent(cache: Cache) -> None:
    """Each node's store and checkpoint hold the ids that lead to it."""
    paths: dict[RadixNode[FakeLayer] | None, tuple[int, ...]] = {cache._tree.root: ()}
    for node in cache._tree.root.subtree()[1:]:
        path = paths[node] = (*paths[node.parent], *node.ids)
        base = node.store.base
        for layer in node.store.layers:
            assert layer.ids[node.start - base : node.end - base] == node.ids
            assert base or layer.ids[: node.end] == path
        for layer in node.checkpoint or ():
            assert layer.ids == path


def idle_positions(cache: Cache) -> int:
    """Positions that idle stores hold, without their free capacity."""
    stores = {node.store for node in cache._tree.root.subtree()[1:]}
    return sum(store.end - store.base for store in stores if not store.live)
