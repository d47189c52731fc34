"""Quantized weights: detects the packing of layers, and quantizes unquantized layers.

Knows: MLX's packing, the names of its parts (`weight`, `scales`, `biases`, `global_scale`). Must
not know: architectures, files.

The packing is inferred from the tensors. The input width of a layer, the number of words in a row
and the number of scales uniquely determine the number of bits and the group size. The type of the
scales determines the mode. Therefore the layers of a model may differ, and a wrong config.json has
no effect. Without the width, the packing would be ambiguous: 4 bits in groups of 128 have the same
shapes as 8 bits in groups of 64.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from models.base import ModelError, dtype_name
from models.checkpoint_config import find_unsupported_method
from models.nvfp4 import make_nvfp4_layer

# the packings that MLX supports; each mode except affine has one packing
_AFFINE_BITS, _AFFINE_GROUP_SIZES = (1, 2, 3, 4, 5, 6, 8), (32, 64, 128)
_MODES: Mapping[tuple[int, int], str] = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}

# the group size for the quantization of weights (affine)
GROUP_SIZE = 64

# routers are not quantized, because the selection of experts depends on small differences
_ROUTER_NAMES = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The packing of a layer's weight. The fields are the same as in `mx.quantize`."""

    group_size: int
    bits: int
    mode: str


def check_quant_method(config: Mapping[str, Any]) -> None:
    """Raises ModelError if config.json declares a quantization method that MLX does not support."""
    if reason := find_unsupported_method(config):
        raise ModelError(reason)


def replace_quantized_layers(model: nn.Module, weights: dict[str, mx.array]) -> bool:
    """Replaces the layers for which the checkpoint has scales with quantized layers, in place.
    Returns whether there are any. Global scales in `weights` are reshaped to the shape of the
    layer. Raises ModelError."""
    paths: list[str] = []

    def packed(path: str, layer: Any) -> Any:
        if not hasattr(layer, "to_quantized") or f"{path}.scales" not in weights:
            return layer
        paths.append(path)
        packing = infer_packing(path, layer.weight.shape[-1], weights)
        scale = f"{path}.global_scale"
        if scale not in weights:
            return layer.to_quantized(**asdict(packing))
        scaled = make_nvfp4_layer(path, layer, packing.mode)
        weights[scale] = scaled.reshape_scale(weights[scale])
        return scaled

    replace_leaves(model, packed)
    return bool(paths)


def infer_packing(path: str, width: int, weights: Mapping[str, mx.array]) -> Packing:
    """Returns the packing of the layer at `path`, which has `width` inputs. Raises ModelError for a
    packing that MLX does not support."""
    weight, scales = weights.get(f"{path}.weight"), weights[f"{path}.scales"]
    if weight is None:
        raise ModelError(f"the checkpoint has {path}.scales, but no {path}.weight")
    if weight.dtype != mx.uint32:
        raise ModelError(
            f"{path}.weight has scales, but is {dtype_name(weight.dtype)} and not packed "
            "into uint32 words"
        )
    num_words, groups = weight.shape[-1], scales.shape[-1] if scales.ndim else 0
    bits, group = num_words * 32 / width, width / groups if groups else 0
    if mx.issubdtype(scales.dtype, mx.floating):
        mode = "affine" if bits in _AFFINE_BITS and group in _AFFINE_GROUP_SIZES else None
    else:
        mode = _MODES.get((int(bits), int(group))) if scales.dtype == mx.uint8 else None
    if mode is None or bits % 1 or group % 1:
        raise ModelError(
            f"{path}.weight has a packing that MLX does not support: rows of {width} inputs in "
            f"{num_words} words with {groups} scales ({dtype_name(scales.dtype)}) correspond to "
            f"{bits:g} bits in groups of {group:g}"
        )
    return Packing(group_size=int(group), bits=int(bits), mode=mode)


def quantize_model(model: nn.Module, bits: int) -> None:
    """Quantizes the unquantized weights of the model to `bits`, in groups of 64, in place. Nothing
    is evaluated. Raises ModelError if no weight can be quantized.

    It quantizes linear layers, embeddings, the head and experts whose width is a multiple of 64.
    Routers, norms, convolutions and all other layers are not changed.
    """

    paths: list[str] = []

    def packed(path: str, layer: Any) -> Any:
        if not hasattr(layer, "to_quantized") or _is_router(path):
            return layer
        if layer.weight.shape[-1] % GROUP_SIZE:
            return layer
        paths.append(path)
        return layer.to_quantized(group_size=GROUP_SIZE, bits=bits, mode="affine")

    replace_leaves(model, packed)
    if not paths:
        raise ModelError(
            f"no layer can be quantized: no weight has an input width divisible by {GROUP_SIZE}"
        )


def _is_router(path: str) -> bool:
    """Returns whether a layer is a router or its projection."""
    return any(name in _ROUTER_NAMES for name in path.split(".")[-2:])


def replace_leaves(model: nn.Module, replace: Callable[[str, Any], Any]) -> None:
    """Replaces each leaf module with `replace(path, module)`, in place."""
    is_leaf: Any = nn.Module.is_module
    leaves: Any = tree_map_with_path(replace, model.leaf_modules(), is_leaf=is_leaf)
    model.update_modules(leaves)
