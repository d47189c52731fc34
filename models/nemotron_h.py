"""Nemotron-H (NVIDIA 2025) and Nemotron 3. Each layer is one of four: a Mamba-2 layer, attention
without rotary positions, an MLP, or a mixture of experts.

Knows: the layers, the checkpoint tensors. Must not know: devices, types of caches, how a Mamba-2
layer is computed.

MLPs have no gate: they compute down(relu(up(x))^2). In Nemotron 3 Super, the routed experts work on
a projection of the hidden states to fewer dimensions ("latent"). The router is DeepSeek-V3's.

The smallest step size of a Mamba-2 layer comes from `time_step_limit`, as in the original code and
in mlx-lm. transformers uses `time_step_min` instead, only for prompts.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import decoder, experts
from models.attention import GroupedQueryAttention
from models.base import ModelError, SelectPositions, select_all
from models.conv import channels_last
from models.experts import ExpertLinear, GroupedTopKMoE, move_router_bias, stack_experts
from models.image_inputs import ImageInputs
from models.kv import KVCache, LayerCache
from models.layers import apply_glu
from models.mamba2 import Mamba2Config, Mamba2Half, Mamba2Mixer, read_step_limits
from models.recurrent import RecurrentCache
from models.rope import NoRope
from models.sharding import MLP_SHARDS, ShardSpec

MAMBA, ATTENTION, MLP, MOE = "mamba", "attention", "mlp", "moe"

# the characters of `hybrid_override_pattern`, and the names of `layers_block_type`
_LAYER_TYPES = {
    "M": MAMBA,
    "*": ATTENTION,
    "-": MLP,
    "E": MOE,
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}

_MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads. The types of the layers are in
    `hybrid_override_pattern` (a string or a list of characters) or in `layers_block_type`, which
    transformers also calls `layer_types`. num_hidden_layers: not read. moe_latent_size: the width
    of the routed experts' inputs, None for that of the hidden states."""

    num_hidden_layers: int = 0
    intermediate_size: int = 0
    layer_norm_epsilon: float = 1e-5
    hybrid_override_pattern: str | Sequence[str] | None = None
    layers_block_type: Sequence[str] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    mlp_hidden_act: str = "relu2"
    mamba_hidden_act: str = "silu"
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    n_groups: int = 8
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    time_step_limit: Any = None
    n_routed_experts: int = 0
    n_shared_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1

    def read_layer_types(self) -> list[str]:
        """Returns MAMBA, ATTENTION, MLP or MOE for each layer. Raises ModelError."""
        names = self.hybrid_override_pattern or self.layers_block_type or self.layer_types or ()
        unknown = [name for name in names if name not in _LAYER_TYPES]
        if unknown:
            raise ModelError(
                f"config.json has a layer of type {unknown[0][:60]!r}; supported types: "
                f"{', '.join(_LAYER_TYPES)}"
            )
        if not names or len(names) > _MAX_LAYERS:
            raise ModelError(
                "config.json's layers_block_type or hybrid_override_pattern must list between 1 "
                f"and {_MAX_LAYERS} layers, not {len(names)}"
            )
        return [_LAYER_TYPES[name] for name in names]

    def norm(self) -> nn.RMSNorm:
        return nn.RMSNorm(self.hidden_size, self.layer_norm_epsilon)

    def make_mamba(self) -> Mamba2Mixer:
        return Mamba2Mixer(
            Mamba2Config(
                hidden_size=self.hidden_size,
                num_heads=self.mamba_num_heads,
                head_dim=self.mamba_head_dim,
                state_size=self.ssm_state_size,
                num_groups=self.n_groups,
                conv_width=self.conv_kernel,
                eps=self.layer_norm_epsilon,
                bias=self.use_bias,
                conv_bias=self.use_conv_bias,
                step_limits=read_step_limits(self.time_step_limit),
            )
        )


class SquaredReluMLP(nn.Module):
    """Computes down(relu(up(x))^2) (So et al. 2021)."""

    shard_spec: ClassVar[ShardSpec] = replace(MLP_SHARDS, column_parallel=("up_proj",))

    def __init__(self, config: Config, inner: int) -> None:
        super().__init__()
        if inner < 1:
            raise ModelError(f"config.json: an MLP has the inner width {inner}")
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=config.mlp_bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(_relu_squared(self.up_proj(x)))


class Experts(experts.Experts):
    """MLPs without gates. Each token uses the experts that are selected for it."""

    shard_spec: ClassVar[ShardSpec] = replace(
        MLP_SHARDS, column_parallel=("up_proj",), partial_sum=True
    )

    def __init__(self, hidden: int, inner: int, num_experts: int) -> None:
        nn.Module.__init__(self)
        self.up_proj = ExpertLinear(hidden, inner, num_experts)
        self.down_proj = ExpertLinear(inner, hidden, num_experts)

    def _apply(self, x: mx.array, expert_ids: mx.array, *, sorted_indices: bool) -> mx.array:
        up = self.up_proj(x, expert_ids, sorted_indices=sorted_indices)
        return self.down_proj(_relu_squared(up), expert_ids, sorted_indices=sorted_indices).squeeze(
            -2
        )


class MoE(GroupedTopKMoE):
    """DeepSeek-V3's mixture of experts without gates. The routed experts may be latent ones."""

    def __init__(self, config: Config) -> None:
        hidden, latent, inner = (
            config.hidden_size,
            config.moe_latent_size,
            config.moe_intermediate_size,
        )
        if inner < 1 or (latent is not None and latent < 1):
            raise ModelError(
                f"config.json: experts have moe_intermediate_size {inner} and "
                f"moe_latent_size {latent}"
            )
        super().__init__(
            hidden,
            inner,
            config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            norm_topk_prob=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            num_groups=config.n_group,
            topk_group=config.topk_group,
        )
        self.switch_mlp = Experts(latent or hidden, inner, config.n_routed_experts)
        if latent is not None:
            self.fc1_latent_proj = nn.Linear(hidden, latent, bias=config.mlp_bias)
            self.fc2_latent_proj = nn.Linear(latent, hidden, bias=config.mlp_bias)
        # transformers has one whatever the number is, and mlx-lm only if there is a number
        if config.n_shared_experts != 0:
            self.shared_experts = SquaredReluMLP(config, config.moe_shared_expert_intermediate_size)

    def __call__(self, x: mx.array) -> mx.array:
        chosen, shares = self.route(x)
        if "fc1_latent_proj" in self:
            y = self.fc2_latent_proj(self.switch_mlp(self.fc1_latent_proj(x), chosen, shares))
        else:
            y = self.switch_mlp(x, chosen, shares)
        return y + self.shared_experts(x) if "shared_experts" in self else y


class Block(nn.Module):
    """Computes x + mixer(norm(x)) for one of the four kinds of layers."""

    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()
        self.kind = kind
        makers: dict[str, Callable[[], Any]] = {
            MAMBA: config.make_mamba,
            ATTENTION: lambda: GroupedQueryAttention(
                config, NoRope(), bias=config.attention_bias, o_bias=config.attention_bias
            ),
            MLP: lambda: SquaredReluMLP(config, config.intermediate_size),
            MOE: lambda: MoE(config),
        }
        self.norm = config.norm()
        self.mixer: Any = makers[kind]()

    @property
    def is_cached(self) -> bool:
        return self.kind in (MAMBA, ATTENTION)

    def __call__(self, x: mx.array, kv: Any, select: SelectPositions = select_all) -> mx.array:
        """kv: None for a layer without a cache."""
        h = self.norm(x)
        return select(x + (self.mixer(h, kv) if self.is_cached else self.mixer(h)))

    def make_kv(self) -> LayerCache:
        assert self.is_cached
        return KVCache() if self.kind == ATTENTION else RecurrentCache(2)

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        return keys  # attention has no rotary positions


class MambaBlock(Mamba2Half, Block):
    mamba_names: ClassVar[tuple[str, str]] = ("norm", "mixer")

    def __init__(self, config: Config) -> None:
        super().__init__(config, MAMBA)

    def __call__(self, x: mx.array, kv: Any, select: SelectPositions = select_all) -> mx.array:
        return select(self.mamba_residual(x, kv))


class Backbone(decoder.Backbone):
    """Layers. Only some of them have a cache."""

    layers: list[Block]

    @property
    def cached_layers(self) -> Sequence[Block]:
        return [layer for layer in self.layers if layer.is_cached]

    def __call__(
        self,
        tokens: mx.array,
        kv: Sequence[object],
        select: SelectPositions = select_all,
        images: ImageInputs | None = None,
    ) -> mx.array:
        x = self.embed(tokens)
        if images is not None:
            x = images.insert(x)
        last = self.cached_layers[-1]
        caches = iter(kv)
        for layer in self.layers:
            # the layers after the last cache compute only the selected positions
            selected = select if layer is last else select_all
            x = layer(x, next(caches) if layer.is_cached else None, selected)
        return self.norm(x)


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        for key, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
            if getattr(config, key) != only:
                raise ModelError(f"nemotron_h with {key} {getattr(config, key)!r} is not supported")
        blocks = [
            MambaBlock(config) if kind == MAMBA else Block(config, kind)
            for kind in config.read_layer_types()
        ]
        if not any(block.is_cached for block in blocks):
            raise ModelError("config.json lists neither Mamba nor attention layers")
        super().__init__(config, Backbone(config, blocks))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drops the layers for multi-token prediction (`mtp`), renames the parts of the backbone,
        and stacks experts."""
        weights = {
            _rename(name): array for name, array in weights.items() if not name.startswith("mtp.")
        }
        weights = stack_experts(channels_last(move_router_bias(weights), ".conv1d.weight"))
        return super().sanitize(weights)


def _rename(name: str) -> str:
    """Returns our name of a tensor. mlx-lm calls the projections of experts fc1 and fc2."""
    name = name.replace("backbone.", "model.", 1) if name.startswith("backbone.") else name
    name = name.replace("model.embeddings.", "model.embed_tokens.", 1)
    name = name.replace("model.norm_f.", "model.norm.", 1)
    name = re.sub(r"\.switch_mlp\.fc1(?=\.)", ".switch_mlp.up_proj", name)
    name = re.sub(r"\.switch_mlp\.fc2(?=\.)", ".switch_mlp.down_proj", name)
    return re.sub(r"\.mixer\.experts\.(up_proj|down_proj)$", r".mixer.switch_mlp.\1.weight", name)


def _relu_squared(x: mx.array) -> mx.array:
    return apply_glu(nn.relu, x, x)
