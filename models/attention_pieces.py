"""Computes arrays in pieces, with at most two pieces in flight, and detects the attention device.

Knows: arrays, the current device. Must not know: attention scores, caches, architectures.

MLX evaluates lazily, and it evaluates independent branches of a graph breadth first. Pieces that
were only built would therefore all be in memory at the same time. So the caller's thread waits for
the second to last piece before it builds the next one. The device always has one piece to compute.
"""

from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx

from models import kernels
from models.attention_route import UNWAITED_BYTES, AttentionDevice, AttentionShape


def detect_attention_device(*arrays: mx.array) -> AttentionDevice:
    """Returns the device that computes attention over arrays like these."""
    if kernels.ops(*arrays) is not None:
        return AttentionDevice.KERNELS
    if mx.default_device().type == mx.DeviceType.cpu:
        return AttentionDevice.CPU
    return AttentionDevice.METAL if mx.metal.is_available() else AttentionDevice.CUDA


def device_of_shape(shape: AttentionShape) -> AttentionDevice:
    """Returns the device that computes attention of this shape. Our kernels compute only float32,
    and only the attention of our own layers."""
    device = detect_attention_device()
    supported = shape.itemsize == mx.float32.size and shape.splittable
    if device is AttentionDevice.KERNELS and not supported:
        return AttentionDevice.CPU
    return device


def compute_pieces(
    pieces: Iterable[Callable[[], mx.array]], inputs: Sequence[mx.array], piece_bytes: int
) -> list[mx.array]:
    """Returns the results of `pieces`. Each function builds one result from `inputs`. piece_bytes:
    the memory that one piece needs. Small pieces are only built, and not evaluated."""
    if piece_bytes <= UNWAITED_BYTES:
        return [build() for build in pieces]
    # earlier layers may have pieces in flight
    mx.eval(inputs)
    results: list[mx.array] = []
    for build in pieces:
        if len(results) > 1:
            mx.eval(results[-2])
        result = build()
        mx.async_eval(result)
        results.append(result)
    return results
