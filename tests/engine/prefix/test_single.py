"""The single-entry prefix cache: the contract of all policies, and its own rules."""

import pytest

from app.engine.prefix.single import SinglePrefixCache
from tests.engine.prefix.contract import *  # noqa: F403  # the suite that every policy passes
from tests.engine.prefix.contract import MakeCache, begin, evaluate, feed
from tests.engine.prefix.layers import FakeLayer, layers


@pytest.fixture(scope="module")
def make_cache() -> MakeCache:
    return cache_of


def cache_of(kinds: str, alignment: int = 1) -> SinglePrefixCache[FakeLayer]:
    return SinglePrefixCache(lambda: layers(kinds), alignment=alignment)


def test_layers_that_cannot_be_trimmed_serve_only_extensions() -> None:
    cache = cache_of("kr")
    evaluate(cache, [1, 2, 3])
    assert evaluate(cache, [1, 2, 3, 4]) == 3
    assert evaluate(cache, [1, 2, 3, 5]) == 0


def test_layers_that_cannot_be_trimmed_to_the_alignment_are_dropped() -> None:
    cache = cache_of("kr", alignment=4)
    evaluate(cache, [1, 2, 3, 4, 5], alignment=4)
    assert cache.nbytes == 0


def test_a_second_lease_gets_new_caches_and_the_last_commit_is_kept() -> None:
    cache = cache_of("kk")
    evaluate(cache, [1, 2, 3])
    one, two = begin(cache, [1, 2, 3, 4]), begin(cache, [1, 2, 3, 5])
    assert (one.cached, two.cached) == (3, 0)
    for lease, ids in ((one, [1, 2, 3, 4]), (two, [1, 2, 3, 5])):
        feed(lease, ids[lease.cached :])
        lease.commit(ids, keep=4)
    assert evaluate(cache, [1, 2, 3, 5, 6]) == 4


def test_the_entry_itself_is_leased_and_keeps_its_capacity() -> None:
    cache = cache_of("kr")
    evaluate(cache, [1, 2, 3])
    before = cache.nbytes
    lease = begin(cache, [1, 2, 3, 4])
    assert cache.nbytes == 0
    lease.commit([1, 2, 3], keep=3)
    assert cache.nbytes == before + 8  # reserved for the longer prompt


def test_there_are_no_checkpoint_positions() -> None:
    cache = cache_of("kr")
    assert begin(cache, [1, 2, 3, 4, 5], turn_ends=[1, 3]).checkpoint_positions == ()
