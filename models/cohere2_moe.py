"""Cohere 2 MoE (Command A Plus and North, Cohere 2026): attention and a mixture of experts are
computed from the same norm, and added to the residual stream together.

Knows: the layers, the parameter names. Must not know: devices, kernels, types of caches.

Layers with full attention have no rotary positions, except dense ones, and those with a window
rotate adjacent dimensions. In some models, the first layers are dense. The shared experts are added
to the selected experts, or averaged with them. Logits are scaled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import decoder
from models.attention import GroupedQueryAttention
from models.base import ModelError, SelectPositions, select_all
from models.experts import Experts, select_top_experts, stack_experts
from models.kv import AttentionCache, KVCache, LayerCache
from models.layers import GatedMLP
from models.rope import NoRope, Rope
from models.rotating_kv import RotatingKVCache
from models.sharding import REPLICATED, ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads. rms_norm_eps: 0 for layer norms with
    `layer_norm_eps`. num_shared_experts: the number of shared experts, which are one MLP of this
    many times the width."""

    num_experts: int
    num_experts_per_tok: int
    head_dim: int | None = 128
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    layer_norm_eps: float = 1e-5
    rms_norm_eps: float = 0.0
    layer_norm_bias: bool = False
    rope_traditional: bool = True
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 4
    logit_scale: float = 0.0625
    norm_topk_prob: bool = True
    expert_selection_fn: str = "softmax"
    num_shared_experts: int = 0
    shared_expert_combination_strategy: str = "average"
    first_k_dense_replace: int = 0
    mlp_layer_types: Sequence[str] | None = None
    prefix_dense_intermediate_size: int | None = None
    prefix_dense_sliding_window_pattern: int = 1

    def norm(self) -> Any:
        if self.rms_norm_eps:
            return nn.RMSNorm(self.hidden_size, self.rms_norm_eps)
        return nn.LayerNorm(self.hidden_size, self.layer_norm_eps, bias=False)

    def default_layer_type(self, layer: int) -> str:
        first, pattern = self.first_k_dense_replace, self.sliding_window_pattern
        if layer < first:
            first, pattern = 0, self.prefix_dense_sliding_window_pattern
        return decoder.SLIDING if (layer - first + 1) % pattern else decoder.FULL

    def is_dense(self, layer: int) -> bool:
        if self.mlp_layer_types is None:
            return layer < self.first_k_dense_replace
        if len(self.mlp_layer_types) != self.num_hidden_layers:
            raise ModelError("config.json's mlp_layer_types must have one entry per layer")
        if self.mlp_layer_types[layer] not in ("dense", "sparse"):
            raise ModelError(f"an MLP of type {self.mlp_layer_types[layer]!r} is not supported")
        return self.mlp_layer_types[layer] == "dense"

    def layer_rope(self, layer: int) -> Rope | NoRope:
        rotates = self.is_dense(layer) and self.prefix_dense_sliding_window_pattern == 1
        if rotates or self.layer_type(layer) == decoder.SLIDING:
            return self.rope()
        return NoRope()


class MoE(nn.Module):
    shard_spec: ClassVar[ShardSpec] = REPLICATED  # only the experts are sharded

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        if not 0 < self.top_k <= experts:
            raise ModelError(
                f"num_experts_per_tok is {self.top_k}, but must be between 1 and {experts}"
            )
        self.uses_softmax = config.expert_selection_fn == "softmax"
        self.averages = config.shared_expert_combination_strategy == "average"
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.switch_mlp = Experts(hidden, inner, experts)
        if config.num_shared_experts > 0:
            self.shared_experts = GatedMLP(hidden, inner * config.num_shared_experts)

    def __call__(self, x: mx.array) -> mx.array:
        logits = self.gate(x)
        chosen = select_top_experts(logits, self.top_k)
        best = mx.take_along_axis(logits, chosen, axis=-1)
        y = self.switch_mlp(x, chosen, self._compute_shares(best))
        if "shared_experts" not in self:
            return y
        total = y + self.shared_experts(x)
        return total / 2 if self.averages else total

    def _compute_shares(self, logits: mx.array) -> mx.array:
        """Returns the weights of the selected experts. A softmax is over these experts only."""
        if self.uses_softmax:
            return mx.softmax(logits, axis=-1, precise=True)
        shares = mx.sigmoid(logits)
        return shares / shares.sum(axis=-1, keepdims=True) if self.norm_topk_prob else shares


class Block(nn.Module):
    """Computes x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        bias, self.window = config.attention_bias, config.window(layer)
        self.self_attn = GroupedQueryAttention(
            config, config.layer_rope(layer), bias=bias, o_bias=bias
        )
        dense_width = config.prefix_dense_intermediate_size or config.intermediate_size
        is_dense = config.is_dense(layer)
        self.mlp = GatedMLP(config.hidden_size, dense_width) if is_dense else MoE(config)
        self.input_layernorm = config.norm()

    def __call__(
        self, x: mx.array, kv: AttentionCache, select: SelectPositions = select_all
    ) -> mx.array:
        normed = self.input_layernorm(x)
        return select(x + self.self_attn(normed, kv)) + self.mlp(select(normed))

    def make_kv(self) -> LayerCache:
        return KVCache() if self.window is None else RotatingKVCache(self.window)

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        return self.self_attn.rope.rerotate(keys, positions)


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        for key, supported in (
            ("hidden_act", ("silu",)),
            ("layer_norm_bias", (False,)),
            ("expert_selection_fn", ("softmax", "sigmoid")),
            ("shared_expert_combination_strategy", ("average", "sum")),
        ):
            if getattr(config, key) not in supported:
                raise ModelError(f"{key} {getattr(config, key)!r} is not supported")
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))
        self._logit_scale = config.logit_scale

    def logits(self, hidden: mx.array) -> mx.array:
        return super().logits(hidden) * self._logit_scale

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Converts the checkpoint, and stacks experts that are stored one by one."""
        return super().sanitize(stack_experts(weights))
