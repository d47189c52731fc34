"""Objects that survive a full collection are not visited again, and are freed all the same."""

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from app.core.runtime import freeze_survivors, import_without_collections


class Node:
    def __init__(self) -> None:
        self.others: list[Node] = []


@pytest.fixture(autouse=True)
def restore_frozen() -> Iterator[None]:
    """The objects of the test run are frozen (tests/conftest.py), and unfrozen by the context."""
    yield
    gc.freeze()


def is_visited(node: Node) -> bool:
    return any(one is node for one in gc.get_objects())


def test_survivors_of_a_full_collection_are_not_visited_again():
    with freeze_survivors():
        node = Node()
        assert is_visited(node)
        gc.collect(1)
        assert is_visited(node)
        gc.collect()
        assert not is_visited(node)
    assert is_visited(node)


def test_a_frozen_object_is_freed_with_its_last_reference():
    with freeze_survivors():
        node = Node()
        gc.collect()
        reference = weakref.ref(node)
        del node
        assert reference() is None


def test_cycles_of_new_objects_are_found_and_all_others_after_the_context():
    with freeze_survivors():
        old = Node()
        old.others.append(old)
        gc.collect()
        new = Node()
        new.others.append(new)
        references = weakref.ref(old), weakref.ref(new)
        del old, new
        gc.collect()
        assert [reference() is None for reference in references] == [False, True]
    gc.collect()
    assert references[0]() is None


def test_the_collector_is_as_before_after_the_context():
    before = gc.get_threshold(), len(gc.callbacks)
    with freeze_survivors():
        assert gc.get_threshold() != before[0]
    assert (gc.get_threshold(), len(gc.callbacks)) == before


def test_imports_cause_no_collections():
    node = Node()
    before = sum(generation["collections"] for generation in gc.get_stats())
    with import_without_collections():
        kept = [Node() for _ in range(10 * gc.get_threshold()[0])]
        assert not gc.isenabled()
    assert sum(generation["collections"] for generation in gc.get_stats()) == before
    assert gc.isenabled()
    assert not is_visited(node)
    assert not is_visited(kept[-1])


def test_collections_stay_small_while_objects_accumulate():
    """Without freezing, the last full collections would visit everything."""
    visited: list[int] = []

    def count(phase: str, info: object) -> None:
        if phase == "start" and isinstance(info, dict) and info["generation"] == 2:
            visited.append(len(gc.get_objects()))

    with freeze_survivors():
        # the collector waits for a quarter of what the last full collection left, which may be much
        # in a run of tests
        gc.collect()
        gc.callbacks.append(count)
        nodes = [Node() for _ in range(200_000)]
        gc.callbacks.remove(count)
    assert len(nodes) == 200_000
    assert visited or sys.version_info >= (3, 14), "newer versions collect in increments"
    assert all(number < 60_000 for number in visited)
