"""Llama (Touvron et al. 2023; Llama 3: Dubey et al. 2024).

Pre-norm blocks of grouped-query attention with rotary positions and a SiLU-gated MLP.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from models import base, decoder
from models.kv import AttentionCache, KVCache, LayerCache
from models.layers import GatedMLP, merge_heads, split_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads."""

    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.kv_heads
        hidden, size, bias = config.hidden_size, config.head_size, config.attention_bias
        self.scale = size**-0.5
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=bias)
        self.rope = config.rope()

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries = self.rope(split_heads(self.q_proj(x), self.heads), kv.offset)
        keys = self.rope(split_heads(self.k_proj(x), self.kv_heads), kv.offset)
        values = split_heads(self.v_proj(x), self.kv_heads)
        return self.o_proj(merge_heads(kv.attend(queries, keys, values, scale=self.scale)))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.input_layernorm = config.norm()
        self.post_attention_layernorm = config.norm()

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), kv)
        return x + self.mlp(self.post_attention_layernorm(x))

    def make_kv(self) -> LayerCache:
        return KVCache()

    def turn(self, keys: mx.array, by: int) -> mx.array:
        return self.self_attn.rope.turn(keys, by)


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        if config.hidden_act != "silu":
            raise base.ModelError(f"llama with hidden_act {config.hidden_act!r} is not supported")
        blocks = [Block(config) for _ in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Trunk(config, blocks))
