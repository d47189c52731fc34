"""mlx.nn layers that use mlxrunner's own operations.

Knows: the layers of mlx.nn, the operations of `_kernels`. Must not know: architectures,
checkpoints.

A kernel layer is an instance of a subclass of the layer that it replaces. It contains the same
arrays under the same names, as packed panels. Nothing is evaluated. `ops` is the result of
`models.kernels.ops`. Matrices keep their stored type. All other arrays and the results are float32.
models/kernels/stacked_layers.py contains stacks of matrices.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

if TYPE_CHECKING:
    from models.kernels._kernels import Matmul

_SUPPORTED_BITS, _SUPPORTED_GROUP_SIZES = (4, 8), (32, 64, 128)
_PARAMETERS = ("weight", "scales", "biases", "bias")
_FLOAT_DTYPES = (mx.float32, mx.bfloat16, mx.float16)


# The number of bits to which a product with 4- or 8-bit weights, or with bfloat16 weights on tiles,
# rounds its input. 24 bits are as precise as float32.
ACTIVATION_BITS = (24, 16, 8)
_EXACT_BITS = ACTIVATION_BITS[0]
_MIN_BF16_BITS = 16


class KernelLayer(nn.Module):
    def __init__(self, layer: Any, ops: Any) -> None:
        nn.Module.__init__(self)
        self._ops = ops
        self._activations = _EXACT_BITS
        copy_parameters(self, layer, ops)
        self.matmul = make_matmul(self, ops)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, and repacks it if it is a parameter. Classes of other libraries
        replace the weights of their layers."""
        if name not in _PARAMETERS:
            super().__setattr__(name, value)
            return
        super().__setattr__(name, to_kernel_layout(self, name, value, self._ops))
        # last, because mlx.nn also reads the attribute
        self._drop_matmul()

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute. Accessed as attributes, matrices have their usual row order, as
        expected by users of a layer. Accessed as items (`layer[name]`), they have the packed
        layout."""
        value: Any = super().__getattr__(name)
        if name not in _PARAMETERS or value.ndim < 2 or name == "bias":
            return value
        if name != "weight":
            return self._ops.repack_scales(value, undo=True)
        return self._ops.repack(value, _bits(self), undo=True)

    # not a property, because decode steps read it several times per layer
    @cached_property
    def matmul(self) -> "Matmul":
        """The matmul operation with the current arrays."""
        return make_matmul(self, self._ops)

    def _drop_matmul(self) -> None:
        vars(self).pop("matmul", None)

    @property
    def activations(self) -> int | None:
        """One of ACTIVATION_BITS, or None if products with the weights do not round their input."""
        if "scales" in self or _block_type(self) is not None:
            return self._activations
        on_tiles = self["weight"].dtype == mx.bfloat16 and not self._ops.why_no_bf16_tiles()
        return max(self._activations, _MIN_BF16_BITS) if on_tiles else None

    def set_activations(self, bits: int) -> None:
        self._activations = bits
        self._drop_matmul()


class KernelMatrix(KernelLayer):
    """The common part of linear layers."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.matmul(x)


class KernelLinear(KernelMatrix, nn.Linear):
    pass


class KernelQuantizedLinear(KernelMatrix, nn.QuantizedLinear):
    pass


class KernelTable(KernelLayer):
    """The common part of embeddings."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.matmul.dequantize_rows(x)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.matmul(x)


class KernelEmbedding(KernelTable, nn.Embedding):
    pass


class KernelQuantizedEmbedding(KernelTable, nn.QuantizedEmbedding):
    pass


class KernelExperts(KernelLayer):
    """The common part of experts, whose rows `gather` sorts itself."""

    prefers_sorted = False

    def __call__(
        self, x: mx.array, expert_ids: mx.array, *, sorted_indices: bool = False
    ) -> mx.array:
        return self.matmul.gather(x, expert_ids)


class KernelRMSNorm(nn.RMSNorm):
    def __init__(self, layer: nn.RMSNorm, ops: Any) -> None:
        nn.Module.__init__(self)
        copy_parameters(self, layer, ops)
        self.weight = self.weight.astype(mx.float32)
        self._norm = ops.rms_norm

    def __call__(self, x: mx.array) -> mx.array:
        # an embedding in an unsupported packing returns bfloat16
        return self._norm(x.astype(mx.float32), self.weight, self.eps)


# the names of the activation functions in the kernels
_ACTIVATION_NAMES: Mapping[Any, str] = {
    nn.silu: "silu",
    nn.gelu: "gelu",
    nn.gelu_approx: "gelu_tanh",
    nn.relu: "relu",
}


def get_activation_name(activation: Any) -> str | None:
    """Returns the name of the activation for `ops.glu`, or None if it is not supported."""
    return _ACTIVATION_NAMES.get(activation)


def fuse_gate_up(
    activation: Any, gate: Any, up: Any, ops: Any
) -> Callable[[mx.array], mx.array] | None:
    """Returns one operation for activation(gate(x)) * up(x), for two kernel layers. Returns None if
    it is not supported."""
    kind = get_activation_name(activation)
    if kind is None or not isinstance(gate, KernelLayer) or not isinstance(up, KernelLayer):
        return None
    if not gate.matmul.has_same_format(up.matmul):
        return None
    return lambda x: ops.gate_up(kind, gate.matmul, up.matmul, x)


def is_unquantized(layer: Any) -> bool:
    return layer.weight.dtype in _FLOAT_DTYPES


def is_supported_quantization(layer: Any) -> bool:
    """Returns whether the kernels support the packing of the layer."""
    return (
        layer.mode == "affine"
        and layer.bits in _SUPPORTED_BITS
        and layer.group_size in _SUPPORTED_GROUP_SIZES
    )


# the exact class of a layer -> (the class of its kernel layer, a predicate of the supported layers)
KernelLayerTable = Mapping[type, tuple[Callable[[Any, Any], Any], Callable[[Any], bool]]]

KERNEL_LAYERS: KernelLayerTable = {
    nn.RMSNorm: (KernelRMSNorm, lambda _: True),
    nn.Linear: (KernelLinear, is_unquantized),
    nn.Embedding: (KernelEmbedding, is_unquantized),
    nn.QuantizedLinear: (KernelQuantizedLinear, is_supported_quantization),
    nn.QuantizedEmbedding: (KernelQuantizedEmbedding, is_supported_quantization),
}


def to_kernel_layer(layer: Any, ops: Any, table: KernelLayerTable = KERNEL_LAYERS) -> Any:
    """Returns the kernel layer for a layer, or the layer itself if there is none."""
    made, suits = table.get(type(layer), (None, None))
    return layer if made is None or suits is None or not suits(layer) else made(layer, ops)


def copy_parameters(target: Any, layer: Any, ops: Any) -> None:
    """Copies all attributes of the layer, and converts arrays with `to_kernel_layout`."""
    for name, value in vars(layer).items():
        if name not in ("_no_grad", "_training"):
            setattr(target, name, value)
    for name, array in layer.items():
        target[name] = to_kernel_layout(layer, name, array, ops)
    target.freeze()
    target.eval()


def to_kernel_layout(layer: Any, name: str, array: mx.array, ops: Any) -> mx.array:
    """Returns a parameter in the type and memory layout that the kernels use."""
    if name == "bias":
        return mx.contiguous(array.astype(mx.float32))
    if (type_id := _block_type(layer)) is not None:
        return ops.repack_blocks(array, type_id)
    if array.ndim < 2:
        return array
    return ops.repack(array, _bits(layer)) if name == "weight" else ops.repack_scales(array)


def _block_type(layer: Any) -> int | None:
    """Returns the type of the blocks of a layer with blocks (models/gguf/layers.py)."""
    return vars(layer).get("type_id")


def _bits(layer: Any) -> int:
    """Returns the bits of a packed weight, or 0 if the weight is not packed."""
    return layer.bits if "scales" in layer else 0


def make_matmul(layer: KernelLayer, ops: Any) -> "Matmul":
    """Returns the matmul operation with a kernel layer's parameters."""
    bias = layer.get("bias")
    if (type_id := _block_type(layer)) is not None:
        return ops.Matmul.from_blocks(
            layer["weight"],
            type_id=type_id,
            outputs=layer.outputs,
            inputs=layer.inputs,
            bias=bias,
            activations=layer.activations,
        )
    if "scales" not in layer:
        return ops.Matmul(layer["weight"], bias=bias, activations=layer.activations or _EXACT_BITS)
    return ops.Matmul(
        layer["weight"],
        layer["scales"],
        layer["biases"],
        bias,
        group_size=layer.group_size,
        bits=layer.bits,
        activations=layer.activations,
    )
