"""How a model's weights lie in memory, and which operations they meet, on this device.

Knows: modules of weights, the device, what our own kernels can do. Must not know: architectures.
This is the one seam between architectures, which are written in mlx.nn, and the kernels. Nothing is
evaluated here, so whether a model fits can be asked of what it will be.

On a CPU activations and layer caches are float32, whatever the checkpoint holds:

    weights           with the kernels         without them
    float32           as it is                 [in, out], where BLAS is fastest for few rows
    bfloat16, float16 as it is                 float32, then as above
    4 and 8 bits      as it is                 as it is, scales float32
    all others        float32                  float32
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from models import kernels
from models.kernels import layers, stacks
from models.layers import GatedMLP

# a weight is held twice while it is laid out: a larger one is left as it is, so that a load takes
# little more than the weights
MOST = 192 << 20


def suit_device(model: nn.Module) -> None:
    """In place. On other devices than a CPU the model stays as it is: MLX has kernels for all types
    there."""
    if mx.default_device().type != mx.DeviceType.cpu:
        return
    ops = kernels.ops()
    done: set[int] = set()

    def suited(layer: Any) -> Any:
        made = layer
        if ops is not None:
            made = stacks.twin(layers.twin(layer, ops), ops)
        if made is not layer:
            done.add(id(made))
        return made

    replace_leaves(model, suited)
    for _, module in model.named_modules():
        if ops is not None and isinstance(module, GatedMLP):
            gate, up, _ = module.names
            fused = layers.gating(module.activation, module[gate], module[up], ops)
            if fused is not None:
                setattr(module, "gated", fused)  # noqa: B010  # an operation in a method's place
        if id(module) not in done:
            _to_float32(module)
            if ops is None and isinstance(module, nn.Linear | nn.Embedding):
                _transpose(module)


def replace_leaves(model: nn.Module, replaced: Callable[[Any], Any]) -> None:
    is_leaf: Any = nn.Module.is_module
    leaves: Any = tree_map(replaced, model.leaf_modules(), is_leaf=is_leaf)
    model.update_modules(leaves)


def _to_float32(module: Any) -> None:
    """What the module itself holds; its children are modules of their own."""
    for name, array in list(module.items()):
        if isinstance(array, mx.array) and array.dtype in (mx.bfloat16, mx.float16):
            module[name] = array.astype(mx.float32)


def _transpose(module: Any) -> None:
    """MLX hands `x @ weight.T` to BLAS, and OpenBLAS takes a weight stored [in, out] 5 to 10 %
    faster than one stored [out, in] while rows are few (`make bench ARGS=weights`)."""
    if module.weight.nbytes <= MOST:
        module.weight = mx.contiguous(module.weight.T).T
