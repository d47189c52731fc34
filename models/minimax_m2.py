"""MiniMax M2 (MiniMax 2025): grouped-query attention whose queries and keys are normalized over all
heads together, and mixtures of experts with sigmoid scores.

Knows: the layers, the checkpoint tensors. Must not know: devices, expert selection.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import decoder
from models.attention import GroupedQueryAttention
from models.base import ModelError
from models.experts import GroupedTopKMoE, move_router_bias, stack_experts
from models.kv import AttentionCache
from models.layers import merge_heads, split_heads
from models.prenorm import PreNormBlock
from models.rope import Rope
from models.sharding import REPLICATED, ShardSpec

# the value of attn_type_list for attention with a softmax
_SOFTMAX_ATTENTION = 1

# the original names of the projections -> the usual names
_PROJECTION_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads. rotary_dim: the number of rotated
    dimensions of a head; None if `partial_rotary_factor` gives it. attn_type_list: the kind of
    attention of each layer."""

    num_local_experts: int
    num_experts_per_tok: int
    head_dim: int | None = 128
    rope_theta: float = 5_000_000.0
    rotary_dim: int | None = None
    use_qk_norm: bool = True
    qk_norm_type: str = "per_layer"
    scoring_func: str = "sigmoid"
    use_routing_bias: bool = True
    shared_intermediate_size: int = 0

    attn_type_list: Sequence[int] | None = None

    def rope(self, layer_type: str | None = None) -> Rope:
        if self.rotary_dim is None:
            return decoder.Config.rope(self, layer_type)
        share = self.rotary_dim / self.head_size
        return decoder.Config.rope(replace(self, partial_rotary_factor=share), layer_type)


class Attention(GroupedQueryAttention):
    # a norm over all heads requires all heads on each rank
    shard_spec: ClassVar[ShardSpec] = REPLICATED

    def __init__(self, config: Config) -> None:
        super().__init__(config, config.rope())
        size = config.head_size
        self.q_norm = nn.RMSNorm(self.heads * size, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.kv_heads * size, config.rms_norm_eps)

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries = split_heads(self.q_norm(self.q_proj(x)), self.heads)
        keys = split_heads(self.k_norm(self.k_proj(x)), self.kv_heads)
        values = split_heads(self.v_proj(x), self.kv_heads)
        queries, keys = self.rope(queries, kv.positions), self.rope(keys, kv.positions)
        return self.o_proj(merge_heads(kv.attend(queries, keys, values, scale=self.scale)))


class Block(PreNormBlock):
    def __init__(self, config: Config) -> None:
        mlp = GroupedTopKMoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            top_k=config.num_experts_per_tok,
        )
        super().__init__(config, Attention(config), mlp)


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        for key, only in (
            ("hidden_act", "silu"),
            ("scoring_func", "sigmoid"),
            ("use_qk_norm", True),
            ("qk_norm_type", "per_layer"),
            ("use_routing_bias", True),
            ("shared_intermediate_size", 0),
        ):
            if getattr(config, key) != only:
                raise ModelError(f"{key} {getattr(config, key)!r} is not supported")
        if not set(config.attn_type_list or ()) <= {_SOFTMAX_ATTENTION}:
            raise ModelError("config.json's attn_type_list has layers with linear attention")
        blocks = [Block(config) for _ in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Converts the checkpoint, and stacks experts that are stored one by one under either set
        of names."""
        kept = decoder.drop_extra_layers(weights, self.config.num_hidden_layers)
        named = {name.replace(".block_sparse_moe.", ".mlp."): array for name, array in kept.items()}
        stacked = stack_experts(stack_experts(named, projections=_PROJECTION_NAMES))
        return super().sanitize(move_router_bias(stacked))
