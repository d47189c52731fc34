"""In which order a weight lies in memory.

Knows: modules of weights, the device. Must not know: what they compute. A weight keeps its shape
and its name; only its strides change.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

# a weight is held twice while it is laid out: a larger one is left as it is, so that a load takes
# little more than the weights
MOST = 192 << 20


def suit_device(model: nn.Module) -> None:
    """Lay float32 weights that rows are multiplied with out as the product reads them.

    On a CPU, MLX hands `x @ weight.T` to BLAS, and OpenBLAS takes a weight stored [in, out] 5 to
    10 % faster than one stored [out, in] while rows are few, which is when decoding (`make bench
    ARGS=weights`). Other types do not go through BLAS, other devices have kernels of their own.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        return
    for _, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        if module.weight.dtype == mx.float32 and module.weight.nbytes <= MOST:
            _transpose(module)


def _transpose(module: Any) -> None:
    stored = mx.contiguous(module.weight.T)
    # evaluated one by one, so that no more than one weight is held twice
    mx.eval(stored)
    module.weight = stored.T
    mx.eval(module.weight)
