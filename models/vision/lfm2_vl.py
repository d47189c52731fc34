"""The vision tower of LFM2-VL (Liquid AI 2025): SigLIP 2 for tiles of any size, whose output is
joined in squares of patches.

Knows: the resampling of its positions, the projector to the text model. Must not know: resizing of
images, text models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from models.layers import CenteredNorm
from models.vision import siglip
from models.vision.layers import MLP, find_activation
from models.vision.tower import Grid

_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(siglip.Config):
    num_patches: int = 256
    projector_hidden_act: str = "gelu"
    projector_hidden_size: int = 2560
    projector_bias: bool = True
    projector_use_layernorm: bool = True
    downsample_factor: int = 2

    @property
    def num_positions(self) -> int:
        return self.num_patches

    @property
    def tile_size(self) -> int | None:
        return None


class Projector(MLP):
    def __init__(self, config: Config) -> None:
        joined = config.hidden_size * config.downsample_factor**2
        super().__init__(
            (joined, config.projector_hidden_size, config.text_hidden_size),
            find_activation(config.projector_hidden_act),
            ("linear_1", "linear_2"),
            bias=config.projector_bias,
        )
        self._joined = joined
        if config.projector_use_layernorm:
            self.layer_norm = CenteredNorm(joined, _EPS)

    def __call__(self, x: mx.array) -> mx.array:
        x = x.reshape(-1, self._joined)
        return super().__call__(self.layer_norm(x) if "layer_norm" in self else x)


class Tower(siglip.SiglipTower):
    channels_last = True
    prefixes = (
        ("vision_tower.vision_model.", ""),
        ("vision_tower.", ""),
        ("multi_modal_projector.", "projector."),
    )

    def __init__(self, config: Config, processor: Mapping[str, Any]) -> None:
        super().__init__(config, processor, merge_size=config.downsample_factor)
        self._width = config.text_hidden_size
        self._table_side = int(config.num_patches**0.5)
        self.projector = Projector(config)

    @property
    def feature_size(self) -> int:
        return self._width

    def find_positions(self, grid: Grid, part: slice) -> mx.array:
        """Resamples the table of positions by bilinear interpolation with antialiasing."""
        side = self._table_side
        table = self.embeddings["position_embedding"](mx.arange(side * side))
        rows = _resample(grid.height, side) @ table.astype(mx.float32).reshape(side, -1)
        rows = rows.reshape(grid.height, side, -1)[grid.y[part]]
        weights = _resample(grid.width, side)[grid.x[part]]
        return (weights[:, None] @ rows)[:, 0]

    def merge(self, x: mx.array) -> mx.array:
        return self.projector(self.post_layernorm(x))


def _resample(length: int, side: int) -> mx.array:
    """Returns the weights [length, side] of the entries of a table for positions that divide it
    into equal parts."""
    scale = side / length
    support = max(scale, 1.0)
    rows: list[list[float]] = []
    for i in range(length):
        center = (i + 0.5) * scale - 0.5
        weights = [max(0.0, 1 - abs(j - center) / support) for j in range(side)]
        total = sum(weights)
        rows.append([weight / total for weight in weights])
    return mx.array(rows)
