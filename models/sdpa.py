"""Scaled dot-product attention, with masks, attention sinks and soft-capping.

Knows: tensors, the route of a call (models/attention_route.py). Must not know: caches, layers.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import mlx.core as mx

from models import kernels
from models.attention_pieces import compute_pieces, detect_attention_device
from models.attention_route import (
    AttentionDevice,
    AttentionMask,
    AttentionPiece,
    AttentionPlan,
    AttentionRoute,
    AttentionShape,
    plan_attention,
)

# no mask · lower-right causal · [L, keys] bool; for one query per row, also [B, 1, 1, keys] bool
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
    if queries.shape[2] == 1:  # the scores of one query are small
        return _attend_whole(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks, softcap=softcap
        )
    return _attend_planned(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks, softcap=softcap
    )


def _attend_planned(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
    softcap: float | None,
) -> mx.array:
    """Computes attention of several queries by the route of the device."""
    device = detect_attention_device(queries, keys, values)
    shape = describe_attention(queries, keys, values, sinks=sinks, softcap=softcap)
    kind = _classify_mask(mask)
    length, total = queries.shape[2], keys.shape[2]
    plan = plan_attention(device, shape, length=length, total=total, mask=kind)
    if device is AttentionDevice.CUDA and isinstance(mask, mx.array):
        mask = _to_additive(mask, queries.dtype)
    whole = partial(_attend_whole, scale=scale, softcap=softcap)
    if plan.route is not AttentionRoute.PIECES:
        forced = plan.route is AttentionRoute.FORCED
        return whole(queries, keys, values, mask=mask, sinks=sinks, force_fused=forced)

    def build(piece: AttentionPiece) -> mx.array:
        return whole(
            queries[:, piece.heads, piece.queries],
            keys[:, piece.kv_heads, : piece.visible],
            values[:, piece.kv_heads, : piece.visible],
            mask=mask[piece.queries, : piece.visible] if isinstance(mask, mx.array) else mask,
            sinks=None if sinks is None else sinks[piece.heads],
        )

    return attend_in_pieces(
        plan,
        shape,
        (queries, keys, values),
        build,
        total=total,
        causal=kind is AttentionMask.CAUSAL,
    )


def describe_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> AttentionShape:
    """Returns the shape of queries [B, Hq, L, D], keys [B, Hkv, S, D] and values [B, Hkv, S,
    Dv]."""
    return AttentionShape(
        batch=queries.shape[0],
        heads=queries.shape[1],
        kv_heads=keys.shape[1],
        key_dim=queries.shape[3],
        value_dim=values.shape[3],
        itemsize=queries.dtype.size,
        softcap=softcap is not None,
        sinks=sinks is not None,
    )


def _classify_mask(mask: Mask) -> AttentionMask:
    if isinstance(mask, mx.array):
        return AttentionMask.ARRAY
    return AttentionMask.NONE if mask is None else AttentionMask.CAUSAL


def attend_in_pieces(
    plan: AttentionPlan,
    shape: AttentionShape,
    inputs: tuple[mx.array, ...],
    build: Callable[[AttentionPiece], mx.array],
    *,
    total: int,
    causal: bool,
) -> mx.array:
    """Returns the concatenation [B, H, L, Dv] of the results of `build` for all pieces of the plan.
    inputs: the arrays that `build` uses; the first one has the queries [B, H, L, D]."""
    length = inputs[0].shape[2]
    pieces = list(plan.pieces(shape, length=length, total=total, causal=causal))
    results = compute_pieces((partial(build, piece) for piece in pieces), inputs, plan.piece_bytes)
    if len(results) == 1:
        return results[0]
    across = -(-length // plan.query_step)
    return _concatenate(list(_join_queries(results, across)), axis=1)


def _join_queries(results: list[mx.array], across: int) -> Iterator[mx.array]:
    for start in range(0, len(results), across):
        yield _concatenate(results[start : start + across], axis=2)


def _concatenate(arrays: list[mx.array], axis: int) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=axis)


def _to_additive(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """Converts a bool mask. MLX's CUDA kernels need an additive mask, and MLX would convert the
    mask after it was broadcast to all heads."""
    return mx.where(mask, mx.array(0, dtype), mx.array(-mx.inf, dtype))


def _attend_whole(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    force_fused: bool = False,
) -> mx.array:
    if softcap is None:
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks, force_fused=force_fused
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
        if mask.ndim == 4:  # [B, 1, L, S], while the heads of the scores are in groups
            mask = mask[:, :, None]
        scores = mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values[:, :, None]).reshape(batch, heads, length, -1)
