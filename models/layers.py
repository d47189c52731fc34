"""Small parts that several architectures are made of.

Knows: tensors. Must not know: architectures, caches, checkpoints.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from models.sharding import INNER, Cut

Activation = Callable[[mx.array], mx.array]

# by the names that `hidden_act` in config.json goes by
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": nn.silu,
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
}


def split_heads(x: mx.array, heads: int) -> mx.array:
    """[B, L, heads * D] -> [B, heads, L, D]."""
    batch, length, _ = x.shape
    return x.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)


def merge_heads(x: mx.array) -> mx.array:
    """[B, heads, L, D] -> [B, L, heads * D]."""
    batch, _, length, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, -1)


class PackedStack(nn.Module):
    """The parameters of a layer whose weight is a stack of matrices, [N, out, in], quantised in any
    of MLX's modes. plain: the layer as it was; its bias, if any, stays."""

    def __init__(self, plain: Any, group_size: int | None, bits: int | None, mode: str) -> None:
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.weight, self.scales, *biases = mx.quantize(
            plain.weight, group_size=group_size, bits=bits, mode=mode
        )
        if biases:
            self.biases = biases[0]
        if "bias" in plain:
            self.bias = plain.bias
        self.freeze()


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    cut: ClassVar[Cut] = INNER

    def __init__(
        self, hidden: int, inner: int, *, bias: bool = False, activation: Activation = nn.silu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
