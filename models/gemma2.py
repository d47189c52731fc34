"""Gemma 2 (Gemma Team 2024).

Knows: the layers, windows and soft-caps, the parameter names. Must not know: devices, types of
caches, batches.

Blocks have norms before and after attention and before and after the gated MLP (tanh-approximated
GELU). Every other layer uses sliding window attention. Attention scores and logits are soft-capped.
Norm weights are stored with an offset of -1. Of the reference implementations, transformers
implements the windows, while mlx-lm (0.32) uses full attention in all layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from models import base, decoder
from models.base import SelectPositions, select_all
from models.kv import AttentionCache, KVCache, LayerCache
from models.layers import GatedMLP, merge_heads, softcap_logits, split_heads
from models.rotating_kv import RotatingKVCache
from models.sharding import ATTENTION_SHARDS, ShardSpec

_ACTIVATION = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads, with the defaults of Hugging Face's
    Gemma2Config."""

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    max_position_embeddings: int = 8192
    sliding_window: int | None = 4096
    hidden_activation: str = _ACTIVATION
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    use_bidirectional_attention: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Reads the config. A null cap disables capping instead of selecting the default."""
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        off = {cap: 0.0 for cap in caps if config.get(cap, 1.0) is None}
        # `super()` without arguments fails here, because `slots=True` creates a new class
        return super(Config, cls).from_dict({**config, **off})

    def default_layer_type(self, layer: int) -> str:
        return decoder.FULL if layer % 2 else decoder.SLIDING

    def check_supported(self) -> None:
        """Raises ModelError for variants of the architecture that are not implemented."""
        if self.hidden_activation != _ACTIVATION:
            raise base.ModelError(f"hidden_activation {self.hidden_activation!r} is not supported")
        if self.use_bidirectional_attention:
            raise base.ModelError(
                "use_bidirectional_attention is not supported, because such a model cannot "
                "generate text"
            )


class Attention(nn.Module):
    shard_spec: ClassVar[ShardSpec] = ATTENTION_SHARDS

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.kv_heads
        hidden, size, bias = config.hidden_size, config.head_size, config.attention_bias
        self.scale = config.query_pre_attn_scalar**-0.5
        self.softcap = config.attn_logit_softcapping or None
        self.window = config.window(layer)
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=bias)
        self.rope = config.rope(config.layer_type(layer))

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries = self.rope(split_heads(self.q_proj(x), self.heads), kv.positions)
        keys = self.rope(split_heads(self.k_proj(x), self.kv_heads), kv.positions)
        values = split_heads(self.v_proj(x), self.kv_heads)
        seen = kv.attend(queries, keys, values, scale=self.scale, softcap=self.softcap)
        return self.o_proj(merge_heads(seen))

    def make_kv(self) -> LayerCache:
        return KVCache() if self.window is None else RotatingKVCache(self.window)


class Block(nn.Module):
    """A decoder block. attention: the attention of this architecture, or of a subclass."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation=nn.gelu_approx)
        self.input_layernorm = config.norm()
        self.post_attention_layernorm = config.norm()
        self.pre_feedforward_layernorm = config.norm()
        self.post_feedforward_layernorm = config.norm()

    def __call__(
        self, x: mx.array, kv: AttentionCache, select: SelectPositions = select_all
    ) -> mx.array:
        seen = self.self_attn(self.input_layernorm(x), kv)
        x = select(_add_clipped(x, self.post_attention_layernorm(seen)))
        hidden = self.mlp(self.pre_feedforward_layernorm(x))
        return _add_clipped(x, self.post_feedforward_layernorm(hidden))

    def make_kv(self) -> LayerCache:
        return self.self_attn.make_kv()

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        return self.self_attn.rope.rerotate(keys, positions)


class ScaledBackbone(decoder.Backbone):
    """A backbone that scales its embeddings. scale: the factor of the embeddings, rounded to the
    type of the activations."""

    def __init__(self, config: Config, layers: Sequence[Block], scale: float) -> None:
        super().__init__(config, layers)
        self._scale = scale

    def embed(self, tokens: mx.array) -> mx.array:
        x = self.embed_tokens(tokens)
        return x * mx.array(self._scale, x.dtype)


class CausalLM(decoder.CausalLM):
    def __init__(self, config: Config, backbone: decoder.Backbone) -> None:
        super().__init__(config, backbone)
        self._softcap = config.final_logit_softcapping or None

    def logits(self, hidden: mx.array) -> mx.array:
        return softcap_logits(super().logits(hidden), self._softcap)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return add_norm_offsets(super().sanitize(weights))


class Model(CausalLM):
    def __init__(self, config: Config) -> None:
        config.check_supported()
        blocks = [
            Block(config, Attention(config, layer)) for layer in range(config.num_hidden_layers)
        ]
        super().__init__(config, ScaledBackbone(config, blocks, config.hidden_size**0.5))


def add_norm_offsets(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Adds one to the norm weights once, instead of in each step."""
    return {
        name: array + 1 if name.endswith("norm.weight") else array
        for name, array in weights.items()
    }


def _add_clipped(x: mx.array, residual: mx.array) -> mx.array:
    """Returns x + residual. Gemma's residuals exceed the range of float16, so they are clipped for
    float16, as in mlx-lm's gemma3."""
    if x.dtype != mx.float16:
        return x + residual
    maximum = mx.finfo(mx.float16).max
    total = x.astype(mx.float32) + residual.astype(mx.float32)
    return mx.clip(total, -maximum, maximum).astype(mx.float16)
