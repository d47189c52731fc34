"""Layers in nvfp4 whose whole weight has one more scale.

Knows: what MLX means by a global scale. Must not know: architectures, checkpoints.

nvfp4 (NVIDIA 2025) keeps a scale for each 16 weights in eight bits. So that these reach far enough,
a weight may have one more scale of its own: the magnitude g of its largest entry, which stands for
the largest that can be written, 6 (E2M1) times 448 (E4M3). A weight is then

    w = q * s * g / (6 * 448)

MLX's product with a quantised matrix takes no g for plain layers, and for experts only on a GPU. It
is a common factor, so what comes out of the product is scaled instead.
"""

from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from models.base import ModelError
from models.experts import ExpertLinear, QuantizedExpertLinear

LARGEST = 6.0 * 448.0

_GROUP, _BITS, _MODE = 16, 4, "nvfp4"


class Scaled(Protocol):
    """A quantised layer with a parameter `global_scale`."""

    def fitted(self, scale: mx.array) -> mx.array:
        """A checkpoint's global scale in the shape of the layer's, where it can have that."""
        ...


class ScaledLinear(nn.QuantizedLinear):
    """global_scale: [1]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.global_scale = mx.ones((1,))

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] -> [..., out]."""
        product = mx.quantized_matmul(
            _wide(x), self.weight, self.scales, group_size=_GROUP, bits=_BITS, mode=_MODE
        )
        scaled = (product * (self.global_scale / LARGEST)).astype(x.dtype)
        return scaled + self.bias if "bias" in self else scaled

    def fitted(self, scale: mx.array) -> mx.array:
        return scale.reshape(-1)


class ScaledExpertLinear(QuantizedExpertLinear):
    """global_scale: [E], each expert's."""

    def __init__(self, plain: ExpertLinear) -> None:
        super().__init__(plain, _GROUP, _BITS, _MODE)
        self.experts = plain.weight.shape[0]
        self.global_scale = mx.ones((self.experts,))

    def __call__(self, x: mx.array, chosen: mx.array, *, ordered: bool = False) -> mx.array:
        """As `ExpertLinear`."""
        product = mx.gather_qmm(
            _wide(x),
            self.weight,
            self.scales,
            rhs_indices=chosen,
            group_size=_GROUP,
            bits=_BITS,
            mode=_MODE,
            sorted_indices=ordered,
        )
        scale = self.global_scale[chosen][..., None, None] / LARGEST
        scaled = (product * scale).astype(x.dtype)
        return scaled + self.bias[chosen][..., None, :] if "bias" in self else scaled

    def fitted(self, scale: mx.array) -> mx.array:
        """One for all experts is each one's."""
        flat = scale.reshape(-1)
        return mx.broadcast_to(flat, (self.experts,)) if flat.size == 1 else flat


def with_global_scale(path: str, layer: nn.Module, mode: str) -> Any:
    """The `Scaled` twin of a plain layer. Raises ModelError where there is none."""
    if mode != _MODE:
        raise ModelError(f"{path} has a global scale, which {mode} weights do not have")
    match layer:
        case ExpertLinear():
            return ScaledExpertLinear(layer)
        case nn.Linear():
            return ScaledLinear.from_linear(layer, _GROUP, _BITS, _MODE)
        case _:
            raise ModelError(f"a global scale is not supported for {path}")


def _wide(x: mx.array) -> mx.array:
    """Before they are scaled down, sums outgrow float16."""
    return x.astype(mx.float32) if x.dtype == mx.float16 else x
