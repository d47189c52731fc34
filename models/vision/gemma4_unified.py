"""The vision part of Gemma 4 12B ("unified"), which has no encoder: it projects large patches to
the inputs of the text model.

Knows: the keys of `vision_config`, names of published checkpoints. Must not know: the text model,
resizing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models import base
from models.layers import CenteredNorm
from models.vision.gemma4 import Projector
from models.vision.layers import rename_prefixes
from models.vision.pixels import NOT_NORMALIZED, PixelTable
from models.vision.tower import Block, Grid, VisionTower

_EPS = 1e-5

_PREFIXES = (
    ("vision_embedder.", ""),
    ("embed_vision.multimodal_embedder.", "projector."),
    ("embed_vision.embedding_projection.", "projector.embedding_projection."),
    ("embed_vision.", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextConfig(base.Config):
    hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(base.Config):
    """The keys of `vision_config`, with Hugging Face's defaults."""

    patch_size: int = 16
    pooling_kernel_size: int = 3
    mm_embed_dim: int = 3840
    mm_posemb_size: int = 1120
    rms_norm_eps: float = 1e-6
    text_config: Mapping[str, Any]

    @property
    def text_hidden_size(self) -> int:
        return _TextConfig.from_dict(self.text_config).hidden_size


class Tower(VisionTower):
    channels_last = True

    def __init__(self, config: Config, processor: Mapping[str, Any]) -> None:
        side, width = config.patch_size * config.pooling_kernel_size, config.mm_embed_dim
        super().__init__(
            PixelTable(processor, NOT_NORMALIZED),
            patch_size=side,
            merge_size=1,
            hidden_size=width,
            inner_size=3 * side**2,
            heads=1,
        )
        self._config = config
        self.patch_ln1 = CenteredNorm(3 * side**2, _EPS)
        self.patch_dense = nn.Linear(3 * side**2, width)
        self.patch_ln2 = CenteredNorm(width, _EPS)
        self.pos_embedding = mx.zeros((config.mm_posemb_size, 2, width))
        self.pos_norm = CenteredNorm(width, _EPS)
        self.projector = Projector(width, config.text_hidden_size, config.rms_norm_eps)

    @property
    def feature_size(self) -> int:
        return self._config.text_hidden_size

    @property
    def stack(self) -> Sequence[Block]:
        return ()

    def embed(self, patches: mx.array, grid: Grid, part: slice) -> mx.array:
        x = self.patch_ln2(self.patch_dense(self.patch_ln1(patches)))
        positions = self.pos_embedding[grid.x[part], 0] + self.pos_embedding[grid.y[part], 1]
        return self.pos_norm(x + positions)

    def merge(self, x: mx.array) -> mx.array:
        return self.projector(x)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return rename_prefixes(weights, _PREFIXES)
