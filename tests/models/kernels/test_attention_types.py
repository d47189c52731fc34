"""Attention to keys and values of 16 bits: new ones are rounded once, all queries see the rounded
numbers, and the arithmetic is in float32."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import kernels
from tests.models.kernels.test_attention import (
    Case,
    Sequence,
    assert_same_bits,
    attend_at_once,
    attend_batch,
    cases,
    numbers,
)

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")

TYPES = pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
LARGEST_F16 = 65504.0


def round_in_mlx(array: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """The numbers as MLX rounds them."""
    return np.array(mx.array(array).astype(dtype).astype(mx.float32))


def start_sequence(case: Case, capacity: int, dtype: mx.Dtype) -> Sequence:
    row = Sequence(case, capacity)
    row.keys, row.values = row.keys.astype(dtype), row.values.astype(dtype)
    return row


@TYPES
@given(case=cases(), spare=st.integers(0, 9), data=st.data())
def test_attention_has_the_bits_of_float32_with_the_rounded_numbers(dtype, case, spare, data):
    """For any split into chunks, so a query also sees the rounded keys of its own chunk."""
    row, parts = start_sequence(case, case.length + spare, dtype), []
    while row.end < case.length:
        parts.append(row.see(data.draw(st.integers(1, case.length - row.end))))
    plain = replace(case, k=round_in_mlx(case.k, dtype), v=round_in_mlx(case.v, dtype))
    assert_same_bits(np.concatenate(parts, axis=2), attend_at_once(plain))
    assert row.keys.dtype == row.values.dtype == dtype


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("depth", [64, 130, 320])
@pytest.mark.parametrize("group", [1, 5])
def test_keys_of_any_length_give_the_same_bits_in_any_chunks(dtype, depth, group):
    """Whether keys are transposed depends on their length and on the number of queries."""
    shape = (1, 2, 66, depth)
    case = Case(q=numbers(0, 1, 2 * group, 66, depth), k=numbers(1, *shape), v=numbers(2, *shape))
    row = start_sequence(case, 66, dtype)
    parts = [row.see(count) for count in range(1, 12)]
    at_once = start_sequence(case, 66, dtype).see(66)
    assert_same_bits(np.concatenate(parts, axis=2), at_once)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_blocks_of_any_number_of_queries_give_the_same_bits(dtype, group):
    """The number of queries that share the conversion of keys grows with the number of keys."""
    length = 2100
    assert [OPS.max_rows_per_task(keys) for keys in (0, 300, 960, length)] == [24, 24, 40, 87]
    case = Case(
        q=numbers(0, 1, group, length, 16),
        k=numbers(1, 1, 1, length, 16),
        v=numbers(2, 1, 1, length, 16),
    )
    row, parts = start_sequence(case, length, dtype), []
    while row.end < length:
        parts.append(row.see(min(7 if row.end < 700 else 128, length - row.end)))
    at_once = start_sequence(case, length, dtype).see(length)
    assert_same_bits(np.concatenate(parts, axis=2), at_once)


def test_scores_of_long_contexts_need_limited_memory():
    for keys in (16_384, 100_000, 1_000_000):
        assert OPS.max_rows_per_task(keys) == max(24, (1 << 20) // keys)


@TYPES
def test_rows_of_a_batch_get_the_same_bits_as_alone(dtype):
    shape = (1, 2, 40, 32)
    each = [
        Case(q=numbers(s, 1, 4, 40, 32), k=numbers(s + 9, *shape), v=numbers(s + 20, *shape))
        for s in range(3)
    ]
    rows = [start_sequence(case, 40, dtype) for case in each]
    for row, done in zip(rows, (39, 12, 1), strict=True):
        row.see(done)
    ends = [row.end for row in rows]
    for out, case, end in zip(attend_batch(rows, 1), each, ends, strict=True):
        whole = start_sequence(case, 40, dtype).see(40)
        assert_same_bits(out, np.ascontiguousarray(whole[:, :, end : end + 1]))


@TYPES
@given(case=cases(), spare=st.integers(0, 20))
def test_a_ring_gives_the_same_bits_as_positions_in_order(dtype, case, spare):
    case = replace(case, window=case.window or 11)
    ring = start_sequence(case, case.window + spare, dtype)
    parts = [ring.see(1) for _ in range(case.length)]
    assert_same_bits(
        np.concatenate(parts, axis=2), start_sequence(case, case.length, dtype).see(case.length)
    )


def store(array: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """The numbers [n] as the kernel stores them."""
    row = mx.array(array)[None, None, None]
    empty = mx.zeros(row.shape, dtype)
    _, keys, _ = OPS.attend(row, row, row, [empty], [empty + 0], [0], [1], [0], [0], scale=1.0)
    return np.array(keys[0].astype(mx.float32)).reshape(-1)


@TYPES
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_numbers_are_rounded_as_mlx_rounds_them(dtype, bits):
    array = np.array(bits, np.uint32).view(np.float32)
    expected = array if dtype == mx.bfloat16 else np.clip(array, -LARGEST_F16, LARGEST_F16)
    np.testing.assert_array_equal(store(array, dtype), round_in_mlx(expected, dtype))


@TYPES
def test_ties_are_rounded_to_even(dtype):
    bits = 8 if dtype == mx.bfloat16 else 11
    halves = 1 + np.array([1, 3, 5, 7], np.float32) * 2.0**-bits
    tiny = np.array([2.0**-25, 3 * 2.0**-25, 2.0**-24, 6e-8, -(2.0**-14)], np.float32)
    for array in (halves, -halves, tiny):
        np.testing.assert_array_equal(store(array, dtype), round_in_mlx(array, dtype))


def test_float16_has_no_infinities():
    array = np.array([70000.0, -1e30, np.inf, 65519.0, np.nan], np.float32)
    expected = [LARGEST_F16, -LARGEST_F16, LARGEST_F16, LARGEST_F16, np.nan]
    np.testing.assert_array_equal(store(array, mx.float16), expected)


@TYPES
def test_a_shared_buffer_is_copied(dtype):
    case = Case(q=numbers(1, 1, 2, 9, 8), k=numbers(2, 1, 2, 9, 8), v=numbers(3, 1, 2, 9, 8))
    row = start_sequence(case, 9, dtype)
    row.see(4)
    keys = row.keys
    before = np.array(keys.astype(mx.float32))
    row.see(5)
    np.testing.assert_array_equal(np.array(keys.astype(mx.float32)), before)
    np.testing.assert_array_equal(
        np.array(row.keys.astype(mx.float32)), round_in_mlx(case.k, dtype)
    )


@TYPES
def test_a_buffer_that_is_not_contiguous_is_copied(dtype):
    case = Case(q=numbers(1, 1, 2, 6, 8), k=numbers(2, 1, 2, 6, 8), v=numbers(3, 1, 2, 6, 8))
    row = start_sequence(case, 6, dtype)
    row.see(5)
    turned = mx.contiguous(row.keys.swapaxes(2, 3)).swapaxes(2, 3)
    row.keys = turned
    last = row.see(1)
    expected = start_sequence(case, 6, dtype).see(6)[:, :, 5:]
    assert_same_bits(last, np.ascontiguousarray(expected))


def test_buffers_of_two_types_are_refused():
    one, small = mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 2, 4), mx.bfloat16)
    with pytest.raises(ValueError, match="in the type of the other one"):
        OPS.attend(one, one, one, [small], [one], [0], [1], [0], [0], scale=1.0)
    whole = [mx.zeros((1, 1, 2, 4), mx.int16)]
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        OPS.attend(one, one, one, whole, whole, [0], [1], [0], [0], scale=1.0)
