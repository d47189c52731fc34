"""Describes the two sublayers of a decoder block, and a gated input, for operations that fuse them.

Knows: norms, linear layers, the order of operations. Must not know: kernels, architectures.

A block whose sublayers have one of these forms returns a description. Then models/cpu_layout.py may
replace the method of the sublayer with one operation, whose result is bit-identical. All residual
methods take hidden states [B, L, D] as their first argument and return them with the sublayer's
output added.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from models.layers import GatedMLP
from models.rope import NoRope, Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSublayer:
    """x + post_norm(attention(norm(x))), the method `attention_residual(x, kv, ...)`.

    attention: a module with the layers q_proj and o_proj, with k_proj and v_proj, and with q_norm
    and k_norm (norms of each head before the rotation) and `sinks`, each of which may be missing or
    None. Without v_proj, the values are the keys, before their norm and rotation. Without k_proj
    and v_proj, it attends with `AttentionCache.attend_shared`. value_norm_eps: the epsilon of the
    norm of each value, which has no weights. heads, kv_heads, scale: see `models.attention`.
    """

    norm: nn.RMSNorm
    attention: Any
    heads: int
    kv_heads: int
    scale: float
    rope: Rope | NoRope
    value_norm_eps: float | None = None
    post_norm: nn.RMSNorm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSublayer:
    """(x + post_norm(mlp(norm(x)))) * scale, the method `mlp_residual(x)`. get_scale: returns the
    scale [1], and does not keep the block alive."""

    norm: nn.RMSNorm
    mlp: GatedMLP
    post_norm: nn.RMSNorm | None = None
    get_scale: Callable[[], mx.array] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGateSublayer:
    """(x + post_norm(projection(activation(gate(x)) * input))) * scale, the method
    `input_residual(x, input)`. get_scale: see `MlpSublayer`."""

    gate: Any
    projection: Any
    activation: Callable[[mx.array], mx.array]
    post_norm: nn.RMSNorm
    get_scale: Callable[[], mx.array] | None = None


@runtime_checkable
class DescribedBlock(Protocol):
    """A block that describes its sublayers. None: the sublayer has a different form."""

    def describe_attention(self) -> AttentionSublayer | None: ...

    def describe_mlp(self) -> MlpSublayer | None: ...

    def describe_input_gate(self) -> InputGateSublayer | None: ...


@runtime_checkable
class LayerStack(Protocol):
    """Consecutive blocks, which `run_layers` calls one after another with their caches."""

    layers: Sequence[Any]

    def run_layers(self, x: mx.array, kv: Sequence[Any]) -> mx.array: ...


def has_unmodified(module: Any, base: type, method: str) -> bool:
    """Returns whether the class of the module does not override this method of its base class."""
    return getattr(type(module), method) is getattr(base, method)
