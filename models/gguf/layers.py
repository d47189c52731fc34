"""Layers whose matrices consist of GGUF's blocks, as in the file.

Knows: block types, the layers that they replace. Must not know: files, architectures, kernels.

`models.cpu_layout.apply_cpu_layout` replaces these layers with layers that multiply directly by the
blocks (models/kernels/block_layers.py). Without the kernels, each call dequantizes the whole
matrix, so other packings are faster there: `choose_storage`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from models.base import ModelError
from models.experts import ExpertLinear
from models.gguf.blocks import dequantize, has_affine_packing
from models.gguf.ggml_types import GGML_TYPES
from models.quant import replace_leaves

# blocks: as in the file. affine: MLX's packing, with the same weights. float32: dequantized, with
# the same weights. bfloat16: dequantized and rounded.
Storage = Literal["blocks", "affine", "float32", "bfloat16"]


def choose_storage(type_id: int, *, has_kernels: bool, on_gpu: bool) -> Storage | None:
    """Returns how weights of a type are stored, or None for the plain types, which are stored as
    they are. has_kernels: whether the CPU kernels are in use (`models.kernels.ops`)."""
    if GGML_TYPES[type_id].is_plain:
        return None
    if has_kernels and not on_gpu:
        return "blocks"
    if has_affine_packing(type_id):
        return "affine"
    return "bfloat16" if on_gpu else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlocks:
    """The blocks of a weight. raw: uint8 [..., out, bytes per row]. weight: the same weight
    dequantized or in MLX's packing, which is not evaluated if the blocks are used."""

    weight: mx.array
    raw: mx.array
    type_id: int


class GgufLayer(nn.Module):
    """The common part of the layers. weight: uint8 [..., out, bytes per row]. inputs, outputs: the
    shape of the dequantized matrix. num_weights: the number of its elements, or of all matrices of
    a stack."""

    def __init__(self, plain: Any, type_id: int) -> None:
        super().__init__()
        kind = GGML_TYPES[type_id]
        *outer, self.outputs, self.inputs = plain.weight.shape
        if self.inputs % kind.elements:
            raise ModelError(
                f"rows of {self.inputs} weights cannot have the type {kind.name}, whose blocks "
                f"have {kind.elements} weights"
            )
        self.type_id, self.num_weights = type_id, plain.weight.size
        row_bytes = self.inputs // kind.elements * kind.nbytes
        self.weight = mx.zeros((*outer, self.outputs, row_bytes), mx.uint8)
        if "bias" in plain:
            self.bias = plain.bias


class GgufLinear(GgufLayer):
    """A linear layer."""

    def __call__(self, x: mx.array) -> mx.array:
        product = x @ dequantize(self.weight, self.type_id).T
        return product + self.bias if "bias" in self else product


class GgufEmbedding(GgufLayer):
    """A table of embeddings. Only the rows that are used are dequantized."""

    def __call__(self, ids: mx.array) -> mx.array:
        return dequantize(self.weight[ids], self.type_id)

    def as_linear(self, x: mx.array) -> mx.array:
        return x @ dequantize(self.weight, self.type_id).T


class GgufExpertLinear(GgufLayer):
    """One linear map per expert. weight: [E, out, bytes per row]. bias: [E, out]."""

    prefers_sorted = True

    def __call__(
        self, x: mx.array, expert_ids: mx.array, *, sorted_indices: bool = False
    ) -> mx.array:
        """See `ExpertLinear`."""
        weight = dequantize(self.weight, self.type_id).swapaxes(-1, -2)
        product = mx.gather_mm(x, weight, rhs_indices=expert_ids, sorted_indices=sorted_indices)
        return product + self.bias[expert_ids][..., None, :] if "bias" in self else product


# the exact class of a layer -> the class of the layer with blocks
_LAYERS: Mapping[type, type[GgufLayer]] = {
    nn.Linear: GgufLinear,
    nn.Embedding: GgufEmbedding,
    ExpertLinear: GgufExpertLinear,
}


def replace_with_gguf_layers(
    model: nn.Module, weights: dict[str, mx.array], stored: Sequence[StoredBlocks]
) -> bool:
    """Replaces layers with layers of blocks, and their weights with blocks, both in place. Returns
    whether there are any. A weight is replaced if it is the weight of a `StoredBlocks` itself;
    weights that were computed from such weights, and those of other layers, are kept. Raises
    ModelError for rows that do not consist of blocks."""
    found = {id(one.weight): one for one in stored}
    replaced: list[str] = []

    def replace(path: str, layer: Any) -> Any:
        name = f"{path}.weight"
        blocks = found.get(id(weights.get(name)))
        if blocks is None or type(layer) not in _LAYERS:
            return layer
        replaced.append(path)
        weights[name] = blocks.raw
        for part in ("scales", "biases"):
            weights.pop(f"{path}.{part}", None)
        return _LAYERS[type(layer)](layer, blocks.type_id)

    replace_leaves(model, replace)
    return bool(replaced)
