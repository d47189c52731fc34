"""gpt-oss (OpenAI 2025) is a mixture of experts with attention sinks.

Knows: the layers, the checkpoint tensors. Must not know: devices, the engine, the output format.

Layers alternate between sliding window and full attention. Each head has a sink, which is the logit
of a virtual key (Xiao et al. 2023). In the experts, the gate is clamped from above; the linear part
is clamped on both sides and incremented by one. Nearly all layers have biases.

Source of the layouts: the released checkpoints and their model card.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import decoder
from models.attention import GroupedQueryAttention
from models.base import ModelError
from models.experts import Experts, Gating, select_top_experts
from models.layers import compile_on_gpu
from models.prenorm import PreNormBlock
from models.sharding import ATTENTION_SHARDS, REPLICATED, ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads."""

    num_local_experts: int
    num_experts_per_tok: int
    head_dim: int | None = 64
    sliding_window: int | None = 128
    attention_bias: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150_000.0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def default_layer_type(self, layer: int) -> str:
        return decoder.FULL if layer % 2 else decoder.SLIDING

    def make_gating(self) -> Gating:
        alpha, limit = self.swiglu_alpha, self.swiglu_limit

        def clamped(gate: mx.array, up: mx.array) -> mx.array:
            gate = mx.minimum(gate, limit)
            return (mx.clip(up, -limit, limit) + 1) * gate * mx.sigmoid(alpha * gate)

        return compile_on_gpu(clamped)


class Attention(GroupedQueryAttention):
    shard_spec: ClassVar[ShardSpec] = replace(ATTENTION_SHARDS, first_axis=("sinks",))

    def __init__(self, config: Config) -> None:
        bias = config.attention_bias
        super().__init__(config, config.rope(), bias=bias, o_bias=bias, sinks=True)


class MLP(nn.Module):
    shard_spec: ClassVar[ShardSpec] = REPLICATED  # only its experts are sharded

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.num_local_experts
        self.top_k = config.num_experts_per_tok
        if not 0 < self.top_k <= experts:
            raise ModelError(
                f"num_experts_per_tok is {self.top_k}, but must be between 1 and {experts}"
            )
        self.router = nn.Linear(hidden, experts, bias=True)
        self.experts = Experts(
            hidden, config.intermediate_size, experts, bias=True, gating=config.make_gating()
        )

    def __call__(self, x: mx.array) -> mx.array:
        scores = self.router(x)
        chosen = select_top_experts(scores, self.top_k)
        best = mx.take_along_axis(scores, chosen, axis=-1)
        return self.experts(x, chosen, mx.softmax(best, axis=-1, precise=True))


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, Attention(config), MLP(config), window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        if config.hidden_act != "silu":
            raise ModelError(f"gpt_oss with hidden_act {config.hidden_act!r} is not supported")
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Converts the checkpoint, including the fused experts of the original."""
        converted: dict[str, mx.array] = {}
        for name, array in weights.items():
            converted.update(_convert_tensor(name, array))
        return super().sanitize(converted)


_FUSED_NAME = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?:_(blocks|scales|bias))?")


def _convert_tensor(name: str, array: mx.array) -> Mapping[str, mx.array]:
    """Converts a tensor of the original checkpoint to our names and shapes. In the original, rows
    of gate and up alternate:

        X_blocks  [E, rows, groups, 16] bytes of two 4-bit numbers   X.weight [E, rows, groups * 4]
        X_scales  [E, rows, groups] bytes                            X.scales, the same
        X_bias    [E, rows]                                          X.bias,   the same
        X         [E, in, rows], if it was dequantized               X.weight [E, rows, in]
    """
    match = _FUSED_NAME.fullmatch(name)
    if match is None:
        return {name: array}
    path, projection, kind = match.groups()
    if kind == "blocks":
        array, kind = array.view(mx.uint32).flatten(-2), "weight"
    elif kind is None:
        array, kind = array.swapaxes(-1, -2), "weight"
    if projection == "down_proj":
        return {f"{path}.down_proj.{kind}": mx.contiguous(array)}
    return {
        f"{path}.gate_proj.{kind}": mx.contiguous(array[:, ::2]),
        f"{path}.up_proj.{kind}": mx.contiguous(array[:, 1::2]),
    }
