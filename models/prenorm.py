"""The pre-norm block of most decoders: attention, then an MLP, each with a norm before it and a
residual connection.

Knows: the parameter names of such a block in checkpoints, the cache that its attention needs. Must
not know: how attention and MLP are implemented.
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
    """The interface of the block's attention. Implementations are mlx.nn.Module."""

    @property
    def rope(self) -> Rope | NoRope:
        """The rotary embedding of the cached keys."""
        ...

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        """[B, L, D] -> [B, L, D]; the L positions are appended to `kv`."""
        ...


class PreNormBlock(nn.Module):
    """h = x + attention(norm(x)); h + mlp(norm(h)) (Xiong et al. 2020).

    window: how many positions a query attends to, its own included; None for all.
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

    # models/cpu_layout.py replaces these methods by fused operations on devices that have them.

    def attention_residual(self, x: mx.array, kv: AttentionCache) -> mx.array:
        return x + self.self_attn(self.input_layernorm(x), kv)

    def mlp_residual(self, x: mx.array) -> mx.array:
        return x + self.mlp(self.post_attention_layernorm(x))

    def make_kv(self) -> LayerCache:
        return KVCache() if self.window is None else RotatingKVCache(self.window)

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        return self.self_attn.rope.rerotate(keys, positions)
