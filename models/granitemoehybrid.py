"""Granite 4 (IBM 2025). A layer has a Mamba-2 layer or attention, and an MLP. In some models, a
mixture of experts runs in parallel with the MLP.

Knows: the layers, the checkpoint tensors. Must not know: devices, how a Mamba-2 layer is computed.

Embeddings, attention scores, residuals and logits are scaled as in Granite 3 (models/granite.py).
Checkpoints store the gate and up projections of MLPs and of experts as one matrix.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import mlx.core as mx
import mlx.nn as nn

from models import decoder, granite
from models.attention import GroupedQueryAttention
from models.base import ModelError
from models.conv import channels_last
from models.experts import Experts, select_top_experts, stack_experts
from models.kv import LayerCache
from models.layers import GatedMLP
from models.mamba2 import Mamba2Config, Mamba2Half, Mamba2Mixer, read_step_limits
from models.prenorm import PreNormBlock
from models.recurrent import RecurrentCache
from models.rope import NoRope
from models.sharding import REPLICATED, ShardSpec

_MAMBA_TYPES = ("mamba", "linear_attention")
_ATTENTION_TYPES = ("attention", decoder.FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(granite.Config):
    """The keys of config.json that this architecture reads. intermediate_size: the inner width of
    an expert. shared_intermediate_size: that of the MLP. position_embedding_type: attention has
    rotary positions only if it is "rope"."""

    shared_intermediate_size: int = 1024
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    position_embedding_type: str | None = None
    mamba_n_heads: int = 128
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_head: int | Literal["auto"] = "auto"
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: Any = None

    def default_layer_type(self, layer: int) -> str:
        return "mamba"

    def make_mamba(self) -> Mamba2Mixer:
        width, heads = self.mamba_expand * self.hidden_size, max(1, self.mamba_n_heads)
        return Mamba2Mixer(
            Mamba2Config(
                hidden_size=self.hidden_size,
                num_heads=self.mamba_n_heads,
                head_dim=width // heads if self.mamba_d_head == "auto" else self.mamba_d_head,
                state_size=self.mamba_d_state,
                num_groups=self.mamba_n_groups,
                conv_width=self.mamba_d_conv,
                eps=self.rms_norm_eps,
                bias=self.mamba_proj_bias,
                conv_bias=self.mamba_conv_bias,
                step_limits=read_step_limits(self.time_step_limit),
            )
        )

    def make_attention(self) -> GroupedQueryAttention:
        has_rope, bias = self.position_embedding_type == "rope", self.attention_bias
        attention = GroupedQueryAttention(
            self, self.rope() if has_rope else NoRope(), bias=bias, o_bias=bias
        )
        attention.scale = self.attention_multiplier
        return attention


class MoE(nn.Module):
    """A mixture of experts and an MLP, whose outputs are added."""

    shard_spec: ClassVar[ShardSpec] = REPLICATED  # only the experts and the MLP are sharded

    def __init__(self, config: Config) -> None:
        super().__init__()
        experts, self.top_k = config.num_local_experts, config.num_experts_per_tok
        if not 0 < self.top_k <= experts:
            raise ModelError(
                f"num_experts_per_tok is {self.top_k}, but must be between 1 and {experts}"
            )
        self.router = nn.Linear(config.hidden_size, experts, bias=False)
        self.switch_mlp = Experts(config.hidden_size, config.intermediate_size, experts)
        self.shared_mlp = GatedMLP(config.hidden_size, config.shared_intermediate_size)

    def __call__(self, x: mx.array) -> mx.array:
        logits = self.router(x).astype(mx.float32)
        chosen = select_top_experts(logits, self.top_k)
        shares = mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1)
        return self.switch_mlp(x, chosen, shares) + self.shared_mlp(x)


def _make_mlp(config: Config) -> GatedMLP | MoE:
    if config.num_local_experts > 0:
        return MoE(config)
    return GatedMLP(config.hidden_size, config.shared_intermediate_size)


class AttentionBlock(PreNormBlock):
    def __init__(self, config: Config) -> None:
        super().__init__(config, config.make_attention(), _make_mlp(config))


class MambaBlock(Mamba2Half, PreNormBlock):
    """A pre-norm block with a Mamba-2 layer instead of attention."""

    mamba_names: ClassVar[tuple[str, str]] = ("input_layernorm", "mamba")

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)
        self.mamba = config.make_mamba()
        self.mlp = _make_mlp(config)
        self.input_layernorm = config.norm()
        self.post_attention_layernorm = config.norm()

    def attention_residual(self, x: mx.array, kv: Any) -> mx.array:
        return self.mamba_residual(x, kv)

    def make_kv(self) -> LayerCache:
        return RecurrentCache(2)

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        raise AssertionError("a recurrent state has no keys")


class Model(granite.CausalLM):
    def __init__(self, config: Config) -> None:
        config.check_factors()
        for key, supported in (
            ("hidden_act", ("silu",)),
            ("position_embedding_type", (None, "nope", "rope")),
        ):
            if getattr(config, key) not in supported:
                raise ModelError(
                    f"granitemoehybrid with {key} {getattr(config, key)!r} is not supported"
                )
        super().__init__(config, [_make_block(config, i) for i in range(config.num_hidden_layers)])
        self._mlp = "mlp.shared_mlp" if config.num_local_experts > 0 else "mlp"

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Renames the parts of MLPs and of mixtures of experts, and splits fused matrices."""
        named = {_rename(name): array for name, array in weights.items()}
        named = stack_experts(channels_last(named, ".conv1d.weight"))
        return super().sanitize(self._split_mlps(named))

    def _split_mlps(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        found = dict[str, mx.array]()
        for name, array in weights.items():
            path, is_fused, kind = name.partition(".shared_mlp.input_linear.")
            if is_fused:
                gate, up = mx.split(array, 2, axis=0)
                found[f"{path}.{self._mlp}.gate_proj.{kind}"] = gate
                found[f"{path}.{self._mlp}.up_proj.{kind}"] = up
            else:
                last = f".{self._mlp}.down_proj."
                found[name.replace(".shared_mlp.output_linear.", last)] = array
        return found


def _make_block(config: Config, layer: int) -> decoder.Block:
    kind = config.layer_type(layer)
    if kind in _MAMBA_TYPES:
        return MambaBlock(config)
    if kind in _ATTENTION_TYPES:
        return AttentionBlock(config)
    raise ModelError(f"a layer of type {kind!r} is not supported")


# the names of a mixture of experts, older or newer ones of transformers, and those of mlx-lm
_EXPERT_NAMES = (
    (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.router."),
    (r"\.block_sparse_moe\.(experts\.gate_up_proj|input_linear)", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.(experts\.down_proj|output_linear)", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.switch_mlp\.", ".mlp.switch_mlp."),
)


def _rename(name: str) -> str:
    for pattern, ours in _EXPERT_NAMES:
        name = re.sub(pattern, ours, name)
    return name
