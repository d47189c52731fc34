"""Scaled dot-product attention, with masks, attention sinks and soft-capping.

Knows: tensors. Must not know: caches, layers.
"""

from typing import Literal

import mlx.core as mx

from models import kernels

# no mask · lower-right causal · [L, keys] bool
Mask = Literal["causal"] | mx.array | None


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Computes softmax(scale * Q K^T + mask) V and returns [B, Hq, L, Dv].

    queries: [B, Hq, L, D]. keys: [B, Hkv, S, D]. values: [B, Hkv, S, Dv]. Hq must be a multiple of
    Hkv. mask: "causal" aligns the last query with the last key. sinks: [Hq], the logit of a virtual
    key that every query attends to and whose value is zero (Xiao et al. 2023; gpt-oss). softcap:
    scores become softcap * tanh(score / softcap) before the mask (Gemma 2). It cannot be combined
    with sinks.
    """
    ops = kernels.ops(queries, keys, values)
    if ops is not None and not isinstance(mask, mx.array):
        return ops.attention(
            queries,
            keys,
            values,
            scale=scale,
            causal=mask == "causal",
            sinks=sinks,
            softcap=softcap or 0.0,
        )
    if softcap is None:
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    assert sinks is None
    return _softcap_attention(queries, keys, values, scale=scale, mask=mask, softcap=softcap)


def _softcap_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask,
    softcap: float,
) -> mx.array:
    batch, heads, length, _ = queries.shape
    kv_heads, total = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, length, -1)
    scores = (grouped * scale) @ keys[:, :, None].swapaxes(-1, -2)
    scores = softcap * mx.tanh(scores / softcap)
    if isinstance(mask, str):
        mask = mx.arange(total) <= mx.arange(total - length, total)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values[:, :, None]).reshape(batch, heads, length, -1)
