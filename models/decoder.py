"""What all decoder-only models have around their blocks: embeddings, a stack, a norm, a head.

Knows: the names of Llama-like checkpoints (`model.embed_tokens`, `model.layers`, `model.norm`,
`lm_head`), what a block must offer. Must not know: what is in a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from models import base
from models.kv import KVCache, LayerCache
from models.rope import Rope, make_rope, rope_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(base.Config):
    """The keys of config.json that nearly every decoder reads."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
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

    def rope(self) -> Rope:
        """Rotates whole heads, as `rope_theta`, `rope_scaling`, `rope_parameters` say."""
        theta, scaling = rope_settings(self)
        return make_rope(
            dims=self.head_size,
            theta=theta,
            max_positions=self.max_position_embeddings,
            scaling=scaling,
        )

    def norm(self) -> nn.RMSNorm:
        """Over hidden states."""
        return nn.RMSNorm(self.hidden_size, self.rms_norm_eps)


class Block(Protocol):
    """One layer of the stack. Implementations are mlx.nn.Module."""

    def __call__(self, x: mx.array, kv: Any) -> mx.array:
        """[B, L, D] -> [B, L, D]; the L positions are appended to `kv`."""
        ...

    def make_kv(self) -> LayerCache:
        """An empty cache of the kind that this layer needs."""
        ...

    def turn(self, keys: mx.array, by: int) -> mx.array:
        """Keys as they lie in the cache, as if each stood `by` positions further on; asked only
        of a layer whose cache is a `KVCache`."""
        ...


class Trunk(nn.Module):
    def __init__(self, config: Config, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = list(blocks)
        self.norm = config.norm()

    def __call__(self, tokens: mx.array, kv: Sequence[object]) -> mx.array:
        x = self.embed_tokens(tokens)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x = layer(x, layer_kv)
        return self.norm(x)


class CausalLM(nn.Module):
    """The part of `models.base.Model` that does not depend on what a block is."""

    def __init__(self, config: Config, trunk: Trunk) -> None:
        super().__init__()
        self.config = config
        self.model = trunk
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def __call__(self, tokens: mx.array, kv: Sequence[object]) -> mx.array:
        return self.model(tokens, kv)

    def logits(self, hidden: mx.array) -> mx.array:
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(hidden)
        return self.lm_head(hidden)

    def make_kv(self) -> list[LayerCache]:
        return [layer.make_kv() for layer in self.model.layers]

    def shift(self, kv: Sequence[LayerCache], start: int, end: int) -> bool:
        if not all(isinstance(layer, KVCache) for layer in kv):
            return False
        for block, layer in zip(self.model.layers, kv, strict=True):
            cast(KVCache, layer).remove(start, end, block.turn)
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
