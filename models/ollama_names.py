"""Tensors as Ollama's store names them -> as MLX's layers do.

Knows: the suffixes that the store gives to the parts of a quantised tensor. Must not know: where
blobs lie, architectures.
"""

from collections.abc import Mapping

import mlx.core as mx

from models.nvfp4 import MAX_NVFP4

# behind the name X of a packed tensor; each as it is stored, and as the runner renames it
_SUFFIXES: Mapping[str, str] = {
    ".scale": "scales",
    "_scale": "scales",
    ".bias": "biases",
    "_qbias": "biases",
    ".global_scale": "global_scale",
    "_global_scale": "global_scale",
}


def to_mlx_names(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """`q_proj.weight.scale` -> `q_proj.scales`, `q_proj.weight.bias` -> `q_proj.biases` and so on,
    but only of a tensor that is packed: `q_proj.bias` is a bias like any other.

    The store's global scale is a factor of the weight; MLX's is the magnitude of the weight's
    largest entry.
    """
    # all names first: whether a bias is a quantisation's is known by the scale beside it
    packed = {name for name in weights if _is_quantized(name, weights)}
    found: dict[str, mx.array] = {}
    for name, array in weights.items():
        owner, part = _split_name(name, packed)
        if part == "global_scale":
            array = array.astype(mx.float32) * MAX_NVFP4
        found[f"{owner.removesuffix('.weight')}.{part}" if part else name] = array
    return found


def _is_quantized(name: str, weights: Mapping[str, mx.array]) -> bool:
    if weights[name].dtype != mx.uint32:
        return False
    return f"{name}.scale" in weights or f"{name}_scale" in weights


def _split_name(name: str, packed: set[str]) -> tuple[str, str | None]:
    """The packed tensor that `name` belongs to, and as what."""
    if name in packed:
        return name, "weight"
    for suffix, part in _SUFFIXES.items():
        owner = name.removesuffix(suffix)
        if owner != name and owner in packed:
            return owner, part
    return name, None
