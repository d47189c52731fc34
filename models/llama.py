"""Llama (Touvron et al. 2023; Llama 3: Dubey et al. 2024).

Pre-norm blocks of grouped-query attention with rotary positions and a SiLU-gated MLP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from models import base
from models.kv import AttentionCache, KVCache, LayerCache
from models.rope import make_rope, rope_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(base.Config):
    """The keys of config.json that this architecture reads."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.kv_heads
        size, bias = config.head_size, config.attention_bias
        self.scale = size**-0.5
        self.q_proj = nn.Linear(config.hidden_size, self.heads * size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, config.hidden_size, bias=bias)
        theta, scaling = rope_settings(config)
        self.rope = make_rope(
            dims=size, theta=theta, max_positions=config.max_position_embeddings, scaling=scaling
        )

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        batch, length, _ = x.shape
        queries, keys, values = (
            projected.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
            for projected, heads in (
                (self.q_proj(x), self.heads),
                (self.k_proj(x), self.kv_heads),
                (self.v_proj(x), self.kv_heads),
            )
        )
        queries, keys = self.rope(queries, kv.offset), self.rope(keys, kv.offset)
        out = kv.attend(queries, keys, values, scale=self.scale)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), kv)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Block(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, tokens: mx.array, kv: Sequence[AttentionCache]) -> mx.array:
        x = self.embed_tokens(tokens)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x = layer(x, layer_kv)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise base.ModelError(f"llama with hidden_act {config.hidden_act!r} is not supported")
        self.config = config
        self.model = Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def __call__(self, tokens: mx.array, kv: Sequence[object]) -> mx.array:
        return self.model(tokens, cast(Sequence[AttentionCache], kv))

    def logits(self, hidden: mx.array) -> mx.array:
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(hidden)
        return self.lm_head(hidden)

    def make_kv(self) -> list[LayerCache]:
        return [KVCache() for _ in self.model.layers]

    def shift(self, kv: Sequence[LayerCache], start: int, end: int) -> bool:
        for block, layer in zip(self.model.layers, kv, strict=True):
            cast(KVCache, layer).remove(start, end, block.self_attn.rope.turn)
        return True

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Old checkpoints store the rotation's frequencies, tied ones sometimes the head."""
        tied = self.config.tie_word_embeddings
        return {
            name: array
            for name, array in weights.items()
            if not name.endswith("rotary_emb.inv_freq")
            and not (tied and name.startswith("lm_head."))
        }
