"""Llama (Touvron et al. 2023; Llama 3: Dubey et al. 2024).

Knows: the block, the config keys. Must not know: devices, kernels, types of caches.

The model has pre-norm blocks of grouped-query attention with rope and a SiLU-gated MLP.
"""

from dataclasses import dataclass

from models import decoder
from models.attention import GroupedQueryAttention
from models.layers import GatedMLP
from models.prenorm import PreNormBlock
from models.rope import NoRope, Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads."""

    attention_bias: bool = False
    mlp_bias: bool = False

    def layer_rope(self, layer: int) -> Rope | NoRope:
        """Returns the rope of a layer. Architectures whose layers differ override this
        method."""
        return self.rope()


class Attention(GroupedQueryAttention):
    def __init__(self, config: Config, layer: int) -> None:
        bias = config.attention_bias
        super().__init__(config, config.layer_rope(layer), bias=bias, o_bias=bias)


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            activation=config.activation(),
        )
        super().__init__(config, Attention(config, layer), mlp, window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))
