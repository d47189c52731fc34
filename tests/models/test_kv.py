"""Layer caches: attention over them equals attention over the whole history, whatever happened."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.base import attention
from models.kv import STEP, KVCache, RecurrentCache, RotatingKVCache
from tests.models import reference

HEADS, DIM = 2, 4

# positive: append that many positions; negative: trim that many, if the cache can
Operations = st.lists(st.integers(-12, 24).filter(bool), min_size=1, max_size=12)


class History:
    """Every key and value that a cache should stand for."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.keys = np.zeros((HEADS, 0, DIM))
        self.values = np.zeros((HEADS, 0, DIM))

    def draw(self, length: int) -> np.ndarray[Any, Any]:
        return self.rng.standard_normal((HEADS, length, DIM))

    def append(self, cache: Any, length: int, window: int) -> None:
        """Append to cache and history; both must answer the new queries alike."""
        queries, keys, values = (self.draw(length) for _ in range(3))
        mask = cache.mask(length)
        got_keys, got_values = cache.update(_mx(keys), _mx(values))
        got = attention(_mx(queries), got_keys, got_values, scale=DIM**-0.5, mask=mask)
        self.keys = np.concatenate([self.keys, keys], 1)
        self.values = np.concatenate([self.values, values], 1)
        end = self.keys.shape[1]
        at = np.arange(end - length, end)[:, None]
        seen = np.arange(end)[None]
        visible = (seen <= at) & (seen > at - window)
        wanted = reference.attention(queries, self.keys, self.values, visible)
        np.testing.assert_allclose(np.array(got[0]), wanted, atol=1e-5)
        assert cache.offset == end

    def trim(self, cache: Any, count: int) -> None:
        if cache.can_trim(count):
            cache.trim(count)
            end = self.keys.shape[1] - count
            self.keys, self.values = self.keys[:, :end], self.values[:, :end]
        assert cache.offset == self.keys.shape[1]


def _mx(array: np.ndarray[Any, Any]) -> mx.array:
    return mx.array(array.astype(np.float32))[None]


@given(operations=Operations, seed=st.integers(0, 99))
def test_a_kv_cache_stands_for_its_history(operations: list[int], seed: int) -> None:
    cache, history = KVCache(), History(seed)
    for operation in operations:
        if operation > 0:
            history.append(cache, operation, window=1 << 30)
        else:
            history.trim(cache, -operation)


@given(operations=Operations, window=st.integers(1, 17), seed=st.integers(0, 99))
def test_a_rotating_cache_stands_for_its_window(
    operations: list[int], window: int, seed: int
) -> None:
    """Upstream lost the not yet overwritten tail when it appended after a wrap, and trimmed what
    was gone (Ollama's x/mlxrunner/cache of March 2026)."""
    cache, history = RotatingKVCache(window), History(seed)
    for operation in operations:
        if operation > 0:
            history.append(cache, operation, window)
        else:
            history.trim(cache, -operation)


@given(operations=Operations, window=st.integers(1, 17))
def test_a_copy_and_its_original_go_separate_ways(operations: list[int], window: int) -> None:
    for cache in (KVCache(), RotatingKVCache(window)):
        span = window if isinstance(cache, RotatingKVCache) else 1 << 30
        history = History(1)
        for operation in operations:
            if operation > 0:
                history.append(cache, operation, span)
        twin, other = cache.copy(), History(2)
        other.keys, other.values = history.keys, history.values
        other.append(twin, 1, span)
        history.append(cache, 3, span)
        other.append(twin, 2, span)


def test_a_growing_cache_copies_each_position_a_bounded_number_of_times() -> None:
    """256 at a time, as upstream grows, copies everything each 256 tokens."""
    cache, copied, capacity = KVCache(), 0, 0
    one = mx.zeros((1, 1, 1, 1))
    for _ in range(20 * STEP):
        cache.update(one, one)
        if cache.nbytes // 8 != capacity:
            copied, capacity = copied + cache.offset - 1, cache.nbytes // 8
    assert copied < 3 * 20 * STEP
    assert capacity < 2 * 20 * STEP


def test_a_copy_holds_no_free_room_and_not_the_original_buffer() -> None:
    cache = KVCache()
    cache.update(mx.zeros((1, 1, 10, 4)), mx.zeros((1, 1, 10, 4)))
    assert cache.nbytes == 2 * STEP * 4 * 4
    assert cache.copy().nbytes == 2 * 10 * 4 * 4


def test_a_rotating_cache_never_outgrows_its_window_by_single_writes() -> None:
    cache = RotatingKVCache(8)
    one = mx.zeros((1, 1, 1, 1))
    for _ in range(100):
        keys, _ = cache.update(one, one)
        assert keys.shape[2] <= 8
    assert cache.offset == 100


def test_a_wrapped_ring_can_go_back_only_as_far_as_its_window_allows() -> None:
    cache = RotatingKVCache(4)
    one = mx.zeros((1, 1, 1, 1))
    for _ in range(10):
        cache.update(one, one)
    assert cache.can_trim(1)
    assert not cache.can_trim(2)
    with pytest.raises(AssertionError):
        cache.trim(2)


def test_an_empty_cache_holds_nothing() -> None:
    for cache in (KVCache(), RotatingKVCache(4), RecurrentCache(2)):
        assert (cache.offset, cache.nbytes, cache.state()) == (0, 0, [])
        assert cache.can_trim(0)
        assert not cache.can_trim(1)
        assert cache.copy().offset == 0


def test_a_recurrent_cache_moves_forward_only_and_copies_by_sharing() -> None:
    cache = RecurrentCache(2)
    cache[0] = mx.ones((1, 3))
    cache.advance(5)
    twin = cache.copy()
    cache[0] = mx.zeros((1, 3))
    cache.advance(1)
    cache.trim(0)
    assert (cache.offset, twin.offset) == (6, 5)
    shared = twin[0]
    assert shared is not None
    assert shared.tolist() == [[1, 1, 1]]
    assert twin[1] is None
    assert cache.nbytes == 12
    assert not cache.can_trim(1)
