"""The vision tower of Pixtral (Mistral AI 2024), also in Mistral Small 3 and Ministral 3, which
merge squares of patches.

Knows: the keys of `vision_config`, names and layouts of published checkpoints. Must not know: the
text model, resizing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import base
from models.base import ModelError
from models.layers import GatedMLP
from models.vision.layers import (
    MLP,
    Rotation,
    find_activation,
    from_heads,
    make_frequencies,
    make_rotation,
    rename_prefixes,
    rotate,
    to_heads,
)
from models.vision.pixels import CLIP, PixelTable, flatten_patch_weight
from models.vision.tower import Grid, VisionTower

_EPS = 1e-5

_PREFIXES = (
    ("vision_tower.vision_model.", ""),
    ("vision_tower.", ""),
    ("multi_modal_projector.", "projector."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextConfig(base.Config):
    hidden_size: int
    rms_norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(base.Config):
    """The keys of `vision_config`, with the defaults of Hugging Face's PixtralVisionConfig, and
    those of the projector."""

    # whether the projector has a norm and merges patches
    merges: ClassVar[bool] = False

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    patch_size: int = 16
    hidden_act: str = "gelu"
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    text_config: Mapping[str, Any]
    projector_hidden_act: str = "gelu"
    vision_feature_layer: int | Sequence[int] = -1
    multimodal_projector_bias: bool = True

    @property
    def text(self) -> _TextConfig:
        return _TextConfig.from_dict(self.text_config)

    @property
    def merge_size(self) -> int:
        return 1

    @property
    def theta(self) -> float:
        return self.rope_parameters.get("rope_theta", self.rope_theta)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergingConfig(Config):
    """The config of Mistral 3."""

    merges: ClassVar[bool] = True

    multimodal_projector_bias: bool = False
    spatial_merge_size: int = 2

    @property
    def merge_size(self) -> int:
        return self.spatial_merge_size


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self._heads = config.num_attention_heads
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def project(self, x: mx.array, rotation: Rotation) -> tuple[mx.array, mx.array, mx.array]:
        heads = self._heads
        return (
            rotate(to_heads(self.q_proj(x), heads), rotation),
            rotate(to_heads(self.k_proj(x), heads), rotation),
            to_heads(self.v_proj(x), heads),
        )


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, _EPS)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, _EPS)
        self.attention = Attention(config)
        self.feed_forward = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=find_activation(config.hidden_act),
        )

    def project(
        self, x: mx.array, rotation: Rotation | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        assert rotation is not None
        return self.attention.project(self.attention_norm(x), rotation)

    def complete(self, x: mx.array, attended: mx.array) -> mx.array:
        x = x + self.attention.o_proj(from_heads(attended))
        return x + self.feed_forward(self.ffn_norm(x))


class Projector(MLP):
    """The projection to the text model, after a norm and the merge of patches, if the config has
    them."""

    def __init__(self, config: Config) -> None:
        width, text = config.hidden_size, config.text
        super().__init__(
            (width, text.hidden_size, text.hidden_size),
            find_activation(config.projector_hidden_act),
            ("linear_1", "linear_2"),
            bias=config.multimodal_projector_bias,
        )
        self._merges, self._group = config.merges, config.merge_size**2
        if config.merges:
            self.norm = nn.RMSNorm(width, text.rms_norm_eps)
            self.patch_merger = {"merging_layer": nn.Linear(width * self._group, width, bias=False)}

    def __call__(self, x: mx.array) -> mx.array:
        if self._merges:
            # the values of a channel follow each other
            squares = self.norm(x).reshape(-1, self._group, x.shape[-1]).swapaxes(1, 2)
            x = self.patch_merger["merging_layer"](squares.reshape(len(squares), -1))
        return super().__call__(x)


class Tower(VisionTower):
    def __init__(self, config: Config, processor: Mapping[str, Any]) -> None:
        if config.vision_feature_layer not in (-1, [-1]):
            raise ModelError(
                f"config.json: vision_feature_layer is {config.vision_feature_layer}, but only the "
                "last layer (-1) is supported"
            )
        super().__init__(
            PixelTable(processor, CLIP),
            patch_size=config.patch_size,
            merge_size=config.merge_size,
            hidden_size=config.hidden_size,
            inner_size=config.intermediate_size,
            heads=config.num_attention_heads,
        )
        self._config = config
        self.patch_conv = nn.Linear(3 * config.patch_size**2, config.hidden_size, bias=False)
        self.ln_pre = nn.RMSNorm(config.hidden_size, _EPS)
        self.transformer = {"layers": [Block(config) for _ in range(config.num_hidden_layers)]}
        self.projector = Projector(config)

    @property
    def feature_size(self) -> int:
        return self._config.text.hidden_size

    @property
    def stack(self) -> Sequence[Block]:
        return self.transformer["layers"]

    def rotation(self, grid: Grid) -> Rotation:
        frequencies = make_frequencies(self._config.theta, self.head_dim)
        return make_rotation(grid.y, grid.x, frequencies[::2], frequencies[1::2])

    def embed(self, patches: mx.array, grid: Grid, part: slice) -> mx.array:
        return self.ln_pre(self.patch_conv(patches))

    def merge(self, x: mx.array) -> mx.array:
        return self.projector(x)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        named = rename_prefixes(weights, _PREFIXES)
        name = "patch_conv.weight"
        if name in named:
            named[name] = flatten_patch_weight(name, named[name], self.patch_size)
        return named
