"""Qwen3 (Yang et al. 2025) is a Qwen2 without biases and with query and key norms.

Knows: the query and key norms. Must not know: devices, kernels, types of caches.

Each head's query and key are normalized before rope is applied (Dehghani et al. 2023).
"""

from dataclasses import dataclass

from models import decoder, qwen2
from models.attention import GroupedQueryAttention
from models.layers import GatedMLP
from models.prenorm import PreNormBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen2.Config):
    """The keys of config.json that this architecture reads."""

    head_dim: int | None = 128
    attention_bias: bool = False


class Attention(GroupedQueryAttention):
    def __init__(self, config: Config) -> None:
        bias = config.attention_bias
        super().__init__(config, config.rope(), bias=bias, o_bias=bias, qk_norm=True)


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation=config.activation())
        super().__init__(config, Attention(config), mlp, window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))
