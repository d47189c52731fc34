"""How a model's weights lie in memory, and which operations they meet, on this device.

Knows: modules of weights, the device, what our own kernels can do. Must not know: architectures.
This is the one seam between architectures, which are written in mlx.nn, and the kernels. Nothing is
evaluated here, so whether a model fits can be asked of what it will be.

On a CPU activations and layer caches are float32, whatever the checkpoint holds:

    weights           with the kernels         without them
    float32           in strips                [in, out], where BLAS is fastest for few rows
    bfloat16, float16 in strips                float32, then as above
    4 and 8 bits      in strips                as it is, scales float32
    all others        float32                  float32

Strips are sixteen rows side by side, in the type that they had (models/kernels/src/matmul_float.hpp).
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models import kernels
from models.base import Model
from models.kernels import fused_blocks, layers, stacked_layers
from models.layers import GatedMLP
from models.prenorm import PreNormBlock
from models.quant import replace_leaves

# a weight is held twice while it is laid out: a larger one is left as it is, so that a load takes
# little more than the weights
MAX_TRANSPOSED_BYTES = 192 << 20

_KERNEL_LAYERS: layers.KernelLayerTable = {
    **layers.KERNEL_LAYERS,
    **stacked_layers.STACKED_KERNEL_LAYERS,
}


def apply_cpu_layout(model: nn.Module) -> None:
    """In place. On other devices than a CPU the model stays as it is: MLX has kernels for all types
    there."""
    if mx.default_device().type != mx.DeviceType.cpu:
        return
    ops = kernels.ops()
    if ops is not None:
        replace_leaves(model, lambda _, layer: layers.to_kernel_layer(layer, ops, _KERNEL_LAYERS))
    for _, module in model.named_modules():
        if ops is not None and isinstance(module, GatedMLP):
            gate, up, _ = module.projection_names
            _override_method(
                module,
                "gate_up",
                layers.fuse_gate_up(module.activation, module[gate], module[up], ops),
            )
        if ops is not None and isinstance(module, PreNormBlock):
            _override_method(module, "attention_residual", fused_blocks.fuse_attention(module, ops))
            _override_method(module, "mlp_residual", fused_blocks.fuse_mlp(module, ops))
        if not isinstance(module, layers.KernelLayer | layers.KernelRMSNorm):
            _to_float32(module)
            if ops is None and isinstance(module, nn.Linear | nn.Embedding):
                _transpose(module)


def is_batch_invariant(model: Model) -> bool:
    """Whether a position's logits depend on nothing but its sequence, to the bit: not on who else
    is in the batch, nor on what was cached, nor on how the prompt was cut. The kernels promise it
    of each of their operations; a layer whose weights they cannot read computes with MLX's own."""
    assert isinstance(model, nn.Module)
    modules: Sequence[tuple[str, Any]] = model.named_modules()
    return (
        kernels.ops() is not None
        and model.batch_invariant
        and not any(type(module) in _KERNEL_LAYERS for _, module in modules)
    )


def _override_method(module: nn.Module, method: str, operation: Any) -> None:
    """One operation in the place of a method, where there is one."""
    if operation is not None:
        setattr(module, method, operation)


def _to_float32(module: Any) -> None:
    """What the module itself holds; its children are modules of their own."""
    for name, array in list(module.items()):
        if isinstance(array, mx.array) and array.dtype in (mx.bfloat16, mx.float16):
            module[name] = array.astype(mx.float32)


def _transpose(module: Any) -> None:
    """MLX hands `x @ weight.T` to BLAS, and OpenBLAS takes a weight stored [in, out] 5 to 10 %
    faster than one stored [out, in] while rows are few (`make bench ARGS=weights`)."""
    if module.weight.nbytes <= MAX_TRANSPOSED_BYTES:
        module.weight = mx.contiguous(module.weight.T).T
