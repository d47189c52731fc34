"""Granite (IBM 2024) is a Llama with four constant factors.

Knows: the factors, and how they become those of a Llama. Must not know: devices, kernels, types of
caches.

Embeddings, attention scores and logits are scaled, and the output of each sublayer is multiplied by
m before it is added to the residual stream: x + m f(norm(x)). Here, the residual stream is divided
by m instead. Then a block is an ordinary one, x' + f(norm(x')), for which the kernels have fused
operations. The norms give the same results, if their epsilon is divided by m^2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from models import decoder, llama
from models.base import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    """The keys of config.json that this architecture reads. logits_scaling: the divisor of the
    logits. The other three are factors."""

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def check_factors(self) -> None:
        """Raises ModelError for a factor that is not positive."""
        for key in (
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        ):
            if not getattr(self, key) > 0:
                raise ModelError(f"config.json: {key} is {getattr(self, key)}, but must be above 0")

    def norm(self) -> nn.RMSNorm:
        """Returns a norm over hidden states, which are divided by the residual multiplier."""
        return nn.RMSNorm(self.hidden_size, self.rms_norm_eps / self.residual_multiplier**2)


class Attention(llama.Attention):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        self.scale = config.attention_multiplier


class Block(llama.Block):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        self.self_attn = Attention(config, layer)


class Backbone(decoder.Backbone):
    """A backbone whose hidden states are divided by the residual multiplier."""

    def __init__(self, config: Config, layers: Sequence[decoder.Block]) -> None:
        super().__init__(config, layers)
        self._scale = config.embedding_multiplier / config.residual_multiplier

    def embed(self, tokens: mx.array) -> mx.array:
        x = self.embed_tokens(tokens)
        # a factor of 16 bits would be rounded
        return (x.astype(mx.float32) * self._scale).astype(x.dtype)


class CausalLM(decoder.CausalLM):
    """The common part of Granite models."""

    def __init__(self, config: Config, blocks: Sequence[decoder.Block]) -> None:
        super().__init__(config, Backbone(config, blocks))
        self._logits_scaling = config.logits_scaling

    def logits(self, hidden: mx.array) -> mx.array:
        return super().logits(hidden) / self._logits_scaling


class Model(CausalLM):
    def __init__(self, config: Config) -> None:
        config.check_factors()
        super().__init__(
            config, [Block(config, layer) for layer in range(config.num_hidden_layers)]
        )
