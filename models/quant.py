"""Quantised weights as MLX writes them.

Knows: config.json's `quantization` object: {"group_size", "bits", "mode"} for the whole model, and
a path -> object, or path -> false, for layers that differ. Must not know: architectures.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models.base import ModelError

_PARAMETERS = ("group_size", "bits", "mode")


def quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The object that says how the checkpoint was quantised, or None for a plain one."""
    found = config.get("quantization") or config.get("quantization_config")
    if found is None:
        return None
    if "bits" not in found or "group_size" not in found:
        method = found.get("quant_method", "unknown")
        raise ModelError(
            f"weights quantised with {method!r} are not supported: convert the model for MLX"
        )
    return found


def quantize(model: nn.Module, spec: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Swap in quantised layers wherever the checkpoint has scales for them, in place."""

    def parameters(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(layer, "to_quantized") or f"{path}.scales" not in weights:
            return False
        own = spec.get(path)
        chosen = own if isinstance(own, Mapping) else spec
        return {key: chosen[key] for key in _PARAMETERS if key in chosen}

    try:
        nn.quantize(model, spec["group_size"], spec["bits"], class_predicate=parameters)
    except ValueError as error:
        raise ModelError(f"the quantization in config.json cannot be used: {error}") from error
