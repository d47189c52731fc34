"""Qwen2 and Qwen2.5 (Yang et al. 2024) are Llamas with biases in the query, key and value
projections.

Knows: the biases, which layers have a window. Must not know: devices, kernels, types of caches.
"""

from dataclasses import dataclass

from models import decoder
from models.attention import GroupedQueryAttention
from models.layers import GatedMLP
from models.prenorm import PreNormBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads. max_window_layers: the number of layers
    with full attention. Layers above them use the sliding window if the model has one."""

    use_sliding_window: bool = False
    max_window_layers: int = 28

    def default_layer_type(self, layer: int) -> str:
        slides = self.use_sliding_window and layer >= self.max_window_layers
        return decoder.SLIDING if slides else decoder.FULL


class Attention(GroupedQueryAttention):
    def __init__(self, config: Config) -> None:
        super().__init__(config, config.rope(), bias=True)


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation=config.activation())
        super().__init__(config, Attention(config), mlp, window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))
