"""The vision tower of Gemma 4, whose output is averaged over squares of patches.

Knows: the keys of `vision_config`, names and layouts of published checkpoints. Must not know: the
text model, resizing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models import base
from models.layers import Activation, apply_glu, normalize_rms
from models.vision.layers import (
    Rotation,
    find_activation,
    from_heads,
    make_frequencies,
    rename_prefixes,
    rotate,
    to_heads,
)
from models.vision.pixels import NOT_NORMALIZED, PixelTable
from models.vision.tower import Grid, VisionTower

_PREFIXES = (("vision_tower.", ""), ("embed_vision.", "projector."))

# the limits of the values of a layer in a checkpoint
_LIMITS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextConfig(base.Config):
    hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(base.Config):
    """The keys of `vision_config`, with the defaults of Hugging Face's Gemma4VisionConfig."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pooling_kernel_size: int = 3
    patch_size: int = 16
    position_embedding_size: int = 10240
    use_clipped_linears: bool = False
    standardize: bool = False
    text_config: Mapping[str, Any]

    @property
    def theta(self) -> float:
        return self.rope_parameters.get("rope_theta", 100.0)

    @property
    def text_hidden_size(self) -> int:
        return _TextConfig.from_dict(self.text_config).hidden_size


class ClippedLinear(nn.Module):
    """A linear layer that limits the values of its input and of its output, if `clips` is set."""

    def __init__(self, inputs: int, outputs: int, *, clips: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self._clips = clips
        if clips:
            for name in _LIMITS:
                self[name] = mx.array(0.0)

    def __call__(self, x: mx.array) -> mx.array:
        if not self._clips:
            return self.linear(x)
        limits = [self[name].astype(x.dtype) for name in _LIMITS]
        return mx.clip(self.linear(mx.clip(x, *limits[:2])), *limits[2:])


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._eps = config.rms_norm_eps
        clips, size = config.use_clipped_linears, config.head_dim
        width, inner, shared = config.hidden_size, self._heads * size, self._kv_heads * size
        self.q_proj = ClippedLinear(width, inner, clips=clips)
        self.k_proj = ClippedLinear(width, shared, clips=clips)
        self.v_proj = ClippedLinear(width, shared, clips=clips)
        self.o_proj = ClippedLinear(inner, width, clips=clips)
        self.q_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, config.rms_norm_eps)

    def project(self, x: mx.array, rotation: Rotation) -> tuple[mx.array, mx.array, mx.array]:
        queries = self.q_norm(to_heads(self.q_proj(x), self._heads))
        keys = self.k_norm(to_heads(self.k_proj(x), self._kv_heads))
        values = normalize_rms(to_heads(self.v_proj(x), self._kv_heads), self._eps)
        return _rotate_halves(queries, rotation), _rotate_halves(keys, rotation), values


def _rotate_halves(x: mx.array, rotation: Rotation) -> mx.array:
    """Rotates each half of heads [1, H, L, D] by itself. rotation: [L, 2, D / 4]."""
    halves = x.reshape(*x.shape[:-1], 2, -1)
    return rotate(halves, rotation).reshape(x.shape)


class GatedMLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        clips, width, inner = (
            config.use_clipped_linears,
            config.hidden_size,
            config.intermediate_size,
        )
        self._activation: Activation = find_activation(config.hidden_activation)
        self.gate_proj = ClippedLinear(width, inner, clips=clips)
        self.up_proj = ClippedLinear(width, inner, clips=clips)
        self.down_proj = ClippedLinear(inner, width, clips=clips)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(apply_glu(self._activation, self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(width, eps)
        self.post_feedforward_layernorm = nn.RMSNorm(width, eps)

    def project(
        self, x: mx.array, rotation: Rotation | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        assert rotation is not None
        return self.self_attn.project(self.input_layernorm(x), rotation)

    def complete(self, x: mx.array, attended: mx.array) -> mx.array:
        x = x + self.post_attention_layernorm(self.self_attn.o_proj(from_heads(attended)))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Projector(nn.Module):
    """A norm without weights and the projection to the text model."""

    def __init__(self, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.embedding_projection = nn.Linear(inputs, outputs, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.embedding_projection(normalize_rms(x, self._eps))


class Tower(VisionTower):
    channels_last = True

    def __init__(self, config: Config, processor: Mapping[str, Any]) -> None:
        super().__init__(
            PixelTable(processor, NOT_NORMALIZED),
            patch_size=config.patch_size,
            merge_size=config.pooling_kernel_size,
            hidden_size=config.hidden_size,
            inner_size=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
        self.scale = 1.0
        self._config = config
        width = config.hidden_size
        self.patch_embedder: dict[str, Any] = {
            "input_proj": nn.Linear(3 * config.patch_size**2, width, bias=False),
            "position_embedding_table": mx.zeros((2, config.position_embedding_size, width)),
        }
        self.encoder = {"layers": [Block(config) for _ in range(config.num_hidden_layers)]}
        self.projector = Projector(width, config.text_hidden_size, config.rms_norm_eps)
        if config.standardize:
            self.std_bias = mx.zeros((width,))
            self.std_scale = mx.ones((width,))

    @property
    def feature_size(self) -> int:
        return self._config.text_hidden_size

    @property
    def stack(self) -> Sequence[Block]:
        return self.encoder["layers"]

    def rotation(self, grid: Grid) -> Rotation:
        frequencies = mx.array(make_frequencies(self._config.theta, self.head_dim // 2))
        angles = mx.stack([grid.x, grid.y], axis=-1)[..., None] * frequencies
        return mx.cos(angles), mx.sin(angles)

    def embed(self, patches: mx.array, grid: Grid, part: slice) -> mx.array:
        across, down = self.patch_embedder["position_embedding_table"]
        positions = across[grid.x[part]] + down[grid.y[part]]
        return self.patch_embedder["input_proj"](2 * (patches - 0.5)) + positions

    def merge(self, x: mx.array) -> mx.array:
        squares = x.reshape(-1, self.merge_size**2, self.hidden_size).astype(mx.float32)
        rows = squares.mean(axis=1) * self.hidden_size**0.5
        if self._config.standardize:
            rows = (rows - self.std_bias) * self.std_scale
        return self.projector(rows.astype(x.dtype))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drops limits that the config does not enable."""
        return {
            name: array
            for name, array in rename_prefixes(weights, _PREFIXES).items()
            if self._config.use_clipped_linears or not name.endswith(_LIMITS)
        }
