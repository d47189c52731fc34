"""The text model of Muse Glimmer (Meta 2026): attention outputs are gated, and each sublayer is
between two norms, as in Gemma 2.

Knows: the layers, the parameter names. Must not know: devices, images.

Queries and keys are normalized without weights, and queries are scaled. Layers with full attention
have no rotary positions. Embeddings are normalized without weights. The weights of the norms of a
block are stored with an offset of -1, those of the last norm are not. Logits are scaled and capped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import decoder
from models.base import ModelError, SelectPositions, select_all
from models.kv import AttentionCache, KVCache, LayerCache
from models.layers import GatedMLP, merge_heads, normalize_rms, softcap_logits, split_heads
from models.rope import NoRope, Rope
from models.rotating_kv import RotatingKVCache
from models.sharding import ATTENTION_SHARDS, ShardSpec

# one layer in this many has full attention, counted from the last one
_PERIOD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads. layer_rope_theta: the theta of each
    layer, or 0 for layers without rotary positions; None if these are the layers with full
    attention."""

    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8
    head_dim: int | None = 128
    sliding_window: int | None = 2048
    rope_theta: float = 500_000.0
    hidden_activation: str = "silu"
    qk_scale_factor: float = 3.87
    output_multiplier: float = 0.19611613513818404
    final_logit_softcapping: float = 20.0
    layer_rope_theta: Sequence[float] | None = None
    attention_bias: bool = False

    def default_layer_type(self, layer: int) -> str:
        is_full = (self.num_hidden_layers - 1 - layer) % _PERIOD == 0
        return decoder.FULL if is_full else decoder.SLIDING

    def layer_rope(self, layer: int) -> Rope | NoRope:
        thetas, (theta, _) = self.layer_rope_theta, self.rope_settings()
        if thetas is None:
            is_full = (self.num_hidden_layers - 1 - layer) % _PERIOD == 0
            return NoRope() if is_full else self.rope()
        if len(thetas) != self.num_hidden_layers:
            raise ModelError("config.json's layer_rope_theta must have one entry per layer")
        if thetas[layer] not in (0, theta):
            raise ModelError(
                f"config.json's layer_rope_theta has {thetas[layer]}, but only 0 and rope_theta "
                f"({theta}) are supported"
            )
        return self.rope() if thetas[layer] else NoRope()


class Attention(nn.Module):
    shard_spec: ClassVar[ShardSpec] = replace(
        ATTENTION_SHARDS, column_parallel=(*ATTENTION_SHARDS.column_parallel, "gate_proj")
    )

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.kv_heads
        hidden, size, self.eps = config.hidden_size, config.head_size, config.rms_norm_eps
        self.scale = config.qk_scale_factor * size**-0.5
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=False)
        self.gate_proj = nn.Linear(hidden, self.heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=False)
        self.rope = config.layer_rope(layer)

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries = normalize_rms(split_heads(self.q_proj(x), self.heads), self.eps)
        keys = normalize_rms(split_heads(self.k_proj(x), self.kv_heads), self.eps)
        values = split_heads(self.v_proj(x), self.kv_heads)
        queries, keys = self.rope(queries, kv.positions), self.rope(keys, kv.positions)
        seen = merge_heads(kv.attend(queries, keys, values, scale=self.scale))
        return self.o_proj(seen * mx.sigmoid(self.gate_proj(x)))


class Block(nn.Module):
    """Computes h = x + norm(attention(norm(x))) and returns h + norm(mlp(norm(h)))."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.window = config.window(layer)
        self.self_attn = Attention(config, layer)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = config.norm()
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.post_norm_eps)
        self.pre_feedforward_layernorm = config.norm()
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, config.post_norm_eps)

    def __call__(
        self, x: mx.array, kv: AttentionCache, select: SelectPositions = select_all
    ) -> mx.array:
        seen = self.self_attn(self.input_layernorm(x), kv)
        x = select(x + self.post_attention_layernorm(seen))
        hidden = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(hidden)

    def make_kv(self) -> LayerCache:
        return KVCache() if self.window is None else RotatingKVCache(self.window)

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        return self.self_attn.rope.rerotate(keys, positions)


class Backbone(decoder.Backbone):
    def __init__(self, config: Config, layers: Sequence[Block]) -> None:
        super().__init__(config, layers)
        self._eps = config.rms_norm_eps

    def embed(self, tokens: mx.array) -> mx.array:
        return normalize_rms(self.embed_tokens(tokens), self._eps)


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        for key, only in (("hidden_activation", "silu"), ("attention_bias", False)):
            if getattr(config, key) != only:
                raise ModelError(f"{key} {getattr(config, key)!r} is not supported")
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, Backbone(config, blocks))
        self._multiplier, self._cap = config.output_multiplier, config.final_logit_softcapping

    def logits(self, hidden: mx.array) -> mx.array:
        return softcap_logits(super().logits(hidden) * self._multiplier, self._cap)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Converts the checkpoint, and adds the offset of the norm weights."""
        return {
            name: array + 1 if name.endswith("_layernorm.weight") else array
            for name, array in super().sanitize(weights).items()
        }
