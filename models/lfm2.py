"""LFM2 (Liquid AI 2025) has short gated convolutions with attention layers in between.

Knows: the layers, the parameter names. Must not know: devices, types of caches, batches.

Checkpoints call the final norm `embedding_norm`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import base, decoder
from models.base import SelectPositions, select_all
from models.conv import CausalConv, channels_last
from models.kv import AttentionCache, KVCache, LayerCache
from models.layers import GatedMLP, merge_heads, split_heads
from models.recurrent import RecurrentCache
from models.sharding import ShardSpec

# the value of `layer_types` for a convolution layer
CONV = "conv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads. `layer_types` or `full_attn_idxs`
    defines the layers that use attention. block_ff_dim is the older name of intermediate_size."""

    intermediate_size: int = 0
    block_ff_dim: int | None = None
    block_auto_adjust_ff_dim: bool = True
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float = 1.0
    norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    conv_bias: bool = False
    conv_L_cache: int = 3
    full_attn_idxs: Sequence[int] | None = None

    def default_layer_type(self, layer: int) -> str:
        """Returns the default type of a layer. Without `layer_types` and `full_attn_idxs`, all
        layers use attention."""
        attends = self.full_attn_idxs is None or layer in self.full_attn_idxs
        return decoder.FULL if attends else CONV

    def norm(self) -> nn.RMSNorm:
        return nn.RMSNorm(self.hidden_size, self.norm_eps)

    @property
    def inner_size(self) -> int:
        """The inner width of an MLP: the configured width, or two thirds of it, rounded up, if
        block_auto_adjust_ff_dim is set. In this case, three matrices have as many weights as two
        matrices of the configured width (as in the original Llama code)."""
        inner = self.block_ff_dim or self.intermediate_size
        if inner < 1:
            raise base.ModelError("config.json lacks block_ff_dim or intermediate_size")
        if not self.block_auto_adjust_ff_dim:
            return inner
        inner = int(self.block_ffn_dim_multiplier * int(2 * inner / 3))
        return -(-inner // self.block_multiple_of) * self.block_multiple_of


class Attention(nn.Module):
    shard_spec: ClassVar[ShardSpec] = ShardSpec(
        column_parallel=("q_proj", "k_proj", "v_proj"),
        row_parallel=("out_proj",),
        counts=("heads", "kv_heads"),
    )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.kv_heads
        hidden, size = config.hidden_size, config.head_size
        self.scale = size**-0.5
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=False)
        self.out_proj = nn.Linear(self.heads * size, hidden, bias=False)
        self.q_layernorm = nn.RMSNorm(size, config.norm_eps)
        self.k_layernorm = nn.RMSNorm(size, config.norm_eps)
        self.rope = config.rope()

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries = self.q_layernorm(split_heads(self.q_proj(x), self.heads))
        keys = self.k_layernorm(split_heads(self.k_proj(x), self.kv_heads))
        values = split_heads(self.v_proj(x), self.kv_heads)
        queries, keys = self.rope(queries, kv.positions), self.rope(keys, kv.positions)
        return self.out_proj(merge_heads(kv.attend(queries, keys, values, scale=self.scale)))


class ShortConv(nn.Module):
    """Computes c * conv(b * x), where b, c and x are projections of the input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.conv_bias
        self.in_proj = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.conv = CausalConv(hidden, config.conv_L_cache, bias=bias)
        self.out_proj = nn.Linear(hidden, hidden, bias=bias)

    @property
    def shard_spec(self) -> ShardSpec:
        hidden = self.conv.weight.shape[0]
        return ShardSpec(
            column_parallel=("in_proj",),
            row_parallel=("out_proj",),
            first_axis=("conv",),
            segments={"in_proj": (hidden, 2 * hidden)},
        )

    def __call__(self, x: mx.array, kv: RecurrentCache) -> mx.array:
        """Computes the convolution. Slot 0 of the cache contains its tail."""
        before, after, x = mx.split(self.in_proj(x), 3, axis=-1)
        mixed, kv[0] = self.conv(before * x, kv[0])
        kv.advance(x.shape[1])
        return self.out_proj(after * mixed)


class MLP(GatedMLP):
    """A gated MLP with LFM2's parameter names."""

    shard_spec: ClassVar[ShardSpec] = ShardSpec(column_parallel=("w1", "w3"), row_parallel=("w2",))
    projection_names: ClassVar[tuple[str, str, str]] = ("w1", "w3", "w2")


class Block(nn.Module):
    """A block of a norm, a convolution or attention, a second norm, and an MLP."""

    def __init__(self, config: Config, layer: int, mlp: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        kind = config.layer_type(layer)
        if kind not in (decoder.FULL, CONV):
            raise base.ModelError(f"a layer of type {kind!r} is not supported")
        self.attends = kind == decoder.FULL
        if self.attends:
            self.self_attn = Attention(config)
        else:
            self.conv = ShortConv(config)
        self.feed_forward = mlp
        self.operator_norm = config.norm()
        self.ffn_norm = config.norm()

    def __call__(self, x: mx.array, kv: Any, select: SelectPositions = select_all) -> mx.array:
        operator = self.self_attn if self.attends else self.conv
        x = select(x + operator(self.operator_norm(x), kv))
        return x + self.feed_forward(self.ffn_norm(x))

    def make_kv(self) -> LayerCache:
        return KVCache() if self.attends else RecurrentCache(1)

    def rerotate(self, keys: mx.array, positions: int) -> mx.array:
        return self.self_attn.rope.rerotate(keys, positions)


class CausalLM(decoder.CausalLM):
    """The common part of LFM2 models."""

    def __init__(
        self, config: Config, make_mlp: Callable[[int], Callable[[mx.array], mx.array]]
    ) -> None:
        """make_mlp: a function that creates the MLP of a layer."""
        blocks = [
            Block(config, layer, make_mlp(layer)) for layer in range(config.num_hidden_layers)
        ]
        super().__init__(config, decoder.Backbone(config, blocks))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        weights = channels_last(weights, ".conv.conv.weight")
        weights = {
            name.replace("model.embedding_norm.", "model.norm."): array
            for name, array in weights.items()
        }
        return super().sanitize(weights)


class Model(CausalLM):
    def __init__(self, config: Config) -> None:
        super().__init__(config, lambda _: MLP(config.hidden_size, config.inner_size))
