"""The vision tower of Gemma 3 (Gemma Team 2025): SigLIP, whose output is averaged over squares of
patches.

Knows: the projection to the text model. Must not know: resizing, text models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models.base import ModelError
from models.vision import siglip


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(siglip.Config):
    mm_tokens_per_image: int = 256

    @property
    def merge_size(self) -> int:
        """The side of the squares of patches, in patches."""
        side, rows = self.image_size // self.patch_size, round(self.mm_tokens_per_image**0.5)
        if rows < 1 or rows**2 != self.mm_tokens_per_image or side % rows:
            raise ModelError(
                f"config.json: {self.mm_tokens_per_image} rows (mm_tokens_per_image) cannot be "
                f"made of {side} x {side} patches"
            )
        return side // rows


class Projector(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, config.layer_norm_eps)
        self.projection = nn.Linear(config.hidden_size, config.text_hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.projection(self.norm(x))


class Tower(siglip.SiglipTower):
    prefixes = (
        ("vision_tower.vision_model.", ""),
        ("vision_tower.", ""),
        ("multi_modal_projector.mm_soft_emb_norm.", "projector.norm."),
        ("multi_modal_projector.mm_input_projection_weight", "projector.projection.weight"),
        ("multi_modal_projector.", "projector."),
    )

    def __init__(self, config: Config, processor: Mapping[str, Any]) -> None:
        super().__init__(config, processor, merge_size=config.merge_size)
        self._width = config.text_hidden_size
        self.projector = Projector(config)

    @property
    def feature_size(self) -> int:
        return self._width

    def merge(self, x: mx.array) -> mx.array:
        x = self.post_layernorm(x).reshape(-1, self.merge_size**2, self.hidden_size)
        return self.projector(x.mean(axis=1))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Adds 1 to the weight of the norm, and transposes the matrix [in, out] of the
        projection."""
        named = super().sanitize(weights)
        norm, projection = "projector.norm.weight", "projector.projection.weight"
        if norm in named:
            named[norm] = named[norm] + 1
        if projection in named:
            named[projection] = named[projection].T
        return named
