"""Laguna (Poolside 2026) is a mixture of experts with gated attention, whose layers differ in their
numbers of heads.

Knows: the layers, the checkpoint tensors. Must not know: devices, expert selection.

Full attention layers and those with a window have separate rope settings. The gate is a softplus of
the layer's input, for each head or for each dimension of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import decoder
from models.attention import GroupedQueryAttention
from models.base import ModelError
from models.experts import GroupedTopKMoE, move_router_bias, stack_experts
from models.kv import AttentionCache
from models.layers import GatedMLP, merge_heads, softcap_logits, split_heads
from models.prenorm import PreNormBlock
from models.rope import Scaling
from models.sharding import ATTENTION_SHARDS, ShardSpec

# the rope settings of config.json without any: theta, the rotated share of a head
_DEFAULT_ROPES = {decoder.FULL: (500_000.0, 0.5), decoder.SLIDING: (10_000.0, 1.0)}

# values of `gating`; True is the same as the first
_PER_HEAD, _PER_ELEMENT = "per-head", "per-element"

# larger than in any trained model, and small enough to be allocated
_MAX_HEADS = 4096

# the names of modules in checkpoints -> our names
_RENAMED = (
    (".mlp.experts.e_score_correction_bias", ".mlp.e_score_correction_bias"),
    (".mlp.shared_expert.", ".mlp.shared_experts."),
    (".mlp.gate.proj.", ".mlp.gate."),
    (".mlp.switch_mlp.gate_up_proj.", ".mlp.experts.gate_up_proj."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads. num_attention_heads_per_layer: None if
    all layers have `num_attention_heads`. mlp_layer_types: "dense" or "sparse" for each layer; None
    if only the first one is dense."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    head_dim: int | None = 128
    sliding_window: int | None = 512
    attention_bias: bool = False
    qkv_bias: bool = False
    gating: bool | str = True
    num_attention_heads_per_layer: Sequence[int] | None = None
    mlp_layer_types: Sequence[str] | None = None
    moe_routed_scaling_factor: float = 1.0
    moe_router_logit_softcapping: float = 0.0
    moe_router_score_func: str = "sigmoid"
    moe_apply_router_weight_on_input: bool = False

    def rope_settings(self, layer_type: str | None = None) -> tuple[float, Scaling | None]:
        if self.rope_parameters is not None or layer_type not in _DEFAULT_ROPES:
            return decoder.Config.rope_settings(self, layer_type)
        theta, share = _DEFAULT_ROPES[layer_type]
        return theta, {"rope_type": "default", "partial_rotary_factor": share}

    def at_layer(self, layer: int) -> "Config":
        """Returns the config with the number of heads of a layer. Raises ModelError."""
        heads = self.num_attention_heads
        if self.num_attention_heads_per_layer is not None:
            self._check_length("num_attention_heads_per_layer", self.num_attention_heads_per_layer)
            heads = self.num_attention_heads_per_layer[layer]
        if not 0 < heads <= _MAX_HEADS or heads % self.kv_heads:
            raise ModelError(
                f"config.json's num_attention_heads_per_layer has {heads} heads, but must have a "
                f"multiple of num_key_value_heads ({self.kv_heads}), at most {_MAX_HEADS}"
            )
        return replace(self, num_attention_heads=heads)

    def make_mlp(self, layer: int) -> "GatedMLP | MoE":
        kind = "sparse" if layer else "dense"
        if self.mlp_layer_types is not None:
            self._check_length("mlp_layer_types", self.mlp_layer_types)
            kind = self.mlp_layer_types[layer]
        if kind not in ("dense", "sparse"):
            raise ModelError(f"an MLP of type {kind!r} is not supported")
        return GatedMLP(self.hidden_size, self.intermediate_size) if kind == "dense" else MoE(self)

    def _check_length(self, key: str, values: Sequence[object]) -> None:
        if len(values) != self.num_hidden_layers:
            raise ModelError(f"config.json's {key} must have one entry per layer")


class Attention(GroupedQueryAttention):
    shard_spec: ClassVar[ShardSpec] = replace(
        ATTENTION_SHARDS, column_parallel=(*ATTENTION_SHARDS.column_parallel, "g_proj")
    )

    def __init__(self, config: Config, layer_type: str) -> None:
        bias = config.attention_bias
        super().__init__(config, config.rope(layer_type), bias=bias, o_bias=bias, qk_norm=True)
        # the dimensions of a head that share a gate
        self.gated_dims = 1 if config.gating == _PER_ELEMENT else config.head_size
        gates = self.heads * config.head_size // self.gated_dims
        self.g_proj = nn.Linear(config.hidden_size, gates, bias=False)

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        assert self.q_norm is not None
        assert self.k_norm is not None
        queries = self.q_norm(split_heads(self.q_proj(x), self.heads))
        keys = self.k_norm(split_heads(self.k_proj(x), self.kv_heads))
        values = split_heads(self.v_proj(x), self.kv_heads)
        queries, keys = self.rope(queries, kv.positions), self.rope(keys, kv.positions)
        seen = merge_heads(kv.attend(queries, keys, values, scale=self.scale))
        gates = nn.softplus(self.g_proj(x).astype(mx.float32)).astype(seen.dtype)
        gated = mx.unflatten(seen, -1, (-1, self.gated_dims)) * gates[..., None]
        return self.o_proj(gated.flatten(-2))


class MoE(GroupedTopKMoE):
    """The mixture of experts of DeepSeek-V3 without groups, with capped logits."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            top_k=config.num_experts_per_tok,
            scale=config.moe_routed_scaling_factor,
            shared_width=config.shared_expert_intermediate_size,
        )
        self._cap = config.moe_router_logit_softcapping or None

    def router_logits(self, x: mx.array) -> mx.array:
        return softcap_logits(self.gate(x), self._cap)


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        attention = Attention(config.at_layer(layer), config.layer_type(layer))
        super().__init__(config, attention, config.make_mlp(layer), window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        for key, supported in (
            ("hidden_act", ("silu",)),
            ("gating", (True, _PER_HEAD, _PER_ELEMENT)),
            ("moe_router_score_func", ("sigmoid",)),
            ("moe_apply_router_weight_on_input", (False,)),
            ("qkv_bias", (False,)),
        ):
            if getattr(config, key) not in supported:
                raise ModelError(f"{key} {getattr(config, key)!r} is not supported")
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Converts the checkpoint, and stacks experts that are stored one by one."""
        renamed: dict[str, mx.array] = {}
        for name, array in weights.items():
            for theirs, ours in _RENAMED:
                name = name.replace(theirs, ours)
            renamed[name] = array
        return super().sanitize(stack_experts(move_router_bias(renamed)))
