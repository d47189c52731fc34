"""Converts tensor names of Ollama's store to MLX's names.

Knows: the suffixes of the parts of a quantized tensor in the store. Must not know: the location of
blobs, architectures.
"""

from collections.abc import Mapping

import mlx.core as mx

from models.nvfp4 import MAX_NVFP4

# suffixes after the name of a packed tensor, in the store and as renamed by Ollama's runner
_SUFFIXES: Mapping[str, str] = {
    ".scale": "scales",
    "_scale": "scales",
    ".bias": "biases",
    "_qbias": "biases",
    ".global_scale": "global_scale",
    "_global_scale": "global_scale",
}


def to_mlx_names(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Converts `q_proj.weight.scale` to `q_proj.scales`, `q_proj.weight.bias` to `q_proj.biases`,
    and so on. Only the parts of packed tensors are renamed, because `q_proj.bias` is an ordinary
    bias.

    The global scale in the store is a factor of the weight. MLX's global scale is the magnitude of
    the weight's largest entry.
    """
    # find the packed tensors first: a bias with a scale next to it belongs to a quantization
    packed = {name for name in weights if _is_quantized(name, weights)}
    renamed: dict[str, mx.array] = {}
    for name, array in weights.items():
        owner, part = _split_name(name, packed)
        if part == "global_scale":
            array = array.astype(mx.float32) * MAX_NVFP4
        renamed[f"{owner.removesuffix('.weight')}.{part}" if part else name] = array
    return renamed


def _is_quantized(name: str, weights: Mapping[str, mx.array]) -> bool:
    if weights[name].dtype != mx.uint32:
        return False
    return f"{name}.scale" in weights or f"{name}_scale" in weights


def _split_name(name: str, packed: set[str]) -> tuple[str, str | None]:
    """Returns (the packed tensor that `name` belongs to, its part), or (name, None) for other
    tensors."""
    if name in packed:
        return name, "weight"
    for suffix, part in _SUFFIXES.items():
        owner = name.removesuffix(suffix)
        if owner != name and owner in packed:
            return owner, part
    return name, None
