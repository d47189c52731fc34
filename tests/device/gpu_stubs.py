"""Builds the graphs that a GPU would get, on a machine without one.

On a GPU, each function of mx.fast, and the conversion of quantized weights, is one primitive. On a
CPU, MLX composes them of up to thirty. Here, each one is a stub of one node, with the right shapes
and wrong numbers. The models and the engine choose what they choose on a GPU, because MLX reports
one. Imports nothing but MLX, so that benchmarks/graph_worker.py can use it with mlx-lm.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **_: Any) -> mx.array:
    return mx.depends(x, [x if weight is None else weight])


def layer_norm(x: mx.array, *_: Any, **__: Any) -> mx.array:
    return mx.depends(x, [x])


def rope(x: mx.array, dims: int, *, offset: Any, **_: Any) -> mx.array:
    return mx.depends(x, [offset if isinstance(offset, mx.array) else mx.array(offset)])


def scaled_dot_product_attention(
    q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, sinks: Any = None, **_: Any
) -> mx.array:
    inputs = [k, v, *(extra for extra in (mask, sinks) if isinstance(extra, mx.array))]
    if q.shape[-1] == v.shape[-1]:
        return mx.depends(q, inputs)
    return mx.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)  # one node, and nothing before it


def gated_delta_update(
    q: mx.array, k: mx.array, v: mx.array, gamma: mx.array, beta: mx.array, state: mx.array
) -> list[mx.array]:
    depends: Any = mx.depends
    return depends([v, state], [q, k, gamma, beta])


class MetalKernel:
    """A kernel with source code, whose outputs are inputs of the same shape."""

    def __init__(self, **_: Any) -> None: ...

    def __call__(
        self, *, inputs: list[Any], output_shapes: list[tuple[int, ...]], **_: Any
    ) -> list[mx.array]:
        arrays = [array for array in inputs if isinstance(array, mx.array)]
        outputs = [
            next(array for array in arrays if array.shape == tuple(shape))
            for shape in output_shapes
        ]
        depends: Any = mx.depends
        return depends(outputs, arrays)


def dequantize(w: mx.array, scales: mx.array, *rest: Any, **options: Any) -> mx.array:
    """The rows of an embedding: [..., packed], with a scale per group."""
    width = scales.shape[-1] * (options.get("group_size") or 64)
    return mx.depends(mx.zeros((*w.shape[:-1], width), scales.dtype), [w, scales])


_FAST = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "rope": rope,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "gated_delta_update": gated_delta_update,
    "metal_kernel": MetalKernel,
}


@contextmanager
def simulate_metal() -> Generator[None]:
    """MLX reports a Metal GPU, and its fused functions are stubs. Arrays are still evaluated on the
    CPU."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(mx, "default_device", lambda: mx.Device(mx.gpu)))
        stack.enter_context(patch.object(mx.metal, "is_available", lambda: True))
        stack.enter_context(patch.object(mx, "dequantize", dequantize))
        for name, stub in _FAST.items():
            stack.enter_context(patch.object(mx.fast, name, stub))
        yield
