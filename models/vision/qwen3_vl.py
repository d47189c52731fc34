"""The vision tower of Qwen3-VL (Qwen Team 2025) and of Qwen3.5, with DeepStack (Meng et al. 2024)
if the config names blocks for it.

Knows: the keys of `vision_config`, names and layouts of published checkpoints. Must not know: the
text model, resizing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    interpolate_axis,
    make_frequencies,
    make_rotation,
)
from models.vision.pixels import HALF, PixelTable
from models.vision.qwen_vl import EPS, PREFIXES, Attention, Block, name_weights
from models.vision.tower import Grid, VisionTower


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(base.Config):
    """The keys of `vision_config`, with the defaults of Hugging Face's Qwen3VLVisionConfig."""

    depth: int = 27
    hidden_size: int = 1152
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: int = 4304
    num_heads: int = 16
    patch_size: int = 16
    spatial_merge_size: int = 2
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: Sequence[int] = ()
    rope_parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def frequencies(self) -> Sequence[float]:
        """The radians per position of the pairs of dimensions that depend on y, and on x."""
        theta = self.rope_parameters.get("rope_theta", 10000.0)
        return make_frequencies(theta, self.hidden_size // self.num_heads // 2)


class Merger(nn.Module):
    """Merges squares of patches into image rows. joined: whether the norm applies to the merged
    row, and not to each patch."""

    def __init__(self, config: Config, *, joined: bool) -> None:
        super().__init__()
        width = config.hidden_size * config.spatial_merge_size**2
        self._joined, self._width = joined, width
        self.norm = CenteredNorm(width if joined else config.hidden_size, EPS)
        self.linear_fc1 = nn.Linear(width, width)
        self.linear_fc2 = nn.Linear(width, config.out_hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        if self._joined:
            x = x.reshape(-1, self._width)
        x = self.norm(x).reshape(-1, self._width)
        return self.linear_fc2(activate(nn.gelu, self.linear_fc1(x)))


class Tower(VisionTower):
    def __init__(self, config: Config, processor: Mapping[str, Any]) -> None:
        levels = config.deepstack_visual_indexes
        super().__init__(
            PixelTable(processor, HALF),
            patch_size=config.patch_size,
            merge_size=config.spatial_merge_size,
            hidden_size=config.hidden_size,
            inner_size=config.intermediate_size,
            heads=config.num_heads,
        )
        self._config = config
        self._side = int(config.num_position_embeddings**0.5)
        self.patch_embed = {"proj": nn.Linear(3 * config.patch_size**2, config.hidden_size)}
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = [_make_block(config) for _ in range(config.depth)]
        self.merger = Merger(config, joined=False)
        self.deepstack_merger_list = [Merger(config, joined=True) for _ in levels]

    @property
    def feature_size(self) -> int:
        return self._config.out_hidden_size * (1 + len(self.deepstack_merger_list))

    @property
    def stack(self) -> Sequence[Block]:
        return self.blocks

    def rotation(self, grid: Grid) -> Rotation:
        return make_rotation(grid.y, grid.x, *[self._config.frequencies] * 2)

    def embed(self, patches: mx.array, grid: Grid, part: slice) -> mx.array:
        y, x = grid.y[part], grid.x[part]
        rows = [array[y] for array in self._spread(grid.height)]
        cols = [array[x] for array in self._spread(grid.width)]
        positions: mx.array | float = 0.0
        for i in (0, 1):
            for j in (0, 1):
                weight = (rows[2 + i] * cols[2 + j])[:, None]
                positions = positions + self.pos_embed(rows[i] * self._side + cols[j]) * weight
        return self.patch_embed["proj"](patches) + positions

    def _spread(self, length: int) -> Sequence[mx.array]:
        """Returns the neighbouring rows of the table of positions, and their weights."""
        low, high, weight = interpolate_axis(length, self._side)
        second = mx.array(weight)
        return mx.array(low), mx.array(high), 1 - second, second

    def merge(self, x: mx.array) -> mx.array:
        return self.merger(x)

    def merge_deepstack(self, block: int, x: mx.array) -> mx.array | None:
        levels = list(self._config.deepstack_visual_indexes)
        return self.deepstack_merger_list[levels.index(block)](x) if block in levels else None

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return name_weights(weights, [(prefix, "") for prefix in PREFIXES], self.patch_size)


def _make_block(config: Config) -> Block:
    width = config.hidden_size
    activation = find_activation(config.hidden_act)
    return Block(
        (CenteredNorm(width, EPS), CenteredNorm(width, EPS)),
        Attention(width, config.num_heads),
        MLP((width, config.intermediate_size, width), activation, ("linear_fc1", "linear_fc2")),
    )
