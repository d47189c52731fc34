"""nvfp4 layers with a global scale per weight.

Knows: MLX's definition of a global scale. Must not know: architectures, checkpoints.

nvfp4 (NVIDIA 2025) has an eight-bit scale for each 16 weights. To extend their range, a weight may
have a global scale g. It is the magnitude of the largest entry of the weight, and corresponds to
the largest representable value, 6 (E2M1) times 448 (E4M3). A weight is then

    w = q * s * g / (6 * 448)

MLX's quantized matmul does not support g for plain layers, and supports it for experts only on a
GPU. g is a common factor, so the result of the product is scaled instead.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models.base import ModelError
from models.experts import ExpertLinear, QuantizedExpertLinear

MAX_NVFP4 = 6.0 * 448.0

_GROUP, _BITS, _MODE = 16, 4, "nvfp4"


class Nvfp4Linear(nn.QuantizedLinear):
    """A quantized linear layer with a global scale. global_scale: [1]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.global_scale = mx.ones((1,))

    def __call__(self, x: mx.array) -> mx.array:
        """Maps [..., in] to [..., out]."""
        product = mx.quantized_matmul(
            _widen_float16(x), self.weight, self.scales, group_size=_GROUP, bits=_BITS, mode=_MODE
        )
        scaled = (product * (self.global_scale / MAX_NVFP4)).astype(x.dtype)
        return scaled + self.bias if "bias" in self else scaled

    def reshape_scale(self, scale: mx.array) -> mx.array:
        return scale.reshape(-1)


class Nvfp4Embedding(nn.QuantizedEmbedding):
    """A quantized embedding with a global scale. global_scale: [1]. Its rows have the type of other
    nvfp4 embeddings, bfloat16."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.global_scale = mx.ones((1,))

    def __call__(self, x: mx.array) -> mx.array:
        """Maps token IDs [...] to [..., D]."""
        rows = mx.dequantize(
            self.weight[x],
            self.scales[x],
            group_size=_GROUP,
            bits=_BITS,
            mode=_MODE,
            dtype=mx.float32,
        )
        return (rows * (self.global_scale / MAX_NVFP4)).astype(mx.bfloat16)

    def as_linear(self, x: mx.array) -> mx.array:
        """Maps [..., D] to [..., V]."""
        product = mx.quantized_matmul(
            _widen_float16(x), self.weight, self.scales, group_size=_GROUP, bits=_BITS, mode=_MODE
        )
        return (product * (self.global_scale / MAX_NVFP4)).astype(x.dtype)

    def reshape_scale(self, scale: mx.array) -> mx.array:
        return scale.reshape(-1)


class Nvfp4ExpertLinear(QuantizedExpertLinear):
    """Quantized experts with a global scale. global_scale: [E], one per expert."""

    def __init__(self, plain: ExpertLinear) -> None:
        super().__init__(plain, _GROUP, _BITS, _MODE)
        self.experts = plain.weight.shape[0]
        self.global_scale = mx.ones((self.experts,))

    def __call__(
        self, x: mx.array, expert_ids: mx.array, *, sorted_indices: bool = False
    ) -> mx.array:
        """Computes the same as `ExpertLinear`."""
        product = mx.gather_qmm(
            _widen_float16(x),
            self.weight,
            self.scales,
            rhs_indices=expert_ids,
            group_size=_GROUP,
            bits=_BITS,
            mode=_MODE,
            sorted_indices=sorted_indices,
        )
        scale = self.global_scale[expert_ids][..., None, None] / MAX_NVFP4
        scaled = (product * scale).astype(x.dtype)
        return scaled + self.bias[expert_ids][..., None, :] if "bias" in self else scaled

    def reshape_scale(self, scale: mx.array) -> mx.array:
        """Reshapes a global scale. A single scale applies to all experts."""
        flat = scale.reshape(-1)
        return mx.broadcast_to(flat, (self.experts,)) if flat.size == 1 else flat


def make_nvfp4_layer(path: str, layer: nn.Module, mode: str) -> Any:
    """Returns the counterpart of a plain layer, with a parameter `global_scale`, and a method
    `reshape_scale` for that of a checkpoint. Raises ModelError if there is none."""
    if mode != _MODE:
        raise ModelError(f"{path} has a global scale, which {mode} weights do not have")
    match layer:
        case ExpertLinear():
            return Nvfp4ExpertLinear(layer)
        case nn.Linear():
            return Nvfp4Linear.from_linear(layer, _GROUP, _BITS, _MODE)
        case nn.Embedding():
            return Nvfp4Embedding.from_embedding(layer, _GROUP, _BITS, _MODE)
        case _:
            raise ModelError(f"a global scale is not supported for {path}")


def _widen_float16(x: mx.array) -> mx.array:
    """Widens float16 to float32, because sums may overflow float16 before they are scaled down."""
    return x.astype(mx.float32) if x.dtype == mx.float16 else x
