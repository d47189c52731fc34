"""Multi-head latent attention's own parts: what it remembers, and maps with a matrix per head.

Knows: tensors. Must not know: tokens, requests, policies, architectures. The contract of the cache
is models/kv.py's.

Source: DeepSeek-V2 (2024), section 2.1. Of a position only a latent of a few hundred numbers is
kept, from which each head could make its key and value, and one rotary key for all heads. There
are two ways to attend, equal but for rounding:

    expanded   keys and values of all heads are made from the latents of all positions
    absorbed   queries are mapped to where the latents are, the heads' maps being linear: all heads
               then read the same keys, and what they mix is mapped back afterwards
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
    """Every position since the first: its rotary key [B, 1, L, R] in the place of keys, its latent
    [B, 1, L, C] in that of values. So a removal turns what is rotary and moves the rest."""

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
        """The absorbed way: append rotary keys [B, 1, L, R] and latents [B, 1, L, C]; what queries
        [B, H, L, C + R], mapped to latents in their first C dimensions, see of all that is here:
        [B, H, L, C], still to be mapped back."""
        assert sinks is None
        assert softcap is None
        batch, heads, length, _ = queries.shape
        rotary, latents = self.update(keys, values)
        # all heads read the same keys: they are rows of one product, which reads these once
        rows = (queries * scale).reshape(batch, 1, heads * length, -1)
        content, turned = mx.split(rows, [latents.shape[-1]], axis=-1)
        scores = content @ latents.swapaxes(-1, -2) + turned @ rotary.swapaxes(-1, -2)
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
        """[B, H or 1, L, in] -> [B, H, L, out]."""
        return x @ self.weight.swapaxes(-1, -2)

    def apply_transposed(self, x: mx.array) -> mx.array:
        """[B, H or 1, L, out] -> [B, H, L, in]: not the inverse, but what makes
        q · transposed(x) = map(q) · x."""
        return x @ self.weight

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str = "affine"
    ) -> "QuantizedMultiLinear":
        """What `nn.quantize` asks of a layer."""
        return QuantizedMultiLinear(self, group_size, bits, mode)


class QuantizedMultiLinear(QuantizedStack):
    """A `MultiLinear` in any of MLX's modes."""

    def __call__(self, x: mx.array) -> mx.array:
        """As `MultiLinear`."""
        return self._matmul(x, transpose=True)

    def apply_transposed(self, x: mx.array) -> mx.array:
        """As `MultiLinear`."""
        return self._matmul(x, transpose=False)

    def _matmul(self, x: mx.array, *, transpose: bool) -> mx.array:
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
    """The makers' one map from latents to keys and values -> the two that we have.

    weights: among others `{path}.weight` [heads * (keys + values), latent], with scales and biases
    where it is quantised. Returns `embed_q.weight` [heads, latent, keys], by which queries are
    absorbed, and `unembed_out.weight` [heads, values, latent], as mlx-lm 0.32 converts them.
    Raises ModelError.
    """
    if weights[f"{path}.weight"].shape[0] % heads:
        raise ModelError(f"{path}.weight cannot be divided among {heads} heads")
    maps = {
        kind: weights[f"{path}.{kind}"].reshape(heads, -1, weights[f"{path}.{kind}"].shape[-1])
        for kind in ("weight", "scales", "biases")
        if f"{path}.{kind}" in weights
    }
    # between rows anything can be cut
    found = {f"unembed_out.{kind}": mx.contiguous(a[:, key_dim:]) for kind, a in maps.items()}
    rows = {kind: array[:, :key_dim] for kind, array in maps.items()}
    if "scales" in rows:
        columns = _transpose_quantized(rows, infer_packing(path, latent_dim, weights))
    else:
        columns = {"weight": rows["weight"].swapaxes(1, 2)}
    return found | {f"embed_q.{kind}": mx.contiguous(a) for kind, a in columns.items()}


def _transpose_quantized(rows: Mapping[str, mx.array], packing: Packing) -> dict[str, mx.array]:
    """Groups lie along rows, so that what is quantised cannot simply be transposed: it is
    quantised again, as mlx-lm does, or left plain where columns are no whole groups."""
    settings: Any = asdict(packing)
    plain = mx.dequantize(rows["weight"], rows["scales"], rows.get("biases"), **settings)
    plain = plain.swapaxes(1, 2)
    if plain.shape[-1] % packing.group_size:
        return {"weight": plain}
    parts = mx.quantize(plain, **settings)
    return dict(zip(("weight", "scales", "biases"), parts, strict=False))


def _apply_causal_mask(scores: mx.array) -> mx.array:
    """[..., L, S], the last query aligned with the last key."""
    length, total = scores.shape[-2:]
    seen = mx.arange(total) <= mx.arange(total - length, total)[:, None]
    return mx.where(seen, scores, mx.array(-mx.inf, scores.dtype))
