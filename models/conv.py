"""The short causal depthwise convolution before a recurrent layer.

Knows: tensors, both layouts of the filters in checkpoints. Must not know: layers, caches.
"""

from collections.abc import Mapping
from functools import reduce

import mlx.core as mx
import mlx.nn as nn


class CausalConv(nn.Module):
    """Computes y[t] = sum over j of weight[j] * x[t - width + 1 + j], plus bias. weight: [D, width,
    1]."""

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros((channels, width, 1))
        if bias:
            self.bias = mx.zeros((channels,))

    def __call__(self, x: mx.array, tail: mx.array | None) -> tuple[mx.array, mx.array]:
        """Returns y [B, L, D] and the tail for the next call. x: [B, L, D]. tail: the width - 1
        positions before x, or None at the start of a sequence."""
        batch, length, channels = x.shape
        width = self.weight.shape[1]
        if tail is None:
            tail = mx.zeros((batch, width - 1, channels), x.dtype)
        x = mx.concatenate([tail, x], axis=1)
        y = (
            _conv_by_taps(x, self.weight)
            if _on_cpu()
            else mx.conv1d(x, self.weight, groups=channels)
        )
        if "bias" in self:
            y = y + self.bias
        # contiguous, because a slice would keep all of x in memory
        return y, mx.contiguous(x[:, length:])


class DepthwiseConv(nn.Module):
    """Computes y[t] = sum over j of weight[j] * x[t + j], plus bias. The caller pads x [B, L, D].
    weight: [D, width, 1]."""

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros((channels, width, 1))
        if bias:
            self.bias = mx.zeros((channels,))

    def __call__(self, x: mx.array) -> mx.array:
        if _on_cpu():
            y = _conv_by_taps(x, self.weight)
        else:
            y = mx.conv1d(x, self.weight, groups=x.shape[2])
        return y + self.bias if "bias" in self else y


def _on_cpu() -> bool:
    return mx.default_device().type == mx.DeviceType.cpu


def _conv_by_taps(x: mx.array, weight: mx.array) -> mx.array:
    """Adds the taps one by one. This is up to seven times as fast as MLX's CPU convolution, and the
    summation order does not depend on the number of positions."""
    length = x.shape[1] - weight.shape[1] + 1
    parts = (x[:, j : j + length] * weight[:, j, 0] for j in range(weight.shape[1]))
    return reduce(mx.add, parts)


def is_channels_first(weights: Mapping[str, mx.array], suffix: str) -> bool:
    """Returns whether these filters have the original layout, [D, 1, width]. Converters for MLX
    write [D, width, 1]."""
    return any(
        name.endswith(suffix) and array.shape[1] == 1 and array.shape[2] > 1
        for name, array in weights.items()
    )


def channels_last(weights: Mapping[str, mx.array], suffix: str) -> dict[str, mx.array]:
    """Returns the same weights with these filters as [D, width, 1]."""
    if not is_channels_first(weights, suffix):
        return dict(weights)
    return {
        name: array.swapaxes(1, 2) if name.endswith(suffix) else array
        for name, array in weights.items()
    }
