"""GLM-4.5 and GLM-4.5-Air (Zhipu AI 2025): grouped-query attention, and DeepSeek-V3's mixture of
experts in all layers except the first ones.

Knows: the layers, the checkpoint tensors. Must not know: devices, expert selection.
"""

from dataclasses import dataclass

import mlx.core as mx

from models import decoder
from models.attention import GroupedQueryAttention
from models.base import ModelError
from models.experts import GroupedTopKConfig, GroupedTopKMoE, move_router_bias, stack_experts
from models.layers import GatedMLP
from models.prenorm import PreNormBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(GroupedTopKConfig):
    """The keys of config.json that this architecture reads."""

    first_k_dense_replace: int = 1
    attention_bias: bool = False
    use_qk_norm: bool = False
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5

    def make_mlp(self, layer: int) -> GatedMLP | GroupedTopKMoE:
        if layer < self.first_k_dense_replace:
            return GatedMLP(self.hidden_size, self.intermediate_size)
        return self.make_experts()


class Attention(GroupedQueryAttention):
    def __init__(self, config: Config) -> None:
        bias, norms = config.attention_bias, config.use_qk_norm
        super().__init__(config, config.rope(), bias=bias, qk_norm=norms)


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, Attention(config), config.make_mlp(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        for key, only in (
            ("hidden_act", "silu"),
            ("scoring_func", "sigmoid"),
            ("topk_method", "noaux_tc"),
        ):
            if getattr(config, key) != only:
                raise ModelError(f"{key} {getattr(config, key)!r} is not supported")
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Converts the checkpoint, drops the layers for multi-token prediction, and stacks experts
        that are stored one by one."""
        kept = decoder.drop_extra_layers(weights, self.config.num_hidden_layers)
        return super().sanitize(stack_experts(move_router_bias(kept)))
