"""Prepares a model for the device: selects the memory layout of the weights and the operations that
use them.

Knows: modules with weights, the device, the layers that our kernels support. Must not know:
architectures.

This module is the only connection between architectures, which use mlx.nn, and the kernels. It
evaluates nothing, so the memory requirement of a model can be computed first.

On a CPU, activations are always float32, regardless of the checkpoint's dtype. Layer caches may
store keys and values in 16 bits (`models.kv.set_kv_dtype`).

    weights           with the kernels         without them
    float32           packed panels            [in, out], where BLAS is fastest for few rows
    bfloat16, float16 packed panels            float32, then as above
    4 and 8 bits      packed panels            as they are, scales float32
    blocks of GGUF    packed panels            as they are, dequantized in each call
    all others        float32                  float32

A packed panel contains sixteen interleaved rows in their original type
(models/kernels/src/matmul_float.hpp).
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from models import kernels
from models.base import Model, ModelError
from models.kernels import block_layers, fused_blocks, layers, mamba2_op, stacked_layers
from models.layers import GatedMLP
from models.mamba2 import Mamba2Half, Mamba2Mixer
from models.quant import replace_leaves
from models.sublayers import DescribedBlock, LayerStack

# A weight is in memory twice while it is transposed. Larger weights are not transposed, so that
# loading needs little additional memory.
MAX_TRANSPOSED_BYTES = 192 << 20

_KERNEL_LAYERS: layers.KernelLayerTable = {
    **layers.KERNEL_LAYERS,
    **stacked_layers.STACKED_KERNEL_LAYERS,
    **block_layers.BLOCK_KERNEL_LAYERS,
}


def set_activation_bits(model: Model, bits: int) -> None:
    """Selects the precision of activations in products with 4- and 8-bit weights, and with bfloat16
    weights on tiles, for a model with the CPU layout. bits: one of `layers.ACTIVATION_BITS`. Raises
    ModelError if the model has no such products, unless `bits` is the default."""
    rounding = _find_rounding_layers(model)
    for layer in rounding:
        layer.set_activations(bits)
    if not rounding and bits != layers.ACTIVATION_BITS[0]:
        reason = "the CPU kernels are not in use" if kernels.ops() is None else "the model has none"
        raise ModelError(
            f"{bits}-bit activations need weights of 4 or 8 bits that the CPU kernels multiply, "
            f"but {reason}: leave out --activations, or set --quantize"
        )


def get_activation_bits(model: Model) -> int | None:
    """Returns the value of `set_activation_bits`, or None if it does not apply to the model."""
    found = [layer.activations for layer in _find_rounding_layers(model)]
    return min((bits for bits in found if bits is not None), default=None)


def _find_rounding_layers(model: Model) -> Sequence[layers.KernelLayer]:
    if not isinstance(model, nn.Module):
        return []
    modules: Sequence[tuple[str, Any]] = model.named_modules()
    kernel_layers = [module for _, module in modules if isinstance(module, layers.KernelLayer)]
    return [layer for layer in kernel_layers if layer.activations is not None]


def apply_cpu_layout(model: nn.Module) -> None:
    """Modifies the model in place. On devices other than a CPU, the model is not changed, because
    MLX has kernels for all types there."""
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
        if ops is not None and isinstance(module, Mamba2Mixer):
            _override_method(module, "mix", mamba2_op.fuse_mamba2(module, ops))
        if ops is not None and isinstance(module, Mamba2Half):
            _override_method(module, "mamba_residual", mamba2_op.fuse_half(module, ops))
        if ops is not None and isinstance(module, DescribedBlock):
            _fuse_sublayers(module, ops)
        if not isinstance(module, layers.KernelLayer | layers.KernelRMSNorm):
            _to_float32(module)
            if ops is None and isinstance(module, nn.Linear | nn.Embedding):
                _transpose(module)
    for _, module in model.named_modules():
        if ops is not None and isinstance(module, LayerStack):
            _fuse_layers(module, ops)


def to_cpu_layer(layer: Any) -> Any:
    """Converts a layer that is added to a model with the CPU layout, such as an adapter's, to this
    layout. On other devices, the layer is not changed."""
    if mx.default_device().type != mx.DeviceType.cpu:
        return layer
    ops = kernels.ops()
    if ops is not None:
        return layers.to_kernel_layer(layer, ops, _KERNEL_LAYERS)
    _to_float32(layer)
    return layer


def is_batch_invariant(model: Model) -> bool:
    """Returns whether the logits of a position are bit-identical regardless of the other rows in
    the batch, of cached positions, and of the split of the prompt into chunks. The kernels
    guarantee this for each of their operations. Layers with weights that the kernels do not support
    use MLX's operations."""
    if kernels.ops() is None or not model.batch_invariant:
        return False
    assert isinstance(model, nn.Module)
    modules: Sequence[tuple[str, Any]] = model.named_modules()
    return not any(type(module) in _KERNEL_LAYERS for _, module in modules)


def _fuse_sublayers(block: DescribedBlock, ops: Any) -> None:
    module = cast(nn.Module, block)
    _override_method(module, "attention_residual", fused_blocks.fuse_attention(block, ops))
    _override_method(module, "mlp_residual", fused_blocks.fuse_mlp(block, ops))
    _override_method(module, "input_residual", fused_blocks.fuse_input_gate(block, ops))


def _fuse_layers(stack: LayerStack, ops: Any) -> None:
    run_layers = fused_blocks.fuse_layers(stack, ops)
    _override_method(cast(nn.Module, stack), "run_layers", run_layers)


def _override_method(module: nn.Module, method: str, operation: Any) -> None:
    """Replaces a method with a fused operation, if there is one."""
    if operation is not None:
        setattr(module, method, operation)


def restore_methods(module: nn.Module) -> None:
    """Undoes `_override_method` for all methods of a module, such as a copy whose children are
    replaced: a fused operation knows only the children that the module had."""
    for name in [name for name in vars(module) if callable(getattr(type(module), name, None))]:
        delattr(module, name)


def _to_float32(module: Any) -> None:
    """Converts the module's own arrays, but not the arrays of its children."""
    for name, array in list(module.items()):
        if isinstance(array, mx.array) and array.dtype in (mx.bfloat16, mx.float16):
            module[name] = array.astype(mx.float32)


def _transpose(module: Any) -> None:
    """Transposes the weight of a module. MLX passes `x @ weight.T` to BLAS. For few rows, OpenBLAS
    is 5 to 10 % faster with a weight stored as [in, out] than with a weight stored as [out, in]
    (`make bench ARGS=weights`)."""
    if module.weight.nbytes <= MAX_TRANSPOSED_BYTES:
        module.weight = mx.contiguous(module.weight.T).T
