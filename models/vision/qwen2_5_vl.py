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
from models.vision.layers import find_activation
from models.vision.qwen_vl import EPS, Attention, Block, Qwen2Tower
from models.vision.tower import Grid


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


class Tower(Qwen2Tower):
    def __init__(self, config: Config, processor: Mapping[str, Any]) -> None:
        super().__init__(
            processor,
            [_make_block(config) for _ in range(config.depth)],
            nn.RMSNorm(config.hidden_size, EPS),
            patch_size=config.patch_size,
            merge_size=config.spatial_merge_size,
            hidden_size=config.hidden_size,
            inner_size=config.intermediate_size,
            heads=config.num_heads,
            feature_size=config.out_hidden_size,
        )
        self._config = config
        # in squares of merged patches
        self._window = config.window_size // config.spatial_merge_size // config.patch_size
        if self._window < 1:
            raise ValueError(f"window_size is {config.window_size}")

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


def _make_block(config: Config) -> Block:
    return Block(
        (nn.RMSNorm(config.hidden_size, EPS), nn.RMSNorm(config.hidden_size, EPS)),
        Attention(config.hidden_size, config.num_heads),
        GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            bias=True,
            activation=find_activation(config.hidden_act),
        ),
    )
