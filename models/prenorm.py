"""The pre-norm block of most decoders, with attention and an MLP, each preceded by a norm and with
a residual connection.

Knows: the parameter names of such a block in checkpoints, the cache that its attention needs. Must
not know: the implementation of attention and MLP.
"""

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from models.attention import GroupedQueryAttention
from models.base import SelectPositions, select_all
from models.decoder import Config
from models.kv import AttentionCache, KVCache, LayerCache
from models.layers import GatedMLP
from models.rope import NoRope, Rope
from models.rotating_kv import RotatingKVCache
from models.sublayers import (
    AttentionSublayer,
    InputGateSublayer,
    MlpSublayer,
    has_unmodified,
)


class AttentionLayer(Protocol):
    """The interface of the block's attention. Implementations are subclasses of mlx.nn.Module."""

    @property
    def rope(self) -> Rope | NoRope:
        """The rope of the cached keys."""
        ...

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        """Maps hidden states [B, L, D] to [B, L, D]. The L positions are appended to `kv`."""
        ...


class PreNormBlock(nn.Module):
    """Computes h = x + attention(norm(x)) and returns h + mlp(norm(h)) (Xiong et al. 2020).

    window: the number of positions that a query attends to, including its own position; None for
    all positions.
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

    def __call__(
        self, x: mx.array, kv: AttentionCache, select: SelectPositions = select_all
    ) -> mx.array:
        return self.mlp_residual(select(self.attention_residual(x, kv)))

    # On devices with fused operations, models/cpu_layout.py replaces these methods with them.

    def attention_residual(self, x: mx.array, kv: AttentionCache) -> mx.array:
        return x + self.self_attn(self.input_layernorm(x), kv)

    def mlp_residual(self, x: mx.array) -> mx.array:
        return x + self.mlp(self.post_attention_layernorm(x))

    def describe_attention(self) -> AttentionSublayer | None:
        if not has_unmodified(self, PreNormBlock, "attention_residual"):
            return None
        attention = self.self_attn
        if not isinstance(attention, GroupedQueryAttention):
            return None
        if not has_unmodified(attention, GroupedQueryAttention, "__call__"):
            return None
        return AttentionSublayer(
            norm=self.input_layernorm,
            attention=attention,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            scale=attention.scale,
            rope=attention.rope,
        )

    def describe_mlp(self) -> MlpSublayer | None:
        if not has_unmodified(self, PreNormBlock, "mlp_residual"):
            return None
        mlp = self.mlp
        if not isinstance(mlp, GatedMLP) or not has_unmodified(mlp, GatedMLP, "__call__"):
            return None
        if not has_unmodified(mlp, GatedMLP, "gate_up"):
            return None
        return MlpSublayer(norm=self.post_attention_layernorm, mlp=mlp)

    def describe_input_gate(self) -> InputGateSublayer | None:
        return None

    def make_kv(self) -> LayerCache:
        return KVCache() if self.window is None else RotatingKVCache(self.window)

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        return self.self_attn.rope.rerotate(keys, positions)
