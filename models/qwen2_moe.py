"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024) are Qwen2 models with experts, including one shared
expert.

Knows: which layers have experts, the expert tensors. Must not know: devices, expert selection.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from models import decoder, qwen2
from models.base import ModelError
from models.experts import SparseMoeBlock, stack_experts
from models.layers import GatedMLP
from models.prenorm import PreNormBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen2.Config):
    """The keys of config.json that this architecture reads. decoder_sparse_step: every n-th layer
    has experts, except the layers in mlp_only_layers."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: Sequence[int] = ()

    def make_mlp(self, layer: int) -> Callable[[mx.array], mx.array]:
        sparse = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        if not sparse or layer in self.mlp_only_layers:
            return GatedMLP(self.hidden_size, self.intermediate_size)
        return SparseMoeBlock(
            self.hidden_size,
            self.moe_intermediate_size,
            self.num_experts,
            top_k=self.num_experts_per_tok,
            norm_topk_prob=self.norm_topk_prob,
            shared_width=self.shared_expert_intermediate_size,
        )


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        attention, mlp = qwen2.Attention(config), config.make_mlp(layer)
        super().__init__(config, attention, mlp, window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        if config.hidden_act != "silu":
            raise ModelError(f"qwen2_moe with hidden_act {config.hidden_act!r} is not supported")
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Converts the checkpoint, and stacks experts that are stored one by one."""
        return super().sanitize(stack_experts(weights))
