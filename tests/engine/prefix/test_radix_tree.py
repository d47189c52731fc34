"""Snapshots of a radix tree: the shape, the bound, running sequences, and no effect on the tree."""

import random

import pytest

from tests.engine.prefix.contract import History, begin, evaluate, prefill, random_operations
from tests.engine.prefix.radix_content import Cache, assert_consistent, cache_of


def assert_matches_tree(cache: Cache, max_nodes: int) -> None:
    """The snapshot has the shape of the tree, as far as it reaches."""
    tree = cache._tree
    every_node = tree.root.subtree()[1:]
    snapshot = tree.take_snapshot(max_nodes)
    assert snapshot.total_nodes == len(every_node)
    assert len(snapshot.nodes) == min(max_nodes, len(every_node))
    shown = tree.recently_used(max_nodes)
    running = [
        {node for node in every_node if deepest is node or deepest.is_descendant_of(node)}
        for deepest in (store.deepest for store in tree.live)
        if deepest is not None
    ]
    for index, (node, found) in enumerate(zip(shown, snapshot.nodes, strict=True)):
        assert (found.start, found.tokens) == (node.start, len(node.ids))
        assert found.branches == len(node.children)
        assert found.last_used == node.used_at
        if node.parent is tree.root:
            assert found.parent is None
        else:
            assert found.parent is not None
            assert found.parent < index, "a parent comes after its child"
            assert shown[found.parent] is node.parent
        if max_nodes >= len(every_node):
            assert found.running == sum(node in path for path in running)


@pytest.mark.parametrize("kinds", ["k", "kwr"])
@pytest.mark.parametrize("max_nodes", [3, 200])
def test_in_any_history_a_snapshot_has_the_shape_of_the_tree(kinds: str, max_nodes: int) -> None:
    for seed in range(60):
        cache = cache_of(kinds, checkpoint_every=3, max_bytes=(None, 400)[seed % 2])
        check = lambda: assert_matches_tree(cache, max_nodes)  # noqa: B023, E731  # used at once
        History(cache, 1, check).play(random_operations(random.Random(seed)))
        cache.check()
        assert_consistent(cache)


def test_running_sequences_are_counted_along_their_paths() -> None:
    cache = cache_of()
    evaluate(cache, [1, 2, 3, 4])
    leases = [(begin(cache, ids), ids) for ids in ([1, 2, 3, 4, 5], [1, 2, 9, 9])]
    for lease, ids in leases:
        prefill(lease, ids)
    nodes = cache.snapshot(200).nodes
    shared = next(node for node in nodes if node.parent is None)
    assert (shared.tokens, shared.branches, shared.running) == (2, 2, 2)
    for lease, ids in leases:
        lease.commit(ids, keep=len(ids))
    assert all(node.running == 0 for node in cache.snapshot(200).nodes)
