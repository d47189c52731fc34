"""The vision tower of SmolVLM and Idefics3 (Hugging Face 2024): SigLIP on each tile, whose output
is joined in squares of patches.

Knows: the connector to the text model. Must not know: resizing, text models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models.vision import siglip


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(siglip.Config):
    hidden_size: int = 1152
    num_attention_heads: int = 16
    patch_size: int = 32
    scale_factor: int = 2


class Tower(siglip.SiglipTower):
    prefixes = (
        ("vision_model.", ""),
        ("connector.modality_projection.", "connector."),
        ("connector.", "connector."),
    )

    def __init__(self, config: Config, processor: Mapping[str, Any]) -> None:
        super().__init__(config, processor, merge_size=config.scale_factor)
        self._width = config.text_hidden_size
        joined = config.hidden_size * config.scale_factor**2
        self.connector = {"proj": nn.Linear(joined, self._width, bias=False)}

    @property
    def feature_size(self) -> int:
        return self._width

    def merge(self, x: mx.array) -> mx.array:
        joined = self.hidden_size * self.merge_size**2
        return self.connector["proj"](self.post_layernorm(x).reshape(-1, joined))
