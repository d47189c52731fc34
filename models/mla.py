"""Parts of multi-head latent attention: the cache, and linear maps with one matrix per head.

Knows: tensors. Must not know: tokens, requests, policies, architectures. The cache implements the
interface of models/kv.py.

Source: DeepSeek-V2 (2024), section 2.1. For each position, the cache contains only one rotary key
for all heads and one latent of a few hundred numbers. Each head's key and value can be computed
from the latent. Attention has two forms, which are equal except for rounding:

    expanded   keys and values of all heads are computed from the latents of all positions
    absorbed   queries are mapped into the space of the latents, since the heads' maps are linear:
               all heads then use the same keys, and the result is mapped back afterwards
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models.attention_pieces import compute_pieces, detect_attention_device
from models.attention_route import (
    AttentionMask,
    AttentionPiece,
    AttentionShape,
    expansion_step,
    plan_attention,
)
from models.base import ModelError
from models.kv import KVCache
from models.layers import QuantizedStack
from models.quant import Packing, infer_packing
from models.sdpa import attend_in_pieces, describe_attention, scaled_dot_product_attention

ALL_HEADS = slice(None)


class LatentCache(KVCache):
    """All positions of a sequence. It stores rotary keys [B, 1, L, R] in place of keys, and latents
    [B, 1, L, C] in place of values. Therefore `remove` rotates the rotary keys and only moves the
    latents."""

    supports_in_place = False
    absorbed = True

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Computes the absorbed form. Appends rotary keys [B, 1, L, R] and latents [B, 1, L, C],
        and computes attention from the queries [B, H, L, C + R] to all cached positions. The first
        C dimensions of the queries must already be mapped to the space of the latents. Returns [B,
        H, L, C], before it is mapped back."""
        assert sinks is None
        assert softcap is None
        length = queries.shape[2]
        rotary, latents = self.update(keys, values)
        if length == 1:  # the scores of one query are small
            return _attend_absorbed(queries * scale, rotary, latents)
        total = latents.shape[2]
        shape = _describe_absorbed(queries, keys, values)
        self._add_attention_shape(shape)
        plan = plan_attention(
            detect_attention_device(queries, keys, values),
            shape,
            length=length,
            total=total,
            mask=AttentionMask.CAUSAL,
        )

        def build(piece: AttentionPiece) -> mx.array:
            return _attend_absorbed(
                queries[:, piece.heads, piece.queries] * scale,
                rotary[:, :, : piece.visible],
                latents[:, :, : piece.visible],
            )

        return attend_in_pieces(
            plan, shape, (queries, rotary, latents), build, total=total, causal=True
        )

    @staticmethod
    def attend_masked(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        softcap: float | None,
    ) -> mx.array:
        """Computes the absorbed form. See `models.kv.KVBuffers.attend_masked`."""
        assert sinks is None
        assert softcap is None
        return _attend_absorbed(queries * scale, keys, values, mask)

    def attend_expanded(
        self,
        queries: mx.array,
        keys: mx.array,
        latents: mx.array,
        expand: Callable[[mx.array, slice], tuple[mx.array, mx.array]],
        *,
        scale: float,
    ) -> mx.array:
        """Computes the expanded form. Appends rotary keys [B, 1, L, R] and latents [B, 1, L, C],
        and computes attention from the queries [B, H, L, K + R] to all cached positions. expand:
        returns the keys [B, h, S, K], without the rotary part, and the values [B, h, S, V] of a
        range of heads, for latents [B, 1, S, C]. Returns [B, H, L, V].

        Only as many heads are expanded at the same time as fit into one piece
        (models/attention_route.py). The result of a head does not depend on the other heads."""
        heads, mask = queries.shape[1], self.mask(queries.shape[2])
        rotary, latents = self.update(keys, latents)

        def attend(chosen: slice) -> mx.array:
            content, values = expand(latents, chosen)
            shared = mx.broadcast_to(rotary, (*content.shape[:-1], rotary.shape[-1]))
            return scaled_dot_product_attention(
                queries[:, chosen],
                mx.concatenate([content, shared], axis=-1),
                values,
                scale=scale,
                mask=mask,
            )

        shape = self._describe_expanded(queries, latents, expand)
        self._add_attention_shape(shape)
        self._add_attention_shape(_describe_absorbed(queries, rotary, latents))
        step = expansion_step(shape, latents.shape[2])
        ranges = [slice(first, min(first + step, heads)) for first in range(0, heads, step)]
        piece_bytes = step * latents.shape[2] * shape.expanded_dims * shape.itemsize
        pieces = compute_pieces(
            (partial(attend, chosen) for chosen in ranges),
            (queries, rotary, latents),
            piece_bytes * shape.batch if len(ranges) > 1 else 0,
        )
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)

    def _describe_expanded(
        self,
        queries: mx.array,
        latents: mx.array,
        expand: Callable[[mx.array, slice], tuple[mx.array, mx.array]],
    ) -> AttentionShape:
        """Returns the shape of the expanded form. The keys and values of one position are described
        and never computed."""
        content, values = expand(latents[:, :, :1], slice(0, queries.shape[1]))
        shape = describe_attention(queries, content, values)
        # the content exists twice: alone, and concatenated with the rotary part
        dims = content.shape[-1] + queries.shape[-1] + values.shape[-1]
        return replace(shape, expanded_dims=dims)

    def _add_attention_shape(self, shape: AttentionShape) -> None:
        if shape not in self.attention_shapes:
            self.attention_shapes = (*self.attention_shapes, shape)


def _describe_absorbed(queries: mx.array, keys: mx.array, latents: mx.array) -> AttentionShape:
    """Returns the shape of the absorbed form, for queries of either form."""
    return AttentionShape(
        batch=queries.shape[0],
        heads=queries.shape[1],
        kv_heads=1,
        key_dim=keys.shape[3] + latents.shape[3],
        value_dim=latents.shape[3],
        itemsize=queries.dtype.size,
        absorbed=True,
    )


def _attend_absorbed(
    queries: mx.array, rotary: mx.array, latents: mx.array, mask: mx.array | None = None
) -> mx.array:
    """Returns the absorbed attention [B, H, L, C] of scaled queries [B, H, L, C + R]. mask: the
    positions of each row, for one query per row; otherwise, the mask is causal."""
    batch, heads, length, _ = queries.shape
    # all heads use the same keys, so they are rows of one product, which reads the keys only once
    rows = queries.reshape(batch, 1, heads * length, -1)
    content, rope_part = mx.split(rows, [latents.shape[-1]], axis=-1)
    scores = content @ latents.swapaxes(-1, -2) + rope_part @ rotary.swapaxes(-1, -2)
    if mask is not None:
        assert length == 1
        scores = mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
    elif length > 1:
        scores = _apply_causal_mask(scores.reshape(batch, heads, length, -1)).reshape(scores.shape)
    mixed = mx.softmax(scores, axis=-1, precise=True) @ latents
    return mixed.reshape(batch, heads, length, -1)


class MultiLinear(nn.Module):
    """A linear map per head. weight: [H, out, in]."""

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.weight = mx.zeros((heads, outputs, inputs))

    def __call__(self, x: mx.array, heads: slice = ALL_HEADS) -> mx.array:
        """Maps [B, H or 1, L, in] to [B, H, L, out]. heads: the heads whose maps are applied."""
        return x @ self.weight[heads].swapaxes(-1, -2)

    def apply_transposed(self, x: mx.array, heads: slice = ALL_HEADS) -> mx.array:
        """Applies the transpose (not the inverse), so that q · apply_transposed(x) = map(q) · x.
        Maps [B, H or 1, L, out] to [B, H, L, in]."""
        return x @ self.weight[heads]

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str = "affine"
    ) -> "QuantizedMultiLinear":
        """Returns the quantized layer. `nn.quantize` calls this method."""
        return QuantizedMultiLinear(self, group_size, bits, mode)


class QuantizedMultiLinear(QuantizedStack):
    """A `MultiLinear`, quantized in any of MLX's modes."""

    def __call__(self, x: mx.array, heads: slice = ALL_HEADS) -> mx.array:
        """See `MultiLinear`."""
        return self._quantized_matmul(x, heads, transpose=True)

    def apply_transposed(self, x: mx.array, heads: slice = ALL_HEADS) -> mx.array:
        """See `MultiLinear`."""
        return self._quantized_matmul(x, heads, transpose=False)

    def _quantized_matmul(self, x: mx.array, heads: slice, *, transpose: bool) -> mx.array:
        return mx.quantized_matmul(
            x,
            self.weight[heads],
            scales=self.scales[heads],
            biases=self.biases[heads] if "biases" in self else None,
            transpose=transpose,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )


def split_kv_b_proj(
    path: str, weights: Mapping[str, mx.array], *, heads: int, key_dim: int, latent_dim: int
) -> dict[str, mx.array]:
    """Splits the original projection from latents to keys and values into our two layers.

    weights: contains `{path}.weight` [heads * (keys + values), latent], with scales and biases if
    it is quantized. Returns `embed_q.weight` [heads, latent, keys], which maps queries into the
    space of the latents, and `unembed_out.weight` [heads, values, latent]. mlx-lm 0.32 converts
    them in the same way. Raises ModelError.
    """
    if weights[f"{path}.weight"].shape[0] % heads:
        raise ModelError(f"{path}.weight cannot be divided among {heads} heads")
    maps = {
        kind: weights[f"{path}.{kind}"].reshape(heads, -1, weights[f"{path}.{kind}"].shape[-1])
        for kind in ("weight", "scales", "biases")
        if f"{path}.{kind}" in weights
    }
    # rows can be split at any position, whether or not they are quantized
    split = {f"unembed_out.{kind}": mx.contiguous(a[:, key_dim:]) for kind, a in maps.items()}
    rows = {kind: array[:, :key_dim] for kind, array in maps.items()}
    if "scales" in rows:
        columns = _transpose_quantized(rows, infer_packing(path, latent_dim, weights))
    else:
        columns = {"weight": rows["weight"].swapaxes(1, 2)}
    return split | {f"embed_q.{kind}": mx.contiguous(a) for kind, a in columns.items()}


def _transpose_quantized(rows: Mapping[str, mx.array], packing: Packing) -> dict[str, mx.array]:
    """Transposes a quantized matrix. Quantization groups extend along rows, so the matrix cannot be
    transposed directly. It is quantized again, as in mlx-lm. If the length of the columns is not a
    multiple of the group size, it is left unquantized."""
    settings: Any = asdict(packing)
    plain = mx.dequantize(rows["weight"], rows["scales"], rows.get("biases"), **settings)
    plain = plain.swapaxes(1, 2)
    if plain.shape[-1] % packing.group_size:
        return {"weight": plain}
    parts = mx.quantize(plain, **settings)
    return dict(zip(("weight", "scales", "biases"), parts, strict=False))


def _apply_causal_mask(scores: mx.array) -> mx.array:
    """Masks scores [..., L, S]. The last query is aligned with the last key."""
    length, total = scores.shape[-2:]
    seen = mx.arange(total) <= mx.arange(total - length, total)[:, None]
    return mx.where(seen, scores, mx.array(-mx.inf, scores.dtype))
