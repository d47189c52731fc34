"""The text model of Gemma 3 (Gemma Team 2025), in all sizes.

Knows: the differences from Gemma 2. Must not know: devices, types of caches, vision towers.

Gemma 3 differs from Gemma 2 in three ways. It normalizes queries and keys instead of soft-capping.
It has five sliding window layers for each full attention layer. The two types of layers have
separate rope settings. The rows of an image attend to each other in both directions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from models import base, decoder, gemma2
from models.kv import AttentionCache
from models.layers import merge_heads, split_heads
from models.rope import Rope, make_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(gemma2.Config):
    """The keys of config.json that this architecture reads, with the defaults of Hugging Face's
    Gemma3TextConfig. Published configs omit most of them."""

    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    sliding_window_pattern: int = 6
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    def default_layer_type(self, layer: int) -> str:
        return decoder.SLIDING if (layer + 1) % self.sliding_window_pattern else decoder.FULL

    def is_two_way(self, layer: int) -> bool:
        return True

    def rope(self, layer_type: str | None = None) -> Rope:
        """Returns the rope of a layer type. `rope_parameters` has an object for each
        layer type. The older keys are `rope_theta` and `rope_scaling` for full attention layers,
        and `rope_local_base_freq` for the other layers."""
        theta, scaling = self.rope_theta, self.rope_scaling
        if layer_type == decoder.SLIDING:
            theta, scaling = self.rope_local_base_freq, None
        if self.rope_parameters is not None:
            declared: Any = self.rope_parameters.get(layer_type or decoder.FULL)
            if not isinstance(declared, Mapping):
                raise base.ModelError(f"config.json's rope_parameters lacks {layer_type}")
            own = cast(Mapping[str, Any], declared)
            theta, scaling = own.get("rope_theta", theta), {**own, **(scaling or {})}
        return make_rope(
            dims=self.head_size,
            theta=theta,
            max_positions=self.max_position_embeddings,
            scaling=scaling,
        )


class Attention(gemma2.Attention):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = nn.RMSNorm(config.head_size, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_size, config.rms_norm_eps)

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries = self.q_norm(split_heads(self.q_proj(x), self.heads))
        keys = self.k_norm(split_heads(self.k_proj(x), self.kv_heads))
        queries, keys = self.rope(queries, kv.positions), self.rope(keys, kv.positions)
        values = split_heads(self.v_proj(x), self.kv_heads)
        seen = kv.attend(queries, keys, values, scale=self.scale, softcap=self.softcap)
        return self.o_proj(merge_heads(seen))


class Model(gemma2.CausalLM):
    def __init__(self, config: Config) -> None:
        config.check_supported()
        blocks = [
            gemma2.Block(config, Attention(config, layer))
            for layer in range(config.num_hidden_layers)
        ]
        # bfloat16, as in Gemma 3's training and in mlx-lm, regardless of the dtype of the
        # activations
        scale = mx.array(config.hidden_size**0.5, mx.bfloat16).astype(mx.float32)
        super().__init__(config, gemma2.ScaledBackbone(config, blocks, cast(float, scale.item())))
