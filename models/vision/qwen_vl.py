"""The common parts of the vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Knows: names and layouts of published checkpoints. Must not know: the keys of `vision_config`, the
text model, resizing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models.vision.layers import (
    Rotation,
    activate,
    from_heads,
    make_frequencies,
    make_rotation,
    rename_prefixes,
    rotate,
    to_heads,
)
from models.vision.pixels import CLIP, PixelTable, flatten_patch_weight
from models.vision.tower import Grid, VisionTower

EPS = 1e-6

PREFIXES = ("visual.", "vision_tower.")

Layer = Callable[[mx.array], mx.array]


class Attention(nn.Module):
    """Attention with one product for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def project(
        self, x: mx.array, rotation: Rotation | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        assert rotation is not None
        queries, keys, values = (
            to_heads(part, self._heads) for part in mx.split(self.qkv(x), 3, axis=-1)
        )
        return rotate(queries, rotation), rotate(keys, rotation), values


class Block(nn.Module):
    """norms: before the attention, and before the MLP."""

    def __init__(self, norms: tuple[Layer, Layer], attention: Attention, mlp: Layer) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn = attention
        self.mlp = mlp

    def project(
        self, x: mx.array, rotation: Rotation | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        return self.attn.project(self.norm1(x), rotation)

    def complete(self, x: mx.array, attended: mx.array) -> mx.array:
        x = x + self.attn.proj(from_heads(attended))
        return x + self.mlp(self.norm2(x))


class _Merger(nn.Module):
    """Merges squares of patches into image rows. norm: the norm of each patch."""

    def __init__(self, norm: Layer, width: int, feature_size: int) -> None:
        super().__init__()
        self._width = width
        self.ln_q = norm
        self.linear_1 = nn.Linear(width, width)
        self.linear_2 = nn.Linear(width, feature_size)

    def __call__(self, x: mx.array) -> mx.array:
        joined = self.ln_q(x).reshape(-1, self._width)
        return self.linear_2(activate(nn.gelu, self.linear_1(joined)))


class Qwen2Tower(VisionTower):
    """The tower of Qwen2-VL and Qwen2.5-VL. norm: the
    merger's. feature_size: the width of an image row."""

    # the two layers of the merger are numbers in checkpoints
    _NAMES = tuple(
        (f"{prefix}{old}", new)
        for prefix in PREFIXES
        for old, new in (
            ("merger.mlp.0.", "merger.linear_1."),
            ("merger.mlp.2.", "merger.linear_2."),
            ("", ""),
        )
    )

    def __init__(
        self,
        processor: Mapping[str, Any],
        blocks: Sequence[Block],
        norm: Layer,
        *,
        patch_size: int,
        merge_size: int,
        hidden_size: int,
        inner_size: int,
        heads: int,
        feature_size: int,
    ) -> None:
        super().__init__(
            PixelTable(processor, CLIP),
            patch_size=patch_size,
            merge_size=merge_size,
            hidden_size=hidden_size,
            inner_size=inner_size,
            heads=heads,
        )
        self._feature_size = feature_size
        self.patch_embed = {"proj": nn.Linear(3 * patch_size**2, hidden_size, bias=False)}
        self.blocks = blocks
        self.merger = _Merger(norm, hidden_size * merge_size**2, feature_size)

    @property
    def feature_size(self) -> int:
        return self._feature_size

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
        return name_weights(weights, self._NAMES, self.patch_size)


def name_weights(
    weights: Mapping[str, mx.array], prefixes: Sequence[tuple[str, str]], patch_size: int
) -> dict[str, mx.array]:
    """Returns the weights with the names of a tower, and those of patches as a matrix. prefixes:
    see `rename_prefixes`."""
    named = rename_prefixes(weights, prefixes)
    name = "patch_embed.proj.weight"
    if name in named:
        named[name] = flatten_patch_weight(name, named[name], patch_size)
    return named
