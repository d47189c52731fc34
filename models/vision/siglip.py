"""SigLIP (Zhai et al. 2023), the encoder of several families of vision towers.

Knows: its layers, its keys of `vision_config`, names and layouts of published checkpoints. Must not
know: how families make image rows of its output, text models, resizing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import base
from models.layers import CenteredNorm
from models.vision.layers import (
    MLP,
    Rotation,
    find_activation,
    from_heads,
    rename_prefixes,
    to_heads,
)
from models.vision.pixels import HALF, PixelTable, flatten_patch_weight
from models.vision.tower import Grid, VisionTower

# the head that pools the output into one vector, and indices
_UNUSED = ("head.", "embeddings.position_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(base.Config):
    """The keys of `vision_config`, with the defaults of Hugging Face's SiglipVisionConfig."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    text_config: Mapping[str, Any]

    @property
    def num_positions(self) -> int:
        """The number of learned positions."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tile_size(self) -> int | None:
        """See `VisionTower`."""
        return self.image_size

    @property
    def text_hidden_size(self) -> int:
        return _TextConfig.from_dict(self.text_config).hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextConfig(base.Config):
    hidden_size: int


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self._heads = config.num_attention_heads
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        heads = self._heads
        return (
            to_heads(self.q_proj(x), heads),
            to_heads(self.k_proj(x), heads),
            to_heads(self.v_proj(x), heads),
        )


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size, config.hidden_size
        self.layer_norm1 = CenteredNorm(config.hidden_size, config.layer_norm_eps)
        self.layer_norm2 = CenteredNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(sizes, find_activation(config.hidden_act))

    def project(
        self, x: mx.array, rotation: Rotation | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        assert rotation is None
        return self.self_attn.project(self.layer_norm1(x))

    def complete(self, x: mx.array, attended: mx.array) -> mx.array:
        x = x + self.self_attn.out_proj(from_heads(attended))
        return x + self.mlp(self.layer_norm2(x))


class SiglipTower(VisionTower):
    """The base class of towers with this encoder.

    merge_size: see `VisionTower`. prefixes: the prefixes of the encoder's and of other modules'
    names in checkpoints, with their replacements.
    """

    prefixes: ClassVar[Sequence[tuple[str, str]]] = ()

    def __init__(self, config: Config, processor: Mapping[str, Any], *, merge_size: int) -> None:
        super().__init__(
            PixelTable(processor, HALF),
            patch_size=config.patch_size,
            merge_size=merge_size,
            hidden_size=config.hidden_size,
            inner_size=config.intermediate_size,
            heads=config.num_attention_heads,
            tile_size=config.tile_size,
        )
        self._side = config.image_size // config.patch_size
        self.embeddings = {
            "patch_embedding": nn.Linear(3 * config.patch_size**2, config.hidden_size),
            "position_embedding": nn.Embedding(config.num_positions, config.hidden_size),
        }
        self.encoder = {"layers": [Block(config) for _ in range(config.num_hidden_layers)]}
        self.post_layernorm = CenteredNorm(config.hidden_size, config.layer_norm_eps)

    @property
    def stack(self) -> Sequence[Block]:
        return self.encoder["layers"]

    def embed(self, patches: mx.array, grid: Grid, part: slice) -> mx.array:
        positions = self.find_positions(grid, part)
        return self.embeddings["patch_embedding"](patches) + positions

    def find_positions(self, grid: Grid, part: slice) -> mx.array:
        """Returns the position embeddings [L, hidden] of a range of patches."""
        return self.embeddings["position_embedding"](grid.y[part] * self._side + grid.x[part])

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        named = rename_prefixes(weights, self.prefixes)
        named = {name: array for name, array in named.items() if not name.startswith(_UNUSED)}
        name = "embeddings.patch_embedding.weight"
        if name in named:
            named[name] = flatten_patch_weight(name, named[name], self.patch_size)
        return named
