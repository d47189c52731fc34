"""The single-entry prefix cache over fake layers: pure bookkeeping, any history."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.prefix.single import SinglePrefixCache


@dataclass
class FakeLayer:
    """Remembers the ids themselves, so that a wrong cut cannot hide."""

    trims: bool = True
    ids: tuple[int, ...] = ()

    @property
    def offset(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return 8 * len(self.ids)

    def can_trim(self, count: int) -> bool:
        return count <= len(self.ids) and (self.trims or count == 0)

    def trim(self, count: int) -> None:
        assert self.can_trim(count)
        self.ids = self.ids[: len(self.ids) - count]


def cache_of(*trims: bool, grid: int = 1) -> SinglePrefixCache[FakeLayer]:
    return SinglePrefixCache(lambda: [FakeLayer(t) for t in trims or (True, True)], grid=grid)


def evaluate(cache: SinglePrefixCache[FakeLayer], ids: list[int], upto: int | None = None) -> int:
    """Run a prompt through; the number of cached ids."""
    lease = cache.begin(ids)
    assert 0 <= lease.cached < len(ids)
    for layer in lease.kv:
        assert layer.ids == tuple(ids[: lease.cached]), "the caches stand for something else"
        layer.ids = tuple(ids[: max(lease.cached, len(ids) if upto is None else upto)])
    lease.commit(ids, keep=len(ids))
    cache.check()
    return lease.cached


Ids = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(
    prompts=st.lists(st.tuples(Ids, st.integers(0, 12)), max_size=8),
    trims=st.lists(st.booleans(), min_size=1, max_size=3),
    grid=st.sampled_from([1, 2, 3]),
)
def test_a_lease_always_stands_for_the_prompt_so_far(
    prompts: list[tuple[list[int], int]], trims: list[bool], grid: int
) -> None:
    cache = cache_of(*trims, grid=grid)
    for ids, upto in prompts:
        assert evaluate(cache, ids, min(upto, len(ids))) % grid == 0


@given(first=Ids, second=Ids)
def test_trimmable_layers_share_the_longest_common_prefix(
    first: list[int], second: list[int]
) -> None:
    cache = cache_of()
    evaluate(cache, first)
    common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    assert evaluate(cache, second) == min(common, len(second) - 1)


def test_one_id_is_always_left_to_evaluate() -> None:
    cache = cache_of()
    evaluate(cache, [1, 2, 3])
    assert evaluate(cache, [1, 2, 3]) == 2
    assert evaluate(cache, [1, 2]) == 1
    assert evaluate(cache, [1]) == 0


def test_layers_that_cannot_be_cut_serve_pure_extensions_only() -> None:
    cache = cache_of(True, False)
    evaluate(cache, [1, 2, 3])
    assert evaluate(cache, [1, 2, 3, 4]) == 3
    assert evaluate(cache, [1, 2, 3, 5]) == 0


def test_only_what_every_layer_has_seen_is_remembered() -> None:
    cache = cache_of()
    lease = cache.begin([1, 2, 3, 4])
    lease.kv[0].ids, lease.kv[1].ids = (1, 2, 3), (1, 2)
    lease.commit([1, 2, 3, 4], keep=4)
    cache.check()
    assert evaluate(cache, [1, 2, 3, 4]) == 2


def test_keep_cuts_where_layers_can_be_cut_and_is_ignored_where_not() -> None:
    for trims, cached in ((True, 2), (False, 4)):
        cache = cache_of(trims)
        lease = cache.begin([1, 2, 3, 4])
        lease.kv[0].ids = (1, 2, 3, 4)
        lease.commit([1, 2, 3, 4], keep=2)
        assert evaluate(cache, [1, 2, 3, 4, 5]) == cached


def test_on_a_grid_what_cannot_be_cut_to_it_is_forgotten() -> None:
    cache = cache_of(False, grid=4)
    evaluate(cache, [1, 2, 3, 4, 5])
    assert cache.nbytes == 0


def test_a_second_lease_gets_fresh_caches_and_the_last_to_end_is_remembered() -> None:
    cache = cache_of()
    evaluate(cache, [1, 2, 3])
    one, two = cache.begin([1, 2, 3, 4]), cache.begin([1, 2, 3, 5])
    assert (one.cached, two.cached) == (3, 0)
    for lease, ids in ((one, (1, 2, 3, 4)), (two, (1, 2, 3, 5))):
        for layer in lease.kv:
            layer.ids = ids
        lease.commit(list(ids), keep=4)
    assert evaluate(cache, [1, 2, 3, 5, 6]) == 4


def test_discarded_caches_serve_nobody_and_a_lease_ends_once() -> None:
    cache = cache_of()
    lease = cache.begin([1, 2])
    lease.discard()
    with pytest.raises(AssertionError):
        lease.commit([1, 2], keep=2)
    assert evaluate(cache, [1, 2]) == 0


def test_bytes_are_counted_until_the_cache_is_cleared() -> None:
    cache = cache_of()
    evaluate(cache, [1, 2, 3])
    assert cache.nbytes == 2 * 3 * 8
    cache.clear()
    assert cache.nbytes == 0
    assert evaluate(cache, [1, 2, 3]) == 0
