"""Qwen3.5 (Qwen team 2026) is a Qwen3-Next with separate projections in its delta nets.

Knows: the names of the projections, the axes of M-RoPE. Must not know: how a delta net is computed,
vision towers.

The model is dense, or has experts in all layers (qwen3_5_moe). Published models are multimodal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import mlx.core as mx
import mlx.nn as nn

from models import base, qwen3_next
from models.qwen3_vl import interleave_axes
from models.rope import Scaling

# mrope_section, if config.json does not have it, as in transformers' Qwen3_5TextConfig
_DEFAULT_SECTION = (11, 11, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen3_next.Config):
    norm_topk_prob: bool = True
    attn_output_gate: bool = True
    output_gate_type: str = "swish"

    @property
    def image_positions(self) -> Literal["mrope"]:
        return "mrope"

    def rope_settings(self, layer_type: str | None = None) -> tuple[float, Scaling | None]:
        # `super()` without arguments fails here, because `slots=True` creates a new class
        theta, scaling = qwen3_next.Config.rope_settings(self, layer_type)
        return theta, interleave_axes(scaling, _DEFAULT_SECTION)

    def is_sparse(self, layer: int) -> bool:
        return self.num_experts > 0


class SplitGatedDeltaNet(qwen3_next.GatedDeltaNet):
    projections: ClassVar[Sequence[str]] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def __init__(self, config: qwen3_next.Config) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.in_proj_qkv = nn.Linear(hidden, 2 * self.key_width + self.value_width, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.value_width, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.value_heads, bias=False)

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)


class Model(qwen3_next.Model):
    def __init__(self, config: Config) -> None:
        if not config.attn_output_gate or config.output_gate_type != "swish":
            raise base.ModelError(
                "qwen3_5 is only supported with attn_output_gate true and output_gate_type 'swish'"
            )
        super().__init__(config, SplitGatedDeltaNet)
