"""Small building blocks that several architectures share.

Knows: tensors. Must not know: architectures, caches, checkpoints.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import kernels
from models.kernels.layers import get_activation_name
from models.sharding import MLP_SHARDS, ShardSpec

Activation = Callable[[mx.array], mx.array]


def compile_on_gpu(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Compiles a chain of element-wise operations into one kernel on a GPU. On a CPU, the
    operations run one by one, so that their results keep their bits. MLX compiles a chain when it
    is first used, once per combination of types and numbers of axes, and not again for other
    shapes."""
    compiled = mx.compile(function, shapeless=True)

    def call(*arrays: mx.array) -> mx.array:
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        return compiled(*arrays) if on_gpu else function(*arrays)

    return call


@compile_on_gpu
def quick_gelu(x: mx.array) -> mx.array:
    """An approximation of GELU with a sigmoid (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return x * mx.sigmoid(1.702 * x)


# activations by the value of `hidden_act` in config.json
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": nn.silu,
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "quick_gelu": quick_gelu,
    "relu": nn.relu,
}


def _make_glu(activation: Activation) -> Callable[..., mx.array]:
    def multiply(gate: mx.array, up: mx.array) -> mx.array:
        return activation(gate) * up

    return compile_on_gpu(multiply)


_GLUS: Mapping[Activation, Callable[..., mx.array]] = {
    activation: _make_glu(activation) for activation in ACTIVATIONS.values()
}


def split_heads(x: mx.array, heads: int) -> mx.array:
    """Converts [B, L, heads * D] to [B, heads, L, D]."""
    batch, length, _ = x.shape
    return x.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)


def merge_heads(x: mx.array) -> mx.array:
    """Converts [B, heads, L, D] to [B, L, heads * D]."""
    batch, _, length, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, -1)


def apply_glu(activation: Activation, gate: mx.array, up: mx.array) -> mx.array:
    """Returns activation(gate) * up."""
    ops = kernels.ops(gate, up)
    kind = None if ops is None else get_activation_name(activation)
    if ops is not None and kind is not None:
        return ops.glu(kind, gate, up)
    glu = _GLUS.get(activation)
    return activation(gate) * up if glu is None else glu(gate, up)


def normalize_rms(x: mx.array, eps: float) -> mx.array:
    """Returns x [..., D] divided by the root mean square of each row: a norm without weights."""
    ops = kernels.ops(x)
    return mx.fast.rms_norm(x, None, eps) if ops is None else ops.rms_norm(x, None, eps)


def softcap_logits(logits: mx.array, cap: float | None) -> mx.array:
    """Returns cap * tanh(logits / cap), or the logits if there is no cap."""
    if cap is None:
        return logits
    ops = kernels.ops(logits)
    return cap * mx.tanh(logits / cap) if ops is None else ops.softcap(logits, cap)


def router_logits(x: mx.array, weight: mx.array) -> mx.array:
    """Returns the product [..., out] of x [..., in] and weight [out, in] in float32, because
    routing depends on small differences."""
    ops = kernels.ops()
    if ops is None:
        return x.astype(mx.float32) @ weight.T.astype(mx.float32)
    return ops.Matmul(ops.repack(weight))(x.astype(mx.float32))


class QuantizedStack(nn.Module):
    """The parameters of a layer whose weight is a stack of matrices, [N, out, in], quantized in any
    of MLX's modes. layer: the unquantized layer. If it has a bias, the bias is kept."""

    def __init__(self, layer: Any, group_size: int | None, bits: int | None, mode: str) -> None:
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.weight, self.scales, *biases = mx.quantize(
            layer.weight, group_size=group_size, bits=bits, mode=mode
        )
        if biases:
            self.biases = biases[0]
        if "bias" in layer:
            self.bias = layer.bias
        self.freeze()


class CenteredNorm(nn.Module):
    """Layer normalization (Ba et al. 2016), as `nn.LayerNorm`. On a CPU, our operations compute the
    mean and the variance, because the summation order of MLX's depends on the number of rows."""

    def __init__(self, dims: int, eps: float, *, weight: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        if weight:
            self.weight = mx.ones((dims,))
        if bias:
            self.bias = mx.zeros((dims,))

    def __call__(self, x: mx.array) -> mx.array:
        ops = kernels.ops(x)
        if ops is None:
            return mx.fast.layer_norm(x, self.get("weight"), self.get("bias"), self.eps)
        size = x.shape[-1]
        mean = ops.Matmul(ops.repack(mx.full((1, size), 1 / size)))(x)
        normed = ops.rms_norm(x - mean, self.get("weight"), self.eps)
        return normed + self.bias if "bias" in self else normed


class GatedMLP(nn.Module):
    """Computes down(activation(gate(x)) * up(x)) (Shazeer 2020). projection_names: the names of
    gate, up and down."""

    shard_spec: ClassVar[ShardSpec] = MLP_SHARDS
    projection_names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    def __init__(
        self, hidden: int, inner: int, *, bias: bool = False, activation: Activation = nn.silu
    ) -> None:
        super().__init__()
        self.activation = activation
        gate, up, down = self.projection_names
        self[gate] = nn.Linear(hidden, inner, bias=bias)
        self[up] = nn.Linear(hidden, inner, bias=bias)
        self[down] = nn.Linear(inner, hidden, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self[self.projection_names[-1]](self.gate_up(x))

    def gate_up(self, x: mx.array) -> mx.array:
        """Returns the input of the down projection. On devices with a fused operation,
        models/cpu_layout.py replaces this method with it."""
        gate, up, _ = self.projection_names
        return apply_glu(self.activation, self[gate](x), self[up](x))
