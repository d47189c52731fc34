"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024) are Llamas with fused projections.

Knows: the fused projections and their sharding. Must not know: devices, kernels, types of caches.

Query, key and value are fused into one projection, and gate and up into another. Long contexts use
longrope. Phi-4-mini applies rope to only a part of each head.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from models import decoder
from models.kv import AttentionCache
from models.layers import Activation, apply_glu, merge_heads, split_heads
from models.prenorm import PreNormBlock
from models.rope import Scaling
from models.sharding import ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads."""

    rms_norm_eps: float = 1e-5
    original_max_position_embeddings: int = 4096

    def rope_settings(self, layer_type: str | None = None) -> tuple[float, Scaling | None]:
        """Returns (theta, scaling). The original context length is stored next to
        the scaling object, not inside it."""
        theta, scaling = decoder.Config.rope_settings(self, layer_type)
        original = self.original_max_position_embeddings
        return theta, scaling and {**scaling, "original_max_position_embeddings": original}

    def default_layer_type(self, layer: int) -> str:
        return decoder.FULL if self.sliding_window is None else decoder.SLIDING


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.kv_heads
        hidden, size = config.hidden_size, config.head_size
        self.scale = size**-0.5
        self.split_points = [self.heads * size, (self.heads + self.kv_heads) * size]
        self.qkv_proj = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=False)
        self.rope = config.rope()

    @property
    def shard_spec(self) -> ShardSpec:
        return ShardSpec(
            column_parallel=("qkv_proj",),
            row_parallel=("o_proj",),
            segments={"qkv_proj": tuple(self.split_points)},
            counts=("heads", "kv_heads", "split_points"),
        )

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries, keys, values = mx.split(self.qkv_proj(x), self.split_points, axis=-1)
        queries = self.rope(split_heads(queries, self.heads), kv.positions)
        keys = self.rope(split_heads(keys, self.kv_heads), kv.positions)
        values = split_heads(values, self.kv_heads)
        return self.o_proj(merge_heads(kv.attend(queries, keys, values, scale=self.scale)))


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    @property
    def shard_spec(self) -> ShardSpec:
        inner = self.gate_up_proj.weight.shape[0] // 2
        return ShardSpec(
            column_parallel=("gate_up_proj",),
            row_parallel=("down_proj",),
            segments={"gate_up_proj": (inner,)},
        )

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(apply_glu(self.activation, gate, up))


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        mlp = MLP(config.hidden_size, config.intermediate_size, config.activation())
        super().__init__(config, Attention(config), mlp, window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))
