"""The vision tower of Qwen2-VL (Qwen Team 2024), all of whose blocks attend to all patches.

Knows: the keys of `vision_config`, names and layouts of published checkpoints. Must not know: the
text model, resizing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models import base
from models.layers import CenteredNorm
from models.vision.layers import (
    MLP,
    Rotation,
    activate,
    find_activation,
    from_heads,
    make_frequencies,
    make_rotation,
    rename_prefixes,
)
from models.vision.pixels import CLIP, PixelTable, flatten_patch_weight
from models.vision.qwen2_5_vl import PREFIXES
from models.vision.qwen3_vl import Attention
from models.vision.tower import Grid, VisionTower

_EPS = 1e-6


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


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.embed_dim
        self.norm1, self.norm2 = CenteredNorm(width, _EPS), CenteredNorm(width, _EPS)
        self.attn = Attention(width, config.num_heads)
        self.mlp = MLP((width, config.inner_size, width), find_activation(config.hidden_act))

    def project(
        self, x: mx.array, rotation: Rotation | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        return self.attn.project(self.norm1(x), rotation)

    def complete(self, x: mx.array, attended: mx.array) -> mx.array:
        x = x + self.attn.proj(from_heads(attended))
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self._width = width = config.embed_dim * config.spatial_merge_size**2
        self.ln_q = CenteredNorm(config.embed_dim, _EPS)
        self.linear_1 = nn.Linear(width, width)
        self.linear_2 = nn.Linear(width, config.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        joined = self.ln_q(x).reshape(-1, self._width)
        return self.linear_2(activate(nn.gelu, self.linear_1(joined)))


class Tower(VisionTower):
    def __init__(self, config: Config, processor: Mapping[str, Any]) -> None:
        super().__init__(
            PixelTable(processor, CLIP),
            patch_size=config.patch_size,
            merge_size=config.spatial_merge_size,
            hidden_size=config.embed_dim,
            inner_size=config.inner_size,
            heads=config.num_heads,
        )
        self._config = config
        self.patch_embed = {
            "proj": nn.Linear(3 * config.patch_size**2, config.embed_dim, bias=False)
        }
        self.blocks = [Block(config) for _ in range(config.depth)]
        self.merger = Merger(config)

    @property
    def feature_size(self) -> int:
        return self._config.hidden_size

    @property
    def stack(self) -> Sequence[Block]:
        return self.blocks

    def rotation(self, grid: Grid) -> Rotation:
        frequencies = make_frequencies(10000.0, self.head_dim // 2)
        return make_rotation(grid.y, grid.x, frequencies, frequencies)

    def embed(self, patches: mx.array, grid: Grid, part: slice) -> mx.array:
        return self.patch_embed["proj"](patches)

    def merge(self, x: mx.array) -> mx.array:
        return self.merger(x)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        named = rename_prefixes(weights, PREFIXES)
        name = "patch_embed.proj.weight"
        if name in named:
            named[name] = flatten_patch_weight(name, named[name], self.patch_size)
        return named
