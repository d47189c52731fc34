"""The single-entry prefix cache: the contract of all policies, and what is its own."""

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


def test_layers_that_cannot_be_cut_serve_pure_extensions_only() -> None:
    cache = cache_of("kr")
    evaluate(cache, [1, 2, 3])
    assert evaluate(cache, [1, 2, 3, 4]) == 3
    assert evaluate(cache, [1, 2, 3, 5]) == 0


def test_on_a_grid_what_cannot_be_cut_to_it_is_forgotten() -> None:
    cache = cache_of("kr", alignment=4)
    evaluate(cache, [1, 2, 3, 4, 5], alignment=4)
    assert cache.nbytes == 0


def test_a_second_lease_gets_fresh_caches_and_the_last_to_end_is_remembered() -> None:
    cache = cache_of("kk")
    evaluate(cache, [1, 2, 3])
    one, two = begin(cache, [1, 2, 3, 4]), begin(cache, [1, 2, 3, 5])
    assert (one.cached, two.cached) == (3, 0)
    for lease, ids in ((one, [1, 2, 3, 4]), (two, [1, 2, 3, 5])):
        feed(lease, ids[lease.cached :])
        lease.commit(ids, keep=4)
    assert evaluate(cache, [1, 2, 3, 5, 6]) == 4


def test_the_entry_goes_on_loan_itself_and_keeps_its_room() -> None:
    cache = cache_of("kr")
    evaluate(cache, [1, 2, 3])
    before = cache.nbytes
    lease = begin(cache, [1, 2, 3, 4])
    assert cache.nbytes == 0
    lease.commit([1, 2, 3], keep=3)
    assert cache.nbytes == before + 8  # reserved for the longer prompt


def test_nothing_is_stopped_for() -> None:
    cache = cache_of("kr")
    assert begin(cache, [1, 2, 3, 4, 5], turn_ends=[1, 3]).checkpoint_positions == ()
