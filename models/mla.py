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

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models.base import ModelError
from models.kv import KVCache
from models.layers import QuantizedStack
from models.quant import Packing, infer_packing


class LatentCache(KVCache):
    """All positions of a sequence. It stores rotary keys [B, 1, L, R] in place of keys, and latents
    [B, 1, L, C] in place of values. Therefore `remove` rotates the rotary keys and only moves the
    latents."""

    supports_in_place = False

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
        batch, heads, length, _ = queries.shape
        rotary, latents = self.update(keys, values)
        # all heads use the same keys, so they are rows of one product, which reads the keys only
        # once
        rows = (queries * scale).reshape(batch, 1, heads * length, -1)
        content, rope_part = mx.split(rows, [latents.shape[-1]], axis=-1)
        scores = content @ latents.swapaxes(-1, -2) + rope_part @ rotary.swapaxes(-1, -2)
        if length > 1:
            scores = _apply_causal_mask(scores.reshape(batch, heads, length, -1)).reshape(
                scores.shape
            )
        mixed = mx.softmax(scores, axis=-1, precise=True) @ latents
        return mixed.reshape(batch, heads, length, -1)


class MultiLinear(nn.Module):
    """A linear map per head. weight: [H, out, in]."""

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.weight = mx.zeros((heads, outputs, inputs))

    def __call__(self, x: mx.array) -> mx.array:
        """Maps [B, H or 1, L, in] to [B, H, L, out]."""
        return x @ self.weight.swapaxes(-1, -2)

    def apply_transposed(self, x: mx.array) -> mx.array:
        """Applies the transpose (not the inverse), so that q · apply_transposed(x) = map(q) · x.
        Maps [B, H or 1, L, out] to [B, H, L, in]."""
        return x @ self.weight

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str = "affine"
    ) -> "QuantizedMultiLinear":
        """Returns the quantized layer. `nn.quantize` calls this method."""
        return QuantizedMultiLinear(self, group_size, bits, mode)


class QuantizedMultiLinear(QuantizedStack):
    """A `MultiLinear`, quantized in any of MLX's modes."""

    def __call__(self, x: mx.array) -> mx.array:
        """See `MultiLinear`."""
        return self._quantized_matmul(x, transpose=True)

    def apply_transposed(self, x: mx.array) -> mx.array:
        """See `MultiLinear`."""
        return self._quantized_matmul(x, transpose=False)

    def _quantized_matmul(self, x: mx.array, *, transpose: bool) -> mx.array:
        return mx.quantized_matmul(
            x,
            self.weight,
            scales=self.scales,
            biases=self.biases if "biases" in self else None,
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
    found = {f"unembed_out.{kind}": mx.contiguous(a[:, key_dim:]) for kind, a in maps.items()}
    rows = {kind: array[:, :key_dim] for kind, array in maps.items()}
    if "scales" in rows:
        columns = _transpose_quantized(rows, infer_packing(path, latent_dim, weights))
    else:
        columns = {"weight": rows["weight"].swapaxes(1, 2)}
    return found | {f"embed_q.{kind}": mx.contiguous(a) for kind, a in columns.items()}


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
