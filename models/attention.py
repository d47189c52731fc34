"""Scaled dot-product attention and the masks it takes.

Knows: tensors. Must not know: caches, layers.
"""

from typing import Literal

import mlx.core as mx

# nothing to hide · lower-right causal · [L, keys] of bool
Mask = Literal["causal"] | mx.array | None


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Mask
) -> mx.array:
    """softmax(scale * Q K^T + mask) V.

    queries [B, Hq, L, D], keys and values [B, Hkv, S, D], Hq a multiple of Hkv -> [B, Hq, L, D].
    "causal" aligns the last query with the last key.
    """
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
