"""What a vector is made of, by the arithmetic of the papers."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from app.core.embeddings import PoolingType
from app.engine.embedder import normalise, pool_hidden_states, pooling_weights, vectors_to_bytes

HIDDEN: Any = np.random.default_rng(0).standard_normal((3, 7, 5)).astype(np.float32)
LENGTHS = (7, 1, 4)


def numbers(vector: bytes | None) -> Any:
    assert vector is not None
    return np.frombuffer(vector, dtype="<f4")


def shares(pooling: PoolingType) -> mx.array:
    return mx.array([pooling_weights(pooling, length, 0, 7) for length in LENGTHS])


def test_the_mean_is_of_the_positions_that_are_there() -> None:
    wanted = [HIDDEN[row, :length].mean(axis=0) for row, length in enumerate(LENGTHS)]
    np.testing.assert_allclose(
        pool_hidden_states(mx.array(HIDDEN), shares("mean")), wanted, atol=1e-6
    )


def test_the_last_is_the_last_that_is_there() -> None:
    wanted = [HIDDEN[row, length - 1] for row, length in enumerate(LENGTHS)]
    np.testing.assert_array_equal(pool_hidden_states(mx.array(HIDDEN), shares("last")), wanted)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_pieces_sum_to_the_whole(pooling: PoolingType, cut: int) -> None:
    whole = pool_hidden_states(mx.array(HIDDEN[:1]), mx.array([pooling_weights(pooling, 7, 0, 7)]))
    parts = [
        pool_hidden_states(
            mx.array(HIDDEN[:1, start:end]),
            mx.array([pooling_weights(pooling, 7, start, end - start)]),
        )
        for start, end in ((0, cut), (cut, 7))
    ]
    np.testing.assert_allclose(parts[0] + parts[1], whole, atol=1e-6)


def test_what_stands_behind_the_end_may_be_anything() -> None:
    """Sixteen bits may overflow where nobody looks."""
    hidden = HIDDEN.copy()
    hidden[1, 1:], hidden[2, 4:] = math.nan, math.inf
    for pooling in ("mean", "last"):
        clean, foul = (pool_hidden_states(mx.array(h), shares(pooling)) for h in (HIDDEN, hidden))
        np.testing.assert_array_equal(clean, foul)


@pytest.mark.parametrize("dimensions", [None, 5, 3, 1])
def test_a_vector_is_cut_first_and_then_brought_to_length_one(dimensions: int | None) -> None:
    [vector] = vectors_to_bytes(normalise(mx.array(HIDDEN[0, :1]), [dimensions]), [dimensions])
    wanted = HIDDEN[0, 0, :dimensions]
    np.testing.assert_allclose(numbers(vector), wanted / np.linalg.norm(wanted), atol=1e-6)


def test_each_row_is_cut_by_itself() -> None:
    dimensions = [2, None, 4]
    vectors = vectors_to_bytes(normalise(mx.array(HIDDEN[:, 0]), dimensions), dimensions)
    assert [len(numbers(v)) for v in vectors] == [2, 5, 4]
    for row, vector in enumerate(vectors):
        wanted = HIDDEN[row, 0, : dimensions[row]]
        np.testing.assert_allclose(numbers(vector), wanted / np.linalg.norm(wanted), atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_neither_small_nor_large_numbers_are_lost_in_squares(scale: float) -> None:
    [vector] = vectors_to_bytes(normalise(mx.array([[3.0, 4.0]]) * scale, [None]), [None])
    np.testing.assert_allclose(numbers(vector), [0.6, 0.8], rtol=1e-5)


def test_zeros_stay_zeros_and_what_is_no_number_is_told() -> None:
    rows = mx.array([[0.0, 0.0], [math.nan, 1.0], [1.0, 0.0], [1.0, math.inf]])
    zeros, *others = vectors_to_bytes(normalise(rows, [None] * 4), [None] * 4)
    assert list(numbers(zeros)) == [0, 0]
    assert [vector is None for vector in others] == [True, False, True]


def test_sixteen_bits_are_pooled_in_thirty_two() -> None:
    hidden = mx.ones((1, 3000, 1), dtype=mx.bfloat16)
    got = pool_hidden_states(hidden, mx.array([pooling_weights("mean", 3000, 0, 3000)]))
    assert (got.dtype, got.item()) == (mx.float32, pytest.approx(1, abs=1e-4))
