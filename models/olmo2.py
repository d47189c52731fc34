"""OLMo 2 (OLMo Team 2024) is a Llama with norms after attention and MLP instead of before them.

Knows: the order of the norms. Must not know: devices, kernels, types of caches.

The outputs of attention and MLP are normalized before they are added to the residual stream. The
stream itself is normalized only before the head (equations 1 and 2 of the paper). Queries and keys
are normalized before the rotation, over all heads of a position together.
"""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import decoder, llama
from models.base import SelectPositions, select_all
from models.kv import AttentionCache, KVCache, LayerCache
from models.layers import GatedMLP, merge_heads, split_heads
from models.sharding import REPLICATED, ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    """The keys of config.json that this architecture reads."""

    rms_norm_eps: float = 1e-5


class Attention(llama.Attention):
    # a norm over all heads requires all heads on each rank
    shard_spec: ClassVar[ShardSpec] = REPLICATED

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = nn.RMSNorm(self.heads * config.head_size, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.kv_heads * config.head_size, config.rms_norm_eps)

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries = split_heads(self.q_norm(self.q_proj(x)), self.heads)
        keys = split_heads(self.k_norm(self.k_proj(x)), self.kv_heads)
        values = split_heads(self.v_proj(x), self.kv_heads)
        queries, keys = self.rope(queries, kv.positions), self.rope(keys, kv.positions)
        return self.o_proj(merge_heads(kv.attend(queries, keys, values, scale=self.scale)))


class Block(nn.Module):
    """Computes h = x + norm(attention(x)) and returns h + norm(mlp(h))."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            activation=config.activation(),
        )
        self.post_attention_layernorm = config.norm()
        self.post_feedforward_layernorm = config.norm()

    def __call__(
        self, x: mx.array, kv: AttentionCache, select: SelectPositions = select_all
    ) -> mx.array:
        x = select(x + self.post_attention_layernorm(self.self_attn(x, kv)))
        return x + self.post_feedforward_layernorm(self.mlp(x))

    def make_kv(self) -> LayerCache:
        return KVCache()

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        return self.self_attn.rope.rerotate(keys, positions)


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))
