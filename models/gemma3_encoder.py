"""The text model of Gemma 3 with attention in both directions: EmbeddingGemma (Vera et al. 2025).

Knows: the differences from Gemma 3. Must not know: pooling, devices.

A token attends to the whole input, or in sliding window layers to the tokens that are at most half
a window away, in both directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from models import decoder, gemma2, gemma3
from models.encoder import Encoder, attend_inputs, rotate_inputs
from models.layers import merge_heads, split_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(gemma3.Config):
    """The keys of config.json that this architecture reads."""

    max_position_embeddings: int = 2048


class Attention(gemma3.Attention):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        sliding = config.layer_type(layer) == decoder.SLIDING
        self._distance = (config.sliding_window or 0) // 2 if sliding else None

    def __call__(self, x: mx.array, kv: Any) -> mx.array:
        """Maps hidden states [1, T, D] of packed inputs to [1, T, D]. kv: the lengths of the
        inputs, in place of a cache."""
        lengths: Sequence[int] = kv
        queries = self.q_norm(split_heads(self.q_proj(x), self.heads))
        keys = self.k_norm(split_heads(self.k_proj(x), self.kv_heads))
        values = split_heads(self.v_proj(x), self.kv_heads)
        seen = attend_inputs(
            rotate_inputs(self.rope, queries, lengths),
            rotate_inputs(self.rope, keys, lengths),
            values,
            lengths,
            scale=self.scale,
            window=self._distance,
        )
        return self.o_proj(merge_heads(seen))


class Model(Encoder):
    def __init__(self, config: Config) -> None:
        super().__init__()
        layers = range(config.num_hidden_layers)
        blocks = [gemma2.Block(config, Attention(config, layer)) for layer in layers]
        # in float32, like the published weights
        self.model = gemma2.ScaledBackbone(config, blocks, config.hidden_size**0.5)

    def encode(
        self, tokens: mx.array, lengths: Sequence[int], segments: mx.array | None = None
    ) -> mx.array:
        return self.model(tokens[None], [lengths] * len(self.model.layers))[0]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return gemma2.add_norm_offsets(super().sanitize(weights))
