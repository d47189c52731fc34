"""Layers with GGUF's blocks that use mlxrunner's own operations.

Knows: the layers of models/gguf/layers.py, the operations of `_kernels`. Must not know:
architectures, files. models/kernels/layers.py describes kernel layers.
"""

from typing import Any

import mlx.core as mx

from models.gguf.layers import GgufEmbedding, GgufExpertLinear, GgufLayer, GgufLinear
from models.kernels.layers import (
    KernelExperts,
    KernelLayer,
    KernelLayerTable,
    KernelMatrix,
    KernelTable,
)


class KernelGgufLayer(KernelLayer, GgufLayer):
    """weight: uint8 panels, the result of `ops.repack_blocks`."""

    def __getattr__(self, name: str) -> Any:
        """See KernelLayer. The weight as an attribute is the dequantized matrix, float32."""
        if name != "weight":
            return super().__getattr__(name)
        return self.matmul.dequantize_rows(mx.arange(self.outputs))


class KernelGgufLinear(KernelGgufLayer, KernelMatrix, GgufLinear):
    pass


class KernelGgufEmbedding(KernelGgufLayer, KernelTable, GgufEmbedding):
    pass


class KernelGgufExpertLinear(KernelGgufLayer, KernelExperts, GgufExpertLinear):
    pass


BLOCK_KERNEL_LAYERS: KernelLayerTable = {
    GgufLinear: (KernelGgufLinear, lambda _: True),
    GgufEmbedding: (KernelGgufEmbedding, lambda _: True),
    GgufExpertLinear: (KernelGgufExpertLinear, lambda _: True),
}
