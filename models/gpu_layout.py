"""Prepares a model for a GPU: selects operations that only some GPUs have.

Knows: modules, the kernels written for GPUs. Must not know: weights, caches, the engine.

models/cpu_layout.py does the same for a CPU. Operations that are compiled on every GPU need no
selection (`models.layers.compile_on_gpu`).
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models.base import Model
from models.gated_delta_metal import find_fault, gated_delta_on_metal
from models.qwen3_next import GatedDeltaNet


def apply_gpu_layout(model: Model) -> list[str]:
    """Modifies the model in place, after it was divided among ranks. Returns why kernels are not
    used, as sentences. Evaluates small arrays to test the kernels, but no weights. On devices other
    than Metal, the model is not changed."""
    if mx.default_device().type != mx.DeviceType.gpu or not mx.metal.is_available():
        return []
    assert isinstance(model, nn.Module)
    modules: Sequence[tuple[str, Any]] = model.named_modules()
    nets = [module for _, module in modules if isinstance(module, GatedDeltaNet)]
    if not nets:
        return []
    # all layers of a model have the same sizes
    fault = find_fault(
        key_heads=nets[0].key_heads,
        value_heads=nets[0].value_heads,
        key_size=nets[0].key_size,
        value_size=nets[0].value_size,
    )
    if fault is not None:
        return [f"the Metal kernel of the gated delta rule is not used, because {fault}"]
    for net in nets:
        net.rule = gated_delta_on_metal
    return []
