"""Qwen3-MoE (Yang et al. 2025) is a Qwen3 in which most MLPs are mixtures of experts. It is also
the text model of Qwen3-VL-MoE.

Knows: which layers have experts, the expert tensors. Must not know: devices, expert selection.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from models import decoder, qwen3
from models.base import ModelError
from models.experts import SparseMoeBlock, orient_fused_experts, stack_experts
from models.layers import GatedMLP
from models.prenorm import PreNormBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen3.Config):
    """The keys of config.json that this architecture reads. decoder_sparse_step: every n-th layer
    has experts, except the layers in mlp_only_layers."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: Sequence[int] = ()

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Reads the config. transformers 5 writes the number of experts under Mixtral's key."""
        named = {"num_experts": config.get("num_local_experts"), **config}
        # `super()` without arguments fails here, because `slots=True` creates a new class
        return super(Config, cls).from_dict(named)

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
        )


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        attention, mlp = qwen3.Attention(config), config.make_mlp(layer)
        super().__init__(config, attention, mlp, window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        if config.hidden_act != "silu":
            raise ModelError(f"qwen3_moe with hidden_act {config.hidden_act!r} is not supported")
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Converts the checkpoint, and stacks experts that are stored one by one."""
        oriented = orient_fused_experts(weights, self.config.hidden_size)
        return super().sanitize(stack_experts(oriented))
