"""Layer caches: after any operations, attention over a cache equals attention over the history."""

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.kv import STEP, KVCache
from models.recurrent import RecurrentCache
from models.rope import make_rope
from models.rotating_kv import RotatingKVCache
from models.sdpa import scaled_dot_product_attention
from tests.models import reference

HEADS, DIM = 2, 4

# positive: append that many positions; negative: trim that many, if the cache supports it
Operations = st.lists(st.integers(-12, 24).filter(bool), min_size=1, max_size=12)


class History:
    """All keys and values that a cache should contain."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.keys = np.zeros((HEADS, 0, DIM))
        self.values = np.zeros((HEADS, 0, DIM))

    def draw(self, length: int) -> np.ndarray[Any, Any]:
        return self.rng.standard_normal((HEADS, length, DIM))

    def append(self, cache: Any, length: int, window: int) -> None:
        """Append to cache and history, and compare attention of the new queries over both."""
        queries, keys, values = (self.draw(length) for _ in range(3))
        mask = cache.mask(length)
        got_keys, got_values = cache.update(_mx(keys), _mx(values))
        got = scaled_dot_product_attention(
            _mx(queries), got_keys, got_values, scale=DIM**-0.5, mask=mask
        )
        self.keys = np.concatenate([self.keys, keys], 1)
        self.values = np.concatenate([self.values, values], 1)
        end = self.keys.shape[1]
        at = np.arange(end - length, end)[:, None]
        seen = np.arange(end)[None]
        visible = (seen <= at) & (seen > at - window)
        expected = reference.attention(queries, self.keys, self.values, visible)
        np.testing.assert_allclose(np.array(got[0]), expected, atol=1e-5)
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
def test_a_kv_cache_agrees_with_its_history(operations: list[int], seed: int) -> None:
    cache, history = KVCache(), History(seed)
    for operation in operations:
        if operation > 0:
            history.append(cache, operation, window=1 << 30)
        else:
            history.trim(cache, -operation)


@given(operations=Operations, window=st.integers(1, 17), seed=st.integers(0, 99))
def test_a_rotating_cache_agrees_with_its_window(
    operations: list[int], window: int, seed: int
) -> None:
    """Upstream lost the part of the tail that was not yet overwritten when it appended after a
    wrap, and trimmed positions that it no longer had (Ollama's x/mlxrunner/cache of March 2026)."""
    cache, history = RotatingKVCache(window), History(seed)
    for operation in operations:
        if operation > 0:
            history.append(cache, operation, window)
        else:
            history.trim(cache, -operation)


@given(operations=Operations, window=st.integers(1, 17))
def test_a_copy_and_its_original_are_independent(operations: list[int], window: int) -> None:
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
    """Growth by 256 positions, as upstream, would copy the whole cache every 256 tokens."""
    cache, copied, capacity = KVCache(), 0, 0
    one = mx.zeros((1, 1, 1, 1))
    for _ in range(20 * STEP):
        cache.update(one, one)
        if cache.nbytes // 8 != capacity:
            copied, capacity = copied + cache.offset - 1, cache.nbytes // 8
    assert copied < 3 * 20 * STEP
    assert capacity < 2 * 20 * STEP


def test_a_copy_has_no_spare_capacity_and_its_own_buffer() -> None:
    cache = KVCache()
    cache.update(mx.zeros((1, 1, 10, 4)), mx.zeros((1, 1, 10, 4)))
    assert cache.nbytes == 2 * STEP * 4 * 4
    assert cache.copy().nbytes == 2 * 10 * 4 * 4


def test_single_tokens_do_not_grow_a_rotating_cache_beyond_its_window() -> None:
    cache = RotatingKVCache(8)
    one = mx.zeros((1, 1, 1, 1))
    for _ in range(100):
        keys, _ = cache.update(one, one)
        assert keys.shape[2] <= 8
    assert cache.offset == 100


def test_a_wrapped_rotating_cache_can_be_trimmed_within_its_window_only() -> None:
    cache = RotatingKVCache(4)
    one = mx.zeros((1, 1, 1, 1))
    for _ in range(10):
        cache.update(one, one)
    assert cache.can_trim(1)
    assert not cache.can_trim(2)
    with pytest.raises(AssertionError):
        cache.trim(2)


def test_an_empty_cache_has_no_bytes() -> None:
    for cache in (KVCache(), RotatingKVCache(4), RecurrentCache(2)):
        assert (cache.offset, cache.nbytes, cache.state()) == (0, 0, [])
        assert cache.can_trim(0)
        assert not cache.can_trim(1)
        assert cache.copy().offset == 0


def test_a_recurrent_cache_cannot_be_trimmed_and_copies_share_arrays() -> None:
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


# Slices, reservations, shifts: the operations that prefix caches need


def cache_of(length: int, seed: int = 0) -> tuple[KVCache, mx.array, mx.array]:
    keys, values = (
        mx.random.normal((1, HEADS, length, DIM), key=mx.random.key(s)) for s in (seed, seed + 1)
    )
    cache = KVCache()
    if length:
        cache.update(keys, values)
    return cache, keys, values


def content(cache: KVCache) -> tuple[mx.array, mx.array]:
    """Keys and values of the cache, read by appending one position to a copy."""
    twin, zero = cache.copy(), mx.zeros((1, HEADS, 1, DIM))
    keys, values = twin.update(zero, zero)
    return keys[..., : cache.offset, :], values[..., : cache.offset, :]


@given(length=st.integers(1, 300), cuts=st.lists(st.integers(0, 300), max_size=3))
def test_joined_slices_equal_the_original(length: int, cuts: list[int]) -> None:
    cache, keys, values = cache_of(length)
    edges = [0, *sorted(min(cut, length) for cut in cuts), length]
    rebuilt = KVCache()
    for start, end in itertools.pairwise(edges):
        piece = cache.slice(start, end)
        assert piece.offset == end - start
        rebuilt.append(piece, 0, end - start)
    got_keys, got_values = content(rebuilt)
    assert mx.array_equal(got_keys, keys)
    assert mx.array_equal(got_values, values)


def test_a_range_of_another_cache_can_be_appended() -> None:
    source, keys, _ = cache_of(20)
    cache, own, _ = cache_of(3, seed=5)
    cache.append(source, 4, 9)
    assert mx.array_equal(content(cache)[0], mx.concatenate([own, keys[..., 4:9, :]], axis=2))
    source.update(mx.ones((1, HEADS, 1, DIM)), mx.ones((1, HEADS, 1, DIM)))
    assert cache.offset == 8


def test_a_slice_is_independent_of_its_source_and_has_its_size_only() -> None:
    cache, keys, _ = cache_of(300)
    piece = cache.slice(10, 20)
    cache.trim(290)
    cache.update(mx.ones((1, HEADS, 5, DIM)), mx.ones((1, HEADS, 5, DIM)))
    assert mx.array_equal(content(piece)[0], keys[..., 10:20, :])
    assert piece.nbytes == 2 * 10 * HEADS * DIM * 4


def test_a_reservation_is_allocated_once_with_the_estimated_size() -> None:
    probe, _, _ = cache_of(1)
    cache = KVCache()
    cache.reserve(1000)
    assert cache.nbytes == 0
    one = mx.zeros((1, HEADS, 1, DIM))
    cache.update(one, one)
    assert cache.nbytes == probe.estimate_nbytes(1000, 8)
    reserved = cache.nbytes
    for _ in range(999):
        cache.update(one, one)
    assert cache.nbytes == reserved


@pytest.mark.parametrize("window", [4, 300])
def test_a_rotating_cache_never_exceeds_its_estimate(window: int) -> None:
    probe, chunk = RotatingKVCache(window), 16
    one = mx.zeros((1, HEADS, 1, DIM))
    probe.update(one, one)
    cache = RotatingKVCache(window)
    for length in [16, 16, 1, 16, 1, 1] * 10:
        several = mx.zeros((1, HEADS, length, DIM))
        cache.update(several, several)
        assert cache.nbytes <= probe.estimate_nbytes(cache.offset, chunk)


@given(length=st.integers(1, 40), start=st.integers(0, 40), count=st.integers(0, 40))
def test_remove_drops_positions_and_rerotates_later_keys(
    length: int, start: int, count: int
) -> None:
    """Keys after the gap equal keys rotated for their new positions."""
    rope = make_rope(dims=DIM, theta=100.0, max_positions=64)
    start = min(start, length)
    end = min(start + count, length)
    raw = mx.random.normal((1, HEADS, length, DIM), key=mx.random.key(3))
    cache = KVCache()
    cache.update(rope(raw, 0), raw)
    cache.remove(start, end, rope.rerotate)
    left = mx.concatenate([raw[..., :start, :], raw[..., end:, :]], axis=2)
    assert cache.offset == left.shape[2]
    keys, values = content(cache)
    np.testing.assert_allclose(np.array(keys), np.array(rope(left, 0)), atol=1e-5)
    assert mx.array_equal(values, left)
