"""DeepSeek V3 and R1 (DeepSeek-AI 2024), and Kimi K2 (Moonshot AI 2025): multi-head latent
attention, and many small experts in groups.

Knows: the layers, the checkpoint tensors. Must not know: devices, the engine, how latent attention
is computed.

The latent attention is the same as in DeepSeek-V2 (2024); see models/mla.py. The epsilon of its two
inner norms is not a key of config.json.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import decoder
from models.base import ModelError
from models.experts import GroupedTopKConfig, GroupedTopKMoE, move_router_bias, stack_experts
from models.kv import AttentionCache, LayerCache
from models.layers import GatedMLP, merge_heads, split_heads
from models.mla import LatentCache, MultiLinear, split_kv_b_proj
from models.prenorm import PreNormBlock
from models.rope import Rope
from models.sharding import ShardSpec

# keys that change the computation, and the values that are supported
_SUPPORTED: Mapping[str, Sequence[Any]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "partial_rotary_factor": (1.0,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(GroupedTopKConfig):
    """The keys of config.json that this architecture reads. q_lora_rank: None for a full query
    projection. mlp_layer_types: "dense" or "sparse"
    for each layer; None if it follows from first_k_dense_replace and moe_layer_freq."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    attention_bias: bool = False
    rope_interleave: bool = True
    n_routed_experts: int = 0
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 3
    moe_layer_freq: int = 1
    mlp_layer_types: Sequence[str] | None = None

    @property
    def head_size(self) -> int:
        """The size of the rotary part, which is the only part that depends on positions."""
        return self.qk_rope_head_dim

    def rope(self, layer_type: str | None = None) -> Rope:
        return replace(decoder.Config.rope(self, layer_type), traditional=self.rope_interleave)

    def scale(self) -> float:
        """Returns the scale of attention scores. It includes yarn's second temperature."""
        scaling = self.rope_settings()[1] or {}
        size, factor = self.qk_nope_head_dim + self.qk_rope_head_dim, scaling.get("factor", 1.0)
        temperature = 1.0
        if factor > 1 and scaling.get("mscale_all_dim"):
            temperature += 0.1 * scaling["mscale_all_dim"] * math.log(factor)
        return temperature**2 * size**-0.5

    @property
    def latent_norm_eps(self) -> float:
        """The epsilon of the norms of the two latents."""
        return 1e-6

    def make_mlp(self, layer: int) -> GatedMLP | GroupedTopKMoE:
        if not self.is_sparse(layer):
            return GatedMLP(self.hidden_size, self.intermediate_size)
        return self.make_experts()

    def is_sparse(self, layer: int) -> bool:
        if self.mlp_layer_types is not None:
            return self._is_listed_sparse(self.mlp_layer_types, layer)
        late = layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
        return self.n_routed_experts > 0 and late

    def _is_listed_sparse(self, types: Sequence[str], layer: int) -> bool:
        if len(types) != self.num_hidden_layers:
            raise ModelError("config.json's mlp_layer_types must have one entry per layer")
        if types[layer] not in ("dense", "sparse"):
            raise ModelError(f"an MLP of type {types[layer]!r} is not supported")
        return types[layer] == "sparse"


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        self.heads, self.latent_dim = heads, config.kv_lora_rank
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_dim, self.scale = config.v_head_dim, config.scale()
        size, rank = self.nope_dim + self.rope_dim, config.q_lora_rank
        if rank is None:
            self.q_proj = nn.Linear(hidden, heads * size, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(rank, config.latent_norm_eps)
            self.q_b_proj = nn.Linear(rank, heads * size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent_dim + self.rope_dim, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(self.latent_dim, config.latent_norm_eps)
        self.embed_q = MultiLinear(self.nope_dim, self.latent_dim, heads)
        self.unembed_out = MultiLinear(self.latent_dim, self.v_dim, heads)
        self.o_proj = nn.Linear(heads * self.v_dim, hidden, bias=bias)
        self.rope = config.rope()

    @property
    def shard_spec(self) -> ShardSpec:
        """Returns the shard spec. All heads share the latents, so the latents are replicated."""
        return ShardSpec(
            column_parallel=("q_proj" if "q_proj" in self else "q_b_proj",),
            row_parallel=("o_proj",),
            first_axis=("embed_q", "unembed_out"),
            counts=("heads",),
        )

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        plain, rotary = mx.split(self._queries(x, kv.positions), [self.nope_dim], axis=-1)
        latents, keys = mx.split(self.kv_a_proj_with_mqa(x)[:, None], [self.latent_dim], axis=-1)
        latents = self.kv_a_layernorm(latents)
        rotary, keys = self.rope(rotary, kv.positions), self.rope(keys, kv.positions)
        if self._prefers_expanded(x.shape[1], kv.positions):
            assert isinstance(kv, LatentCache), "rows of a batch must have one query each"
            seen = self._attend_expanded(plain, rotary, keys, latents, kv)
        else:
            seen = self._attend_absorbed(plain, rotary, keys, latents, kv)
        return self.o_proj(merge_heads(seen))

    def _queries(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Maps [B, L, D] to [B, H, L, nope + rope], before the rotation. offset: see `Rope`."""
        if "q_proj" in self:
            return split_heads(self.q_proj(x), self.heads)
        return split_heads(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))), self.heads)

    def _prefers_expanded(self, length: int, past_length: int | mx.array) -> bool:
        """Returns whether the expanded form needs fewer multiplications per head, for `length`
        queries after `past_length` positions. The multiplication counts are as follows, with width
        = nope + value dimensions and total = past_length + length:

            absorbed   width * latent * length + (2 * latent + rotary) * length * total
            expanded   width * latent * total  + (width + rotary)      * length * total
        """
        if length == 1 or isinstance(past_length, mx.array):
            return False
        width = self.nope_dim + self.v_dim
        more = (2 * self.latent_dim - width) * length * (past_length + length)
        return more > width * self.latent_dim * past_length

    def _attend_absorbed(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        k_rope: mx.array,
        latents: mx.array,
        kv: AttentionCache,
    ) -> mx.array:
        queries = mx.concatenate([self.embed_q(q_nope), q_rope], axis=-1)
        return self.unembed_out(kv.attend(queries, k_rope, latents, scale=self.scale))

    def _attend_expanded(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        k_rope: mx.array,
        latents: mx.array,
        kv: LatentCache,
    ) -> mx.array:
        queries = mx.concatenate([q_nope, q_rope], axis=-1)
        return kv.attend_expanded(queries, k_rope, latents, self._expand, scale=self.scale)

    def _expand(self, latents: mx.array, heads: slice) -> tuple[mx.array, mx.array]:
        """Returns the keys, without the rotary part, and the values of a range of heads."""
        keys = self.embed_q.apply_transposed(latents, heads)
        return keys, self.unembed_out(latents, heads)


class Block(PreNormBlock):
    def __init__(self, config: Config, attention: Attention, layer: int) -> None:
        super().__init__(config, attention, config.make_mlp(layer))

    def make_kv(self) -> LayerCache:
        return LatentCache()


class CausalLM(decoder.CausalLM):
    """A model of such blocks. attention: the class of their attention. supported: the values of
    config keys that are supported, if they differ from DeepSeek V3's."""

    # latent attention uses the expanded form for a prompt, and the absorbed form in a decode step
    batch_invariant: ClassVar[bool] = False

    def __init__(
        self,
        config: Config,
        *,
        attention: Callable[[Any], Attention] = Attention,
        supported: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    ) -> None:
        for key, values in {**_SUPPORTED, **supported}.items():
            if getattr(config, key) not in values:
                raise ModelError(f"{key} {getattr(config, key)!r} is not supported")
        layers = range(config.num_hidden_layers)
        blocks = [Block(config, attention(config), layer) for layer in layers]
        super().__init__(config, decoder.Backbone(config, blocks))
        self.config: Config = config

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drops the layers for multi-token prediction, stacks experts, and splits the projection
        from latents to keys and values."""
        # transformers 5 saves the layers of Kimi K2.5 as blocks
        named = {re.sub(r"^model\.blocks\.", "model.layers.", n): a for n, a in weights.items()}
        kept = decoder.drop_extra_layers(named, self.config.num_hidden_layers)
        return super().sanitize(self._split_kv_b_projs(stack_experts(move_router_bias(kept))))

    def _split_kv_b_projs(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        config, split = self.config, dict[str, mx.array]()
        for layer in range(config.num_hidden_layers):
            path = f"model.layers.{layer}.self_attn"
            if f"{path}.kv_b_proj.weight" in weights:
                halves = split_kv_b_proj(
                    f"{path}.kv_b_proj",
                    weights,
                    heads=config.num_attention_heads,
                    key_dim=config.qk_nope_head_dim,
                    latent_dim=config.kv_lora_rank,
                )
                split |= {f"{path}.{name}": array for name, array in halves.items()}
        rest = {name: a for name, a in weights.items() if ".kv_b_proj." not in name}
        return rest | split


class Model(CausalLM):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
