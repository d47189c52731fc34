"""Building blocks that several vision towers share.

Knows: tensors. Must not know: towers, checkpoints.
"""

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn

from models import kernels
from models.base import ModelError
from models.kernels.layers import get_activation_name
from models.layers import ACTIVATIONS, Activation, merge_heads, split_heads

# cosines and sines [L, D / 2] of the rotation of heads of size D, in float32
Rotation = tuple[mx.array, mx.array]


def find_activation(name: str) -> Activation:
    """Returns the activation that the config names. Raises ModelError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json: the activation {name!r} of vision_config is not supported")
    return ACTIVATIONS[name]


def activate(activation: Activation, x: mx.array) -> mx.array:
    """Returns activation(x)."""
    ops = kernels.ops(x)
    kind = None if ops is None else get_activation_name(activation)
    return activation(x) if ops is None or kind is None else ops.glu(kind, x, mx.ones_like(x))


def rotate(x: mx.array, rotation: Rotation) -> mx.array:
    """Rotates heads x [1, H, L, D]. Pairs of dimensions are half a head apart."""
    cos, sin = rotation
    low, high = mx.split(x.astype(mx.float32), 2, axis=-1)
    rotated = mx.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x.dtype)


class MLP(nn.Module):
    """Computes fc2(activation(fc1(x))). names: those of the two layers."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        activation: Activation,
        names: tuple[str, str] = ("fc1", "fc2"),
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self._activation, self._names = activation, names
        for name, inputs, outputs in zip(names, sizes, sizes[1:], strict=False):
            self[name] = nn.Linear(inputs, outputs, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        first, second = self._names
        return self[second](activate(self._activation, self[first](x)))


def make_rotation(
    y: mx.array, x: mx.array, y_frequencies: Sequence[float], x_frequencies: Sequence[float]
) -> Rotation:
    """Returns the rotation of patches at positions y and x [L]. The angles of the first half of the
    pairs of dimensions depend on y, the others on x. Frequencies: [D / 4], in radians per
    position."""
    angles = mx.concatenate(
        [y[:, None] * mx.array(list(y_frequencies)), x[:, None] * mx.array(list(x_frequencies))],
        axis=-1,
    )
    return mx.cos(angles), mx.sin(angles)


def make_frequencies(theta: float, size: int) -> list[float]:
    """Returns theta^(-2i / size) for each pair of `size` dimensions, in radians per position."""
    return [theta ** (-i / size) for i in range(0, size, 2)]


def to_heads(x: mx.array, heads: int) -> mx.array:
    """Converts [L, heads * D] to [1, heads, L, D]."""
    return split_heads(x[None], heads)


def from_heads(x: mx.array) -> mx.array:
    """Converts [1, heads, L, D] to [L, heads * D]."""
    return merge_heads(x)[0]


def interpolate_axis(length: int, side: int) -> tuple[list[int], list[int], list[float]]:
    """Returns, for each of `length` positions that are spread evenly over a side of a table with
    aligned corners, the two neighbouring rows and the weight of the second one."""
    step = (side - 1) / (length - 1) if length > 1 else 0.0
    places = [i * step for i in range(length)]
    low = [min(int(place), side - 1) for place in places]
    return (
        low,
        [min(i + 1, side - 1) for i in low],
        [p - i for p, i in zip(places, low, strict=True)],
    )


def rename_prefixes(
    weights: Mapping[str, mx.array], prefixes: Sequence[tuple[str, str]]
) -> dict[str, mx.array]:
    """Replaces the first prefix that a name begins with. Drops other tensors."""
    return {
        new + name.removeprefix(old): array
        for name, array in weights.items()
        for old, new in [next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))]
        if old
    }
