"""Mixtral (Jiang et al. 2024) is a Mistral whose MLPs are mixtures of experts.

Knows: the expert tensors. Must not know: devices, expert selection.
"""

from dataclasses import dataclass

import mlx.core as mx

from models import decoder, llama, mistral
from models.base import ModelError
from models.experts import SparseMoeBlock, stack_experts
from models.prenorm import PreNormBlock

# the original names of the projections -> the usual names
_PROJECTION_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(mistral.Config):
    """The keys of config.json that this architecture reads."""

    num_local_experts: int
    num_experts_per_tok: int


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        # a softmax over the selected experts equals a softmax over all experts, normalized to a sum
        # of 1
        mlp = SparseMoeBlock(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            top_k=config.num_experts_per_tok,
            norm_topk_prob=True,
        )
        super().__init__(config, llama.Attention(config, layer), mlp, window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        if config.hidden_act != "silu":
            raise ModelError(f"mixtral with hidden_act {config.hidden_act!r} is not supported")
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Converts the checkpoint, and stacks experts that are stored one by one under either set
        of names."""
        named = {
            name.replace(".block_sparse_moe.", ".mlp."): array for name, array in weights.items()
        }
        return super().sanitize(stack_experts(stack_experts(named, projections=_PROJECTION_NAMES)))
