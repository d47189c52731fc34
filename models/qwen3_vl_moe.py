"""The text model of Qwen3-VL with experts (Qwen team 2025) is a Qwen3-MoE with M-RoPE.

Knows: the axes of M-RoPE. Must not know: vision towers.
"""

from dataclasses import dataclass
from typing import Literal

from models import qwen3_moe
from models.qwen3_vl import DEFAULT_SECTION, interleave_axes
from models.rope import Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen3_moe.Config):
    """The keys of config.json that this architecture reads."""

    # transformers ignores the key, and always normalizes
    norm_topk_prob: bool = True

    @property
    def image_positions(self) -> Literal["mrope"]:
        return "mrope"

    def rope_settings(self, layer_type: str | None = None) -> tuple[float, Scaling | None]:
        # `super()` without arguments fails here, because `slots=True` creates a new class
        theta, scaling = qwen3_moe.Config.rope_settings(self, layer_type)
        return theta, interleave_axes(scaling, DEFAULT_SECTION)


Model = qwen3_moe.Model
