"""The queue of embedding jobs, and pooling and normalization, against the definitions of the
papers."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from app.core.requests import PoolingType
from app.engine.embed_queue import normalize, pool_hidden_states, pooling_weights, vectors_to_bytes

HIDDEN: Any = np.random.default_rng(0).standard_normal((3, 7, 5)).astype(np.float32)
LENGTHS = (7, 1, 4)


def numbers(vector: bytes | None) -> Any:
    assert vector is not None
    return np.frombuffer(vector, dtype="<f4")


def batch_weights(pooling: PoolingType) -> mx.array:
    return mx.array([pooling_weights(pooling, length, 0, 7) for length in LENGTHS])


def test_mean_pooling_ignores_padding() -> None:
    expected = [HIDDEN[row, :length].mean(axis=0) for row, length in enumerate(LENGTHS)]
    np.testing.assert_allclose(
        pool_hidden_states(mx.array(HIDDEN), batch_weights("mean")), expected, atol=1e-6
    )


def test_cls_pooling_uses_the_first_position() -> None:
    np.testing.assert_array_equal(
        pool_hidden_states(mx.array(HIDDEN), batch_weights("cls")), HIDDEN[:, 0]
    )


def test_last_pooling_ignores_padding() -> None:
    expected = [HIDDEN[row, length - 1] for row, length in enumerate(LENGTHS)]
    np.testing.assert_array_equal(
        pool_hidden_states(mx.array(HIDDEN), batch_weights("last")), expected
    )


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_chunks_add_up_to_the_full_vector(pooling: PoolingType, cut: int) -> None:
    full = pool_hidden_states(mx.array(HIDDEN[:1]), mx.array([pooling_weights(pooling, 7, 0, 7)]))
    parts = [
        pool_hidden_states(
            mx.array(HIDDEN[:1, start:end]),
            mx.array([pooling_weights(pooling, 7, start, end - start)]),
        )
        for start, end in ((0, cut), (cut, 7))
    ]
    np.testing.assert_allclose(parts[0] + parts[1], full, atol=1e-6)


def test_padding_may_hold_any_value() -> None:
    """16-bit states may overflow in the padding."""
    hidden = HIDDEN.copy()
    hidden[1, 1:], hidden[2, 4:] = math.nan, math.inf
    for pooling in ("mean", "last"):
        clean, padded = (
            pool_hidden_states(mx.array(h), batch_weights(pooling)) for h in (HIDDEN, hidden)
        )
        np.testing.assert_array_equal(clean, padded)


@pytest.mark.parametrize("dimensions", [None, 5, 3, 1])
def test_a_vector_is_truncated_before_it_is_normalized(dimensions: int | None) -> None:
    [vector] = vectors_to_bytes(normalize(mx.array(HIDDEN[0, :1]), [dimensions]), [dimensions])
    expected = HIDDEN[0, 0, :dimensions]
    np.testing.assert_allclose(numbers(vector), expected / np.linalg.norm(expected), atol=1e-6)


def test_each_row_has_its_own_dimensions() -> None:
    dimensions = [2, None, 4]
    vectors = vectors_to_bytes(normalize(mx.array(HIDDEN[:, 0]), dimensions), dimensions)
    assert [len(numbers(v)) for v in vectors] == [2, 5, 4]
    for row, vector in enumerate(vectors):
        expected = HIDDEN[row, 0, : dimensions[row]]
        np.testing.assert_allclose(numbers(vector), expected / np.linalg.norm(expected), atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_neither_underflow_nor_overflow(scale: float) -> None:
    [vector] = vectors_to_bytes(normalize(mx.array([[3.0, 4.0]]) * scale, [None]), [None])
    np.testing.assert_allclose(numbers(vector), [0.6, 0.8], rtol=1e-5)


def test_zero_vectors_stay_zero_and_non_finite_ones_are_none() -> None:
    rows = mx.array([[0.0, 0.0], [math.nan, 1.0], [1.0, 0.0], [1.0, math.inf]])
    zeros, *others = vectors_to_bytes(normalize(rows, [None] * 4), [None] * 4)
    assert list(numbers(zeros)) == [0, 0]
    assert [vector is None for vector in others] == [True, False, True]


def test_16_bit_states_are_pooled_in_float32() -> None:
    hidden = mx.ones((1, 3000, 1), dtype=mx.bfloat16)
    got = pool_hidden_states(hidden, mx.array([pooling_weights("mean", 3000, 0, 3000)]))
    assert (got.dtype, got.item()) == (mx.float32, pytest.approx(1, abs=1e-4))
