"""Caches that store keys and values in 16 bits: each number is rounded once, when it is written,
and every reader gets the rounded number. With the kernels and without them, the numbers are equal.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import kernels
from models.kv import STEP, KVBuffers, KVCache, round_to, set_kv_dtype
from models.mla import LatentCache
from models.mlx_lm_cache import MlxLmKVCache, MlxLmLayerCache, MlxLmRotatingKVCache
from models.recurrent import RecurrentCache
from models.rope import make_rope
from models.rotating_kv import RotatingKVCache
from tests.models.kernel_switch import BOTH, use_kernels

HEADS, DIM, WINDOW = 2, 8, 7
TYPES = pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
KINDS: dict[str, Callable[[], Any]] = {
    "all": KVCache,
    "window": lambda: RotatingKVCache(WINDOW),
    "latent": LatentCache,
    "mlx-lm": MlxLmKVCache,
    "mlx-lm window": lambda: MlxLmRotatingKVCache(WINDOW),
}
ALL = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, dtype: mx.Dtype | None) -> Any:
    cache = KINDS[kind]()
    cache.set_dtype(dtype)
    return cache


def storage_dtype(kind: str, dtype: mx.Dtype) -> mx.Dtype:
    """Only the attention kernel reads 16 bits."""
    return dtype if kind in ("all", "window") and kernels.ops() is not None else mx.float32


def draw(length: int, seed: int) -> mx.array:
    rng = np.random.default_rng(seed)
    return mx.array(rng.standard_normal((1, HEADS, length, DIM)).astype(np.float32))


def as_numpy(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32))


@TYPES
@ALL
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_a_cache_returns_the_numbers_of_a_float32_cache_with_rounded_ones(
    dtype: mx.Dtype, kind: str, lengths: list[int]
) -> None:
    cache, plain = make(kind, dtype), make(kind, None)
    for seed, length in enumerate(lengths):
        keys, values = draw(length, seed), draw(length, seed + 100)
        got = cache.update(keys, values)
        expected = plain.update(*(round_to(a, dtype).astype(mx.float32) for a in (keys, values)))
        for one, other in zip(got, expected, strict=True):
            assert one.dtype == mx.float32
            np.testing.assert_array_equal(np.array(one), np.array(other))
        assert cache.precision == dtype
        assert {array.dtype for array in cache.state()} == {storage_dtype(kind, dtype)}
        ratio = 4 // storage_dtype(kind, dtype).size
        assert ratio * cache.nbytes == plain.nbytes
        assert ratio * cache.estimate_nbytes(900, 64) == plain.estimate_nbytes(900, 64)


@TYPES
@ALL
def test_copies_keep_the_type_and_the_bits(dtype: mx.Dtype, kind: str) -> None:
    cache = make(kind, dtype)
    cache.update(draw(5, 1), draw(5, 2))
    twin: Any = cache.copy()
    next_position = draw(1, 3), draw(1, 4)
    for one, other in zip(cache.update(*next_position), twin.update(*next_position), strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))
    assert twin.precision == dtype
    assert {array.dtype for array in twin.state()} == {storage_dtype(kind, dtype)}


@TYPES
def test_slices_are_joined_without_rounding_again(dtype: mx.Dtype) -> None:
    """As the radix tree stores and joins them."""
    whole, joined = KVCache(), KVCache()
    set_kv_dtype([whole, joined], dtype)
    whole.update(draw(STEP + 40, 1), draw(STEP + 40, 2))
    for part in (whole.slice(0, 30), whole.slice(30, STEP + 40)):
        joined.append(part, 0, part.offset)
    for one, other in zip(whole.state(), joined.state(), strict=True):
        length = whole.offset
        assert one.dtype == other.dtype == storage_dtype("all", dtype)
        np.testing.assert_array_equal(
            as_numpy(one[..., :length, :]), as_numpy(other[..., :length, :])
        )


@TYPES
def test_a_context_shift_rounds_the_rotated_keys_once_more(dtype: mx.Dtype) -> None:
    rope = make_rope(dims=DIM, theta=1e4, max_positions=1000)
    cache = KVCache()
    cache.set_dtype(dtype)
    cache.update(draw(20, 1), draw(20, 2))
    keys, values = cache.read(20, mx.float32)
    cache.remove(4, 9, rope.rerotate)
    moved = round_to(rope.rerotate(keys[..., 9:, :], -5), dtype).astype(mx.float32)
    found_keys, found_values = cache.read(15, mx.float32)
    expected_keys = mx.concatenate([keys[..., :4, :], moved], axis=2)
    expected_values = mx.concatenate([values[..., :4, :], values[..., 9:, :]], axis=2)
    np.testing.assert_array_equal(np.array(found_keys), np.array(expected_keys))
    np.testing.assert_array_equal(np.array(found_values), np.array(expected_values))
    assert cache.precision == dtype


def attend_in_chunks(
    cache: KVBuffers, lengths: Sequence[int], rounded: mx.Dtype = mx.float32
) -> np.ndarray[Any, Any]:
    """rounded: the type to which keys and values are rounded before the cache gets them."""
    outs: list[mx.array] = []
    for seed, length in enumerate(lengths):
        queries = mx.concatenate([draw(length, seed + 50), draw(length, seed + 60)], axis=1)
        keys, values = (
            round_to(a, rounded).astype(mx.float32)
            for a in (draw(length, seed), draw(length, seed + 100))
        )
        outs.append(cache.attend(queries, keys, values, scale=DIM**-0.5))
    return np.array(mx.concatenate(outs, axis=2))


@TYPES
@pytest.mark.parametrize("kind", ["all", "window"])
@pytest.mark.parametrize("by_kernels", BOTH)
def test_attention_sees_the_rounded_numbers(dtype: mx.Dtype, kind: str, by_kernels: bool) -> None:
    """Against a float32 cache that gets rounded numbers, with the same operations: equal bits. The
    stored numbers are those that MLX's operations store."""
    lengths = (9, 1, 1, 4, 1)

    with use_kernels(enabled=by_kernels):
        cache = make(kind, dtype)
        got = attend_in_chunks(cache, lengths)
        expected = attend_in_chunks(make(kind, None), lengths, dtype)
    np.testing.assert_array_equal(got, expected)
    with use_kernels(enabled=False):
        other = make(kind, dtype)
        attend_in_chunks(other, lengths)
    for one, two in zip(cache.written(), other.written(), strict=True):
        np.testing.assert_array_equal(as_numpy(one), as_numpy(two))


def test_a_type_that_is_not_narrower_has_no_effect() -> None:
    """Activations have 16 bits on a GPU, so a wider cache would contain the same numbers."""
    for activations, kv in ((mx.bfloat16, mx.float32), (mx.bfloat16, mx.float16)):
        cache = KVCache()
        cache.set_dtype(kv)
        keys, _ = cache.update(draw(3, 1).astype(activations), draw(3, 2).astype(activations))
        assert {array.dtype for array in (keys, *cache.state())} == {activations}


def test_float16_saturates() -> None:
    cache = KVCache()
    cache.set_dtype(mx.float16)
    keys, _ = cache.update(mx.full((1, 1, 2, 4), 1e6), mx.full((1, 1, 2, 4), -mx.inf))
    assert (np.array(keys) == 65504).all()


def test_recurrent_states_keep_their_type() -> None:
    cache = RecurrentCache(1)
    layer = MlxLmLayerCache([MlxLmKVCache()], is_cache_list=False)
    set_kv_dtype([cache, layer], mx.bfloat16)
    cache[0] = mx.ones((1, 4))
    assert [array.dtype for array in cache.state()] == [mx.float32]
    part: Any = layer.caches[0]
    part.update(draw(2, 1), draw(2, 2))
    assert part.copy().precision == mx.bfloat16
