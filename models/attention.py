"""Grouped-query attention (Ainslie et al. 2023), as used by most decoders.

Knows: the parameter names in checkpoints, the interface of a layer cache. Must not know: the block
around the attention layer, individual architectures.
"""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from models.decoder import Config
from models.kv import AttentionCache
from models.layers import merge_heads, split_heads
from models.rope import NoRope, Rope
from models.sharding import ATTENTION_SHARDS, ShardSpec


class GroupedQueryAttention(nn.Module):
    """Computes grouped-query attention. If the device has a fused operation for attention and the
    surrounding block, the block uses it instead (models/kernels/fused_blocks.py), unless a subclass
    overrides `__call__`.

    bias, o_bias: whether the input projections and the output projection have biases. qk_norm:
    whether each head's query and key are normalized before the rotation (Dehghani et al. 2023).
    sinks: whether each head has an attention sink, see `models.sdpa.scaled_dot_product_attention`.
    """

    shard_spec: ClassVar[ShardSpec] = ATTENTION_SHARDS

    def __init__(
        self,
        config: Config,
        rope: Rope | NoRope,
        *,
        bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.kv_heads
        hidden, size = config.hidden_size, config.head_size
        self.scale = size**-0.5
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=o_bias)
        self.q_norm = nn.RMSNorm(size, config.rms_norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(size, config.rms_norm_eps) if qk_norm else None
        self.sinks = mx.zeros((self.heads,)) if sinks else None
        self.rope = rope

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries = split_heads(self.q_proj(x), self.heads)
        keys = split_heads(self.k_proj(x), self.kv_heads)
        values = split_heads(self.v_proj(x), self.kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = self.rope(queries, kv.positions), self.rope(keys, kv.positions)
        seen = kv.attend(queries, keys, values, scale=self.scale, sinks=self.sinks)
        return self.o_proj(merge_heads(seen))
