"""LFM2-MoE (Liquid AI 2025) is an LFM2 in which all layers except the first ones are mixtures of
experts.

Knows: the router, the expert tensors. Must not know: devices, the other layers of LFM2.
"""

import re
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import lfm2
from models.base import ModelError
from models.experts import Experts, select_top_experts, stack_experts
from models.layers import GatedMLP
from models.sharding import REPLICATED, ShardSpec

# the original names of the projections -> their names in MLX checkpoints
_PROJECTION_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(lfm2.Config):
    """The keys of config.json that this architecture reads. num_dense_layers: the number of layers
    without experts at the beginning."""

    num_dense_layers: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = True
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0


class MoE(nn.Module):
    """A mixture of experts with sigmoid scores. The bias affects the selection of experts but not
    their weights."""

    shard_spec: ClassVar[ShardSpec] = REPLICATED  # only the experts are sharded

    def __init__(self, config: Config) -> None:
        super().__init__()
        experts, self.top_k = config.num_experts, config.num_experts_per_tok
        if not 0 < self.top_k <= experts:
            raise ModelError(
                f"num_experts_per_tok is {self.top_k}, but must be between 1 and {experts}"
            )
        self.norm_topk_prob, self.routed_scaling_factor = (
            config.norm_topk_prob,
            config.routed_scaling_factor,
        )
        self.use_expert_bias = config.use_expert_bias
        self.gate = nn.Linear(config.hidden_size, experts, bias=False)
        self.switch_mlp = Experts(config.hidden_size, config.moe_intermediate_size, experts)
        if self.use_expert_bias:
            self.expert_bias = mx.zeros((experts,))

    def __call__(self, x: mx.array) -> mx.array:
        scores = mx.sigmoid(self.gate(x))
        ranked = scores.astype(mx.float32) + self.expert_bias if self.use_expert_bias else scores
        chosen = select_top_experts(ranked, self.top_k)
        shares = mx.take_along_axis(scores, chosen, axis=-1)
        if self.norm_topk_prob:
            shares = shares / (shares.sum(axis=-1, keepdims=True) + 1e-6)
        return self.switch_mlp(x, chosen, shares * self.routed_scaling_factor)


class Model(lfm2.CausalLM):
    def __init__(self, config: Config) -> None:
        def mlp(layer: int) -> GatedMLP | MoE:
            if layer < config.num_dense_layers:
                return GatedMLP(config.hidden_size, config.intermediate_size)
            return MoE(config)

        super().__init__(config, mlp)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        weights = {
            re.sub(r"\.(w[123])(?=\.)", lambda part: "." + _PROJECTION_NAMES[part[1]], name): array
            for name, array in weights.items()
        }
        return super().sanitize(stack_experts(weights))
