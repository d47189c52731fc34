"""The block of most decoders: attention, then an MLP, each behind a norm and added to what it saw.

Knows: the names such a block has in checkpoints, the cache that its attention needs. Must not
know: how attention or MLP are made.
"""

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from models.decoder import Config
from models.kv import AttentionCache, KVCache, LayerCache
from models.rope import NoRope, Rope
from models.rotating_kv import RotatingKVCache


class AttentionLayer(Protocol):
    """Implementations are mlx.nn.Module."""

    @property
    def rope(self) -> Rope | NoRope:
        """What has rotated the keys that are in the cache."""
        ...

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        """[B, L, D] -> [B, L, D]; the L positions are appended to `kv`."""
        ...


class PreNormBlock(nn.Module):
    """h = x + attention(norm(x)); h + mlp(norm(h)) (Xiong et al. 2020).

    window: how many positions a query sees, its own included; None for all.
    """

    def __init__(
        self,
        config: Config,
        attention: AttentionLayer,
        mlp: Callable[[mx.array], mx.array],
        *,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.window = window
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = config.norm()
        self.post_attention_layernorm = config.norm()

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        return self.mlp_residual(self.attention_residual(x, kv))

    # Where a device has one operation for all of one of these, it stands here instead
    # (models/cpu_layout.py).

    def attention_residual(self, x: mx.array, kv: AttentionCache) -> mx.array:
        return x + self.self_attn(self.input_layernorm(x), kv)

    def mlp_residual(self, x: mx.array) -> mx.array:
        return x + self.mlp(self.post_attention_layernorm(x))

    def make_kv(self) -> LayerCache:
        return KVCache() if self.window is None else RotatingKVCache(self.window)

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        return self.self_attn.rope.rerotate(keys, positions)
