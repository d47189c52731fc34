"""Hidden states -> one vector a row.

Knows: tensors, what pooling means. Must not know: inputs, models, who runs.

Both kinds are sums with weights over positions, so that rows of either kind are pooled together,
and a row in several pieces: mean gives each position one over the length, last gives one to the
last. Sources: Reimers and Gurevych 2019 (arXiv:1908.10084) for the mean, of which all tokens are
part, special ones too; Neelakantan et al. 2022 (arXiv:2201.10005) for the last; Kusupati et al.
2022 (arXiv:2205.13147) for vectors of which the first numbers do.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from app.core.embeddings import PoolingType

# torch.nn.functional.normalize, of which all the others' vectors come, does the same
_MIN_NORM = 1e-12


def pooling_weights(pooling: PoolingType, length: int, start: int, width: int) -> list[float]:
    """Those of `width` positions from `start` on, of a row of `length`; what is behind that has
    none."""
    if pooling == "mean":
        here = max(0, min(width, length - start))
        return [1 / length] * here + [0.0] * (width - here)
    return [float(start + place == length - 1) for place in range(width)]


def pool_hidden_states(hidden: mx.array, weights: mx.array) -> mx.array:
    """hidden [B, L, D], shares [B, L] -> [B, D] float32. A position without a share may hold
    anything, NaN too."""
    weights = weights[..., None]
    return mx.sum(mx.where(weights > 0, weights * hidden.astype(mx.float32), 0), axis=1)


def normalise(vectors: mx.array, dimensions: Sequence[int | None]) -> mx.array:
    """[B, D] -> the same with all behind a row's first `dimensions` numbers zero, and of length
    one; zeros stay zeros."""
    width = vectors.shape[-1]
    kept = mx.array([[width if count is None else count] for count in dimensions])
    cut = mx.where(mx.arange(width) < kept, vectors, 0)
    # a number may be too large to be squared
    largest = mx.max(mx.abs(cut), axis=-1, keepdims=True)
    cut = cut / mx.where(largest > 0, largest, 1)
    return cut / mx.maximum(mx.linalg.norm(cut, axis=-1, keepdims=True), _MIN_NORM)


def vectors_to_bytes(vectors: mx.array, dimensions: Sequence[int | None]) -> list[bytes | None]:
    """Each row's first `dimensions` numbers, as little-endian as the machines are that MLX runs on;
    None for a row that is not all numbers. Waits for them."""
    width = vectors.shape[-1]
    sound = cast(list[bool], mx.all(mx.isfinite(vectors), axis=-1).tolist())
    # MLX's stubs do not know of buffers
    view = memoryview(cast(Any, mx.contiguous(vectors))).cast("B")
    return [
        bytes(view[4 * width * row : 4 * (width * row + (count or width))]) if sound[row] else None
        for row, count in enumerate(dimensions)
    ]
