"""Stacked layers, with one matrix per expert or head, that use mlxrunner's own operations.

Knows: our stacked layers (models/experts.py, models/mla.py), the operations of `_kernels`. Must not
know: architectures, checkpoints. models/kernels/layers.py describes kernel layers.
"""

from typing import Any

import mlx.core as mx

from models import experts, mla
from models.kernels.layers import (
    KernelExperts,
    KernelLayer,
    KernelLayerTable,
    is_supported_quantization,
    is_unquantized,
)


class KernelExpertLinear(KernelExperts, experts.ExpertLinear):
    pass


class KernelQuantizedExpertLinear(KernelExperts, experts.QuantizedExpertLinear):
    pass


class KernelMultiLinear(KernelLayer, mla.MultiLinear):
    """A `MultiLinear` with our operations. `apply_transposed` is only needed for prompts and uses
    MLX's operation, because a transposed kernel layout would need the weights twice."""

    def __call__(self, x: mx.array, heads: slice = mla.ALL_HEADS) -> mx.array:
        return _matmul_per_head(self, x, heads)


class KernelQuantizedMultiLinear(KernelLayer, mla.QuantizedMultiLinear):
    """See `KernelMultiLinear`."""

    def __call__(self, x: mx.array, heads: slice = mla.ALL_HEADS) -> mx.array:
        return _matmul_per_head(self, x, heads)


STACKED_KERNEL_LAYERS: KernelLayerTable = {
    experts.ExpertLinear: (KernelExpertLinear, is_unquantized),
    experts.QuantizedExpertLinear: (KernelQuantizedExpertLinear, is_supported_quantization),
    mla.MultiLinear: (KernelMultiLinear, is_unquantized),
    mla.QuantizedMultiLinear: (KernelQuantizedMultiLinear, is_supported_quantization),
}


def _matmul_per_head(layer: Any, x: mx.array, heads: slice) -> mx.array:
    """Maps [B, H or 1, L, in] to [B, H, L, out], with a separate matrix per head."""
    chosen = mx.arange(layer["weight"].shape[0])[heads][:, None]
    return layer.matmul.gather(x[..., None, :], chosen).squeeze(-2)
