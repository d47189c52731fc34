"""Qwen2 and Qwen2.5 (Yang et al. 2024): a Llama whose queries, keys and values have biases."""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import decoder
from models.kv import AttentionCache
from models.layers import GatedMLP, merge_heads, split_heads
from models.prenorm import PreNormBlock
from models.sharding import HEADS, Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """max_window_layers: so many layers see everything; those above have the window, in a model
    that uses one."""

    use_sliding_window: bool = False
    max_window_layers: int = 28

    def usual_layer_type(self, layer: int) -> str:
        slides = self.use_sliding_window and layer >= self.max_window_layers
        return decoder.SLIDING if slides else decoder.FULL


class Attention(nn.Module):
    cut: ClassVar[Cut] = HEADS

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.kv_heads
        hidden, size = config.hidden_size, config.head_size
        self.scale = size**-0.5
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=True)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=True)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=True)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=False)
        self.rope = config.rope()

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries = self.rope(split_heads(self.q_proj(x), self.heads), kv.offset)
        keys = self.rope(split_heads(self.k_proj(x), self.kv_heads), kv.offset)
        values = split_heads(self.v_proj(x), self.kv_heads)
        return self.o_proj(merge_heads(kv.attend(queries, keys, values, scale=self.scale)))


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation=config.activation())
        super().__init__(config, Attention(config), mlp, window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Trunk(config, blocks))
