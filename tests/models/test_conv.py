"""The short causal convolution: sequences in any chunks, filters in both layouts."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from models.conv import CausalConv, channels_last, is_channels_first

CHANNELS = 5


def make_conv(width: int, *, bias: bool = False) -> CausalConv:
    rng = np.random.default_rng(width)
    conv = CausalConv(CHANNELS, width, bias=bias)
    conv.weight = mx.array(rng.standard_normal((CHANNELS, width, 1)).astype(np.float32))
    if bias:
        conv.bias = mx.array(rng.standard_normal(CHANNELS).astype(np.float32))
    return conv


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_each_position_depends_on_itself_and_the_preceding_ones(width: int, bias: bool) -> None:
    conv = make_conv(width, bias=bias)
    x = np.random.default_rng(0).standard_normal((2, 9, CHANNELS)).astype(np.float32)
    weight = np.array(conv.weight)[..., 0]
    expected = np.zeros(x.shape) + (np.array(conv.bias) if bias else 0)
    for t, j in itertools.product(range(9), range(width)):
        if t - j >= 0:
            expected[:, t] += weight[:, width - 1 - j] * x[:, t - j]
    got, tail = conv(mx.array(x), None)
    np.testing.assert_allclose(np.array(got), expected, atol=1e-5)
    np.testing.assert_array_equal(np.array(tail), x[:, 9 - (width - 1) :])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("pieces", [[1] * 9, [2, 1, 6], [1, 8], [8, 1]])
def test_chunks_can_be_shorter_than_the_filter(width: int, pieces: list[int]) -> None:
    conv = make_conv(width)
    x = mx.array(np.random.default_rng(1).standard_normal((1, 9, CHANNELS)).astype(np.float32))
    expected, last = conv(x, None)
    tail, start, parts = None, 0, list[mx.array]()
    for length in pieces:
        part, tail = conv(x[:, start : start + length], tail)
        assert tail.shape == (1, width - 1, CHANNELS)
        parts.append(part)
        start += length
    np.testing.assert_allclose(np.array(mx.concatenate(parts, axis=1)), expected, atol=1e-6)
    assert tail is not None
    np.testing.assert_array_equal(np.array(tail), np.array(last))


def test_channels_first_filters_are_transposed() -> None:
    theirs = {"a.conv.weight": mx.arange(6.0).reshape(2, 1, 3), "a.weight": mx.zeros((2, 1, 3))}
    assert is_channels_first(theirs, ".conv.weight")
    converted = channels_last(theirs, ".conv.weight")
    assert converted["a.conv.weight"].tolist() == [[[0], [1], [2]], [[3], [4], [5]]]
    assert converted["a.weight"].shape == (2, 1, 3)
    assert not is_channels_first(converted, ".conv.weight")
    assert channels_last(converted, ".conv.weight").keys() == converted.keys()
