"""Qwen3-Next (Qwen team 2025). Most layers are gated delta nets (Yang et al. 2024), and every
fourth layer uses full attention. Both types of layers have mixtures of experts.

Knows: the two types of layers, the checkpoint tensors. Must not know: devices, how the gated delta
rule is computed.

Original checkpoints store norm weights with an offset of -1. Checkpoints converted for MLX store
the weights without the offset.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import base, decoder
from models.base import SelectPositions, select_all
from models.conv import CausalConv, channels_last, is_channels_first
from models.experts import SparseMoeBlock, stack_experts
from models.gated_delta import gated_delta
from models.kv import AttentionCache, LayerCache
from models.layers import GatedMLP, compile_on_gpu, merge_heads, split_heads
from models.prenorm import PreNormBlock
from models.recurrent import RecurrentCache
from models.sharding import ATTENTION_SHARDS, ShardSpec

# the value of `layer_types` for a gated delta net
LINEAR = "linear_attention"

# norms whose weights are stored minus one; the norm of the delta net is stored unchanged
_ZERO_CENTERED = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
    "model.norm.weight",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads. intermediate_size: the inner width of
    layers without experts."""

    intermediate_size: int = 0
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    full_attention_interval: int = 4
    partial_rotary_factor: float = 0.25
    attention_bias: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: Sequence[int] = ()

    def default_layer_type(self, layer: int) -> str:
        return LINEAR if (layer + 1) % self.full_attention_interval else decoder.FULL

    def is_sparse(self, layer: int) -> bool:
        """Returns whether the layer has experts."""
        if self.num_experts == 0 or layer in self.mlp_only_layers:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0

    def make_mlp(self, layer: int) -> GatedMLP | SparseMoeBlock:
        if self.hidden_act != "silu":
            raise base.ModelError(
                f"hidden_act {self.hidden_act!r} is not supported; supported values: silu"
            )
        if self.is_sparse(layer):
            return SparseMoeBlock(
                self.hidden_size,
                self.moe_intermediate_size,
                self.num_experts,
                top_k=self.num_experts_per_tok,
                norm_topk_prob=self.norm_topk_prob,
                shared_width=self.shared_expert_intermediate_size,
            )
        if self.intermediate_size < 1:
            raise base.ModelError("config.json lacks intermediate_size")
        return GatedMLP(self.hidden_size, self.intermediate_size)


class Attention(nn.Module):
    """Full attention. The query projection also returns a gate for the output of each head."""

    shard_spec: ClassVar[ShardSpec] = ATTENTION_SHARDS

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.kv_heads
        hidden, size, bias = config.hidden_size, config.head_size, config.attention_bias
        self.scale = size**-0.5
        self.q_proj = nn.Linear(hidden, self.heads * 2 * size, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.rope = config.rope()

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries, gates = mx.split(split_heads(self.q_proj(x), self.heads), 2, axis=-1)
        queries = self.rope(self.q_norm(queries), kv.positions)
        keys = self.rope(self.k_norm(split_heads(self.k_proj(x), self.kv_heads)), kv.positions)
        values = split_heads(self.v_proj(x), self.kv_heads)
        outputs = kv.attend(queries, keys, values, scale=self.scale)
        return self.o_proj(merge_heads(outputs * mx.sigmoid(gates)))


@compile_on_gpu
def _silu_float32(x: mx.array) -> mx.array:
    return nn.silu(x).astype(mx.float32)


@compile_on_gpu
def _sigmoid_float32(x: mx.array) -> mx.array:
    return mx.sigmoid(x.astype(mx.float32))


@compile_on_gpu
def _log_decay(log_rate: mx.array, fading: mx.array, bias: mx.array) -> mx.array:
    """Returns the logarithms of the decay [B, L, Hv]. log_rate, bias: [Hv]."""
    return -mx.exp(log_rate.astype(mx.float32)) * nn.softplus(fading.astype(mx.float32) + bias)


@compile_on_gpu
def _apply_output_gates(x: mx.array, gates: mx.array) -> mx.array:
    return (x * nn.silu(gates.astype(mx.float32))).astype(gates.dtype)


class GatedRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = mx.ones((size,))

    def __call__(self, x: mx.array, gates: mx.array) -> mx.array:
        """Normalizes x and multiplies it by the gates. x: float32. gates: in the type of the
        activations. The result has the type of the gates."""
        return _apply_output_gates(mx.fast.rms_norm(x, self.weight, self.eps), gates)


class GatedDeltaNet(nn.Module):
    """A gated delta net. Queries, keys and values pass through a short convolution, followed by the
    gated delta rule. Subclasses define the input projections. projections: the names of these
    linear layers."""

    projections: ClassVar[Sequence[str]]

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.key_heads, self.value_heads = (
            config.linear_num_key_heads,
            config.linear_num_value_heads,
        )
        self.key_size, self.value_size = config.linear_key_head_dim, config.linear_value_head_dim
        if self.value_heads % self.key_heads:
            raise base.ModelError(
                f"config.json's linear_num_value_heads ({self.value_heads}) is not a multiple of "
                f"linear_num_key_heads ({self.key_heads})"
            )
        self.key_width = self.key_heads * self.key_size
        self.value_width = self.value_heads * self.value_size
        self.conv1d = CausalConv(
            2 * self.key_width + self.value_width, config.linear_conv_kernel_dim
        )
        self.A_log = mx.zeros((self.value_heads,))
        self.dt_bias = mx.ones((self.value_heads,))
        self.norm = GatedRMSNorm(self.value_size, config.rms_norm_eps)
        # models/gpu_layout.py may replace it with a kernel
        self.rule = gated_delta
        self.out_proj = nn.Linear(self.value_width, config.hidden_size, bias=False)

    @property
    def shard_spec(self) -> ShardSpec:
        """Returns the shard spec. The net is divided by key heads, together with the parts that
        belong to them."""
        kinds = (self.key_width, 2 * self.key_width)
        return ShardSpec(
            column_parallel=self.projections,
            row_parallel=("out_proj",),
            first_axis=("conv1d", "A_log", "dt_bias"),
            segments={"conv1d": kinds, "in_proj_qkv": kinds},
            counts=("key_heads", "value_heads", "key_width", "value_width"),
        )

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Maps [B, L, D] to queries, keys and values, concatenated [B, L, 2 keys + values]; output
        gates [B, L, values]; and the logits of the step sizes and of the decay, each [B, L, Hv]."""
        raise NotImplementedError

    def __call__(self, x: mx.array, kv: RecurrentCache) -> mx.array:
        """Computes the layer. The slots of the cache contain the tail of the convolution and the
        state of the delta rule."""
        batch, length, _ = x.shape
        mixed, gates, steps, fading = self.project(x)
        mixed, kv[0] = self.conv1d(mixed, kv[0])
        queries, keys, values = mx.split(
            _silu_float32(mixed), [self.key_width, 2 * self.key_width], axis=-1
        )
        state = kv[1]
        if state is None:
            state = mx.zeros((batch, self.value_heads, self.value_size, self.key_size))
        outputs, kv[1] = self.rule(
            _l2_normalize(queries.reshape(batch, length, self.key_heads, -1), self.key_size**-0.5),
            _l2_normalize(keys.reshape(batch, length, self.key_heads, -1), 1.0),
            values.reshape(batch, length, self.value_heads, -1),
            _log_decay(self.A_log, fading, self.dt_bias),
            _sigmoid_float32(steps),
            state,
        )
        kv.advance(length)
        outputs = self.norm(outputs, gates.reshape(outputs.shape))
        return self.out_proj(outputs.reshape(batch, length, -1))


class FusedGatedDeltaNet(GatedDeltaNet):
    """A delta net with one projection for queries, keys, values and gates, and one for steps and
    decay. The outputs of each projection are grouped by key head."""

    projections: ClassVar[Sequence[str]] = ("in_proj_qkvz", "in_proj_ba")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width = 2 * self.key_width + 2 * self.value_width
        self.in_proj_qkvz = nn.Linear(config.hidden_size, width, bias=False)
        self.in_proj_ba = nn.Linear(config.hidden_size, 2 * self.value_heads, bias=False)

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        batch, length, _ = x.shape

        def parted(y: mx.array, ends: Sequence[int]) -> list[mx.array]:
            parts = mx.split(y.reshape(batch, length, self.key_heads, -1), ends, axis=-1)
            return [part.reshape(batch, length, -1) for part in parts]

        key, value = self.key_size, self.value_width // self.key_heads
        *mixed, gates = parted(self.in_proj_qkvz(x), [key, 2 * key, 2 * key + value])
        steps, fading = parted(self.in_proj_ba(x), [self.value_heads // self.key_heads])
        return mx.concatenate(mixed, axis=-1), gates, steps, fading


class FullAttentionBlock(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, Attention(config), config.make_mlp(layer))


class LinearAttentionBlock(nn.Module):
    def __init__(self, config: Config, layer: int, net: GatedDeltaNet) -> None:
        super().__init__()
        self.linear_attn = net
        self.mlp = config.make_mlp(layer)
        self.input_layernorm = config.norm()
        self.post_attention_layernorm = config.norm()

    def __call__(
        self, x: mx.array, kv: RecurrentCache, select: SelectPositions = select_all
    ) -> mx.array:
        x = select(x + self.linear_attn(self.input_layernorm(x), kv))
        return x + self.mlp(self.post_attention_layernorm(x))

    def make_kv(self) -> LayerCache:
        return RecurrentCache(2)

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        raise AssertionError("a recurrent state has no keys")


class Model(decoder.CausalLM):
    # the delta rule is computed in chunks for a prompt, and position by position in a decode step
    batch_invariant: ClassVar[bool] = False

    def __init__(
        self, config: Config, delta_net: Callable[[Config], GatedDeltaNet] = FusedGatedDeltaNet
    ) -> None:
        def block(layer: int) -> decoder.Block:
            kind = config.layer_type(layer)
            if kind == decoder.FULL:
                return FullAttentionBlock(config, layer)
            if kind == LINEAR:
                return LinearAttentionBlock(config, layer, delta_net(config))
            raise base.ModelError(f"a layer of type {kind!r} is not supported")

        blocks = [block(layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drops the heads for multi-token prediction (`mtp`). If the convolutions of a checkpoint
        have the original layout, the checkpoint is an original one, and one is added to its norm
        weights."""
        weights = {name: a for name, a in weights.items() if "mtp" not in name.split(".")}
        if is_channels_first(weights, ".conv1d.weight"):
            weights = {
                name: array + 1 if name.endswith(_ZERO_CENTERED) else array
                for name, array in channels_last(weights, ".conv1d.weight").items()
            }
        return super().sanitize(stack_experts(weights))


def _l2_normalize(x: mx.array, norm: float) -> mx.array:
    """Scales each [D] slice along the last axis to length `norm`."""
    size = x.shape[-1]
    return mx.fast.rms_norm(x, None, 1e-6 / size) * (norm * size**-0.5)
