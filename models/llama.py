"""Llama (Touvron et al. 2023; Llama 3: Dubey et al. 2024).

Pre-norm blocks of grouped-query attention with rotary positions and a SiLU-gated MLP.
"""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import decoder
from models.kv import AttentionCache
from models.layers import GatedMLP, merge_heads, split_heads
from models.prenorm import PreNormBlock
from models.rope import NoRope, Rope
from models.sharding import HEADS, Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads."""

    attention_bias: bool = False
    mlp_bias: bool = False

    def layer_rope(self, layer: int) -> Rope | NoRope:
        """For an architecture to override, whose layers are not all alike."""
        return self.rope()


class Attention(nn.Module):
    cut: ClassVar[Cut] = HEADS

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.kv_heads
        hidden, size, bias = config.hidden_size, config.head_size, config.attention_bias
        self.scale = size**-0.5
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=bias)
        self.rope = config.layer_rope(layer)

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries = self.rope(split_heads(self.q_proj(x), self.heads), kv.offset)
        keys = self.rope(split_heads(self.k_proj(x), self.kv_heads), kv.offset)
        values = split_heads(self.v_proj(x), self.kv_heads)
        return self.o_proj(merge_heads(kv.attend(queries, keys, values, scale=self.scale)))


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            activation=config.activation(),
        )
        super().__init__(config, Attention(config, layer), mlp, window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Trunk(config, blocks))
