"""The vision tower of Qwen2.5-VL (Qwen Team 2025), most of whose blocks attend within windows.

Knows: the keys of `vision_config`, names and layouts of published checkpoints. Must not know: the
text model, resizing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models import base
from models.layers import GatedMLP
from models.vision.layers import (
    Rotation,
    activate,
    find_activation,
    from_heads,
    make_frequencies,
    make_rotation,
    rename_prefixes,
)
from models.vision.pixels import CLIP, PixelTable, flatten_patch_weight
from models.vision.qwen3_vl import Attention
from models.vision.tower import Grid, VisionTower

_EPS = 1e-6

# the names in checkpoints of the two layers of the merger, which are numbers there
PREFIXES = tuple(
    (f"{prefix}{old}", new)
    for prefix in ("visual.", "vision_tower.")
    for old, new in (
        ("merger.mlp.0.", "merger.linear_1."),
        ("merger.mlp.2.", "merger.linear_2."),
        ("", ""),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(base.Config):
    """The keys of `vision_config`, with the defaults of Hugging Face's Qwen2_5_VLVisionConfig."""

    depth: int = 32
    hidden_size: int = 1280
    hidden_act: str = "silu"
    intermediate_size: int = 3420
    num_heads: int = 16
    patch_size: int = 14
    spatial_merge_size: int = 2
    window_size: int = 112
    out_hidden_size: int = 3584
    fullatt_block_indexes: Sequence[int] = (7, 15, 23, 31)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, _EPS)
        self.norm2 = nn.RMSNorm(config.hidden_size, _EPS)
        self.attn = Attention(config.hidden_size, config.num_heads)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            bias=True,
            activation=find_activation(config.hidden_act),
        )

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
        self._width = width = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = nn.RMSNorm(config.hidden_size, _EPS)
        self.linear_1 = nn.Linear(width, width)
        self.linear_2 = nn.Linear(width, config.out_hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        joined = self.ln_q(x).reshape(-1, self._width)
        return self.linear_2(activate(nn.gelu, self.linear_1(joined)))


class Tower(VisionTower):
    def __init__(self, config: Config, processor: Mapping[str, Any]) -> None:
        super().__init__(
            PixelTable(processor, CLIP),
            patch_size=config.patch_size,
            merge_size=config.spatial_merge_size,
            hidden_size=config.hidden_size,
            inner_size=config.intermediate_size,
            heads=config.num_heads,
        )
        self._config = config
        # in squares of merged patches
        self._window = config.window_size // config.spatial_merge_size // config.patch_size
        if self._window < 1:
            raise ValueError(f"window_size is {config.window_size}")
        self.patch_embed = {
            "proj": nn.Linear(3 * config.patch_size**2, config.hidden_size, bias=False)
        }
        self.blocks = [Block(config) for _ in range(config.depth)]
        self.merger = Merger(config)

    @property
    def feature_size(self) -> int:
        return self._config.out_hidden_size

    @property
    def stack(self) -> Sequence[Block]:
        return self.blocks

    def rotation(self, grid: Grid) -> Rotation:
        frequencies = make_frequencies(10000.0, self.head_dim // 2)
        return make_rotation(grid.y, grid.x, frequencies, frequencies)

    def order(self, grid: tuple[int, int]) -> mx.array:
        """Window by window, each of them row by row."""
        cols = grid[1] // self.merge_size
        return mx.array(
            [y * cols + x for ys, xs in self._make_windows(*grid) for y in ys for x in xs]
        )

    def windows(self, block: int, grid: Grid) -> Sequence[int] | None:
        if block in self._config.fullatt_block_indexes:
            return None
        ends, end = list[int](), 0
        for ys, xs in self._make_windows(grid.height, grid.width):
            end += len(ys) * len(xs) * self.merge_size**2
            ends.append(end)
        return ends

    def _make_windows(self, height: int, width: int) -> list[tuple[range, range]]:
        """Returns the rows and columns of each window of a grid of patches, in squares."""
        rows, cols, side = height // self.merge_size, width // self.merge_size, self._window
        return [
            (range(y, min(y + side, rows)), range(x, min(x + side, cols)))
            for y in range(0, rows, side)
            for x in range(0, cols, side)
        ]

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
