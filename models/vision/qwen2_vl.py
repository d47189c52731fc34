"""The vision tower of Qwen2-VL (Qwen Team 2024), all of whose blocks attend to all patches.

Knows: the keys of `vision_config`, names and layouts of published checkpoints. Must not know: the
text model, resizing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models import base
from models.layers import CenteredNorm
from models.vision.layers import MLP, find_activation
from models.vision.qwen_vl import EPS, Attention, Block, Qwen2Tower


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(base.Config):
    """The keys of `vision_config`, with the defaults of Hugging Face's Qwen2VLVisionConfig.
    embed_dim: the size of hidden states. hidden_size: that of the text model's."""

    depth: int = 32
    embed_dim: int = 1280
    hidden_size: int = 3584
    hidden_act: str = "quick_gelu"
    mlp_ratio: float = 4
    num_heads: int = 16
    patch_size: int = 14
    spatial_merge_size: int = 2

    @property
    def inner_size(self) -> int:
        return int(self.embed_dim * self.mlp_ratio)


class Tower(Qwen2Tower):
    def __init__(self, config: Config, processor: Mapping[str, Any]) -> None:
        width = config.embed_dim
        super().__init__(
            processor,
            [_make_block(config) for _ in range(config.depth)],
            CenteredNorm(width, EPS),
            patch_size=config.patch_size,
            merge_size=config.spatial_merge_size,
            hidden_size=width,
            inner_size=config.inner_size,
            heads=config.num_heads,
            feature_size=config.hidden_size,
        )


def _make_block(config: Config) -> Block:
    width = config.embed_dim
    return Block(
        (CenteredNorm(width, EPS), CenteredNorm(width, EPS)),
        Attention(width, config.num_heads),
        MLP((width, config.inner_size, width), find_activation(config.hidden_act)),
    )
