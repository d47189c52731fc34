"""Qwen3 (Yang et al. 2025): a Qwen2 without biases, whose queries and keys are normalised.

Each head's query and key has the length that a weight gives it (Dehghani et al. 2023), before it
is rotated.
"""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import decoder, qwen2
from models.kv import AttentionCache
from models.layers import GatedMLP, merge_heads, split_heads
from models.prenorm import PreNormBlock
from models.sharding import HEADS, Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen2.Config):
    """The keys of config.json that this architecture reads."""

    head_dim: int | None = 128
    attention_bias: bool = False


class Attention(nn.Module):
    cut: ClassVar[Cut] = HEADS

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.kv_heads
        hidden, size, bias = config.hidden_size, config.head_size, config.attention_bias
        self.scale = size**-0.5
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.rope = config.rope()

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries = self.q_norm(split_heads(self.q_proj(x), self.heads))
        keys = self.k_norm(split_heads(self.k_proj(x), self.kv_heads))
        values = split_heads(self.v_proj(x), self.kv_heads)
        queries, keys = self.rope(queries, kv.offset), self.rope(keys, kv.offset)
        return self.o_proj(merge_heads(kv.attend(queries, keys, values, scale=self.scale)))


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation=config.activation())
        super().__init__(config, Attention(config), mlp, window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Trunk(config, blocks))
