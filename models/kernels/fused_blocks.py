"""Fuses each half of a decoder block into one operation, for decode steps.

Knows: the pre-norm block (models/prenorm.py), grouped-query attention (models/attention.py), the
gated MLP, their kernel layers, the operations of `_kernels`. Must not know: architectures, types of
caches. Subclasses that override one of their methods are not fused.

For a small model, the dispatch of an MLX operation takes as long as the operation itself. A block
consists of about 21 operations, which are dispatched again for each token.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_, itemgetter
from typing import Any
from weakref import ref

import mlx.core as mx

from models.attention import GroupedQueryAttention
from models.kernels import layers
from models.kernels.in_place_attention import write_in_place
from models.kv import AttentionCache
from models.layers import GatedMLP
from models.prenorm import PreNormBlock
from models.rope import Rope

# The maximum number of sequences in a fused step. With more sequences, the dispatch overhead is
# negligible, and the intermediate results grow, which MLX's memory accounting does not include.
MAX_FUSED_ROWS = 64

_GET_MATMUL, _GET_WEIGHT = attrgetter("matmul"), itemgetter("weight")

AttentionResidual = Callable[[mx.array, AttentionCache], mx.array]
MlpResidual = Callable[[mx.array], mx.array]


def fuse_attention(block: PreNormBlock, ops: Any) -> AttentionResidual | None:
    """Returns the replacement of `block.attention_residual`, or None if it cannot be fused."""
    if not _has_unmodified(block, PreNormBlock, "attention_residual"):
        return None
    attention: Any = block.self_attn
    if not _has_unmodified(attention, GroupedQueryAttention, "__call__"):
        return None
    linears = [attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    head_norms = (attention.q_norm, attention.k_norm)
    norms = [block.input_layernorm, *(norm for norm in head_norms if norm is not None)]
    if not _are_kernel_layers(linears, norms):
        return None

    def make(*parts: Any) -> Any:
        """Creates the operation. parts: four matmuls, the weights of the norms, and the sinks."""
        matmuls, weights, sinks = parts[:4], parts[4:-1], parts[-1]
        norm, *per_head = zip(weights, (norm.eps for norm in norms), strict=True)
        optional: Any = dict(zip(("q_norm", "k_norm"), per_head, strict=False))
        return ops.AttentionBlock(
            norm,
            *matmuls,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            scale=attention.scale,
            sinks=sinks,
            **optional,
            **_rope_arguments(attention.rope),
        )

    fused = _CachedOp(lambda: [*_op_parts(linears, norms), attention.get("sinks")], make)
    # the shape for `allocate_slots`, which is never evaluated
    heads = attention.kv_heads
    new_keys = mx.zeros((1, heads, 1, linears[1].weight.shape[0] // heads))
    # a weak reference, so that a dropped model is freed immediately
    block_ref = ref(block)

    def attention_residual(x: mx.array, kv: AttentionCache) -> mx.array:
        caches = kv.in_place_caches
        rows, length, _ = x.shape
        if length > 1 or rows > MAX_FUSED_ROWS or rows != len(caches) or x.dtype != mx.float32:
            return PreNormBlock.attention_residual(_dereference(block_ref), x, kv)
        return write_in_place(caches, new_keys, new_keys, partial(fused(), x))

    return attention_residual


def fuse_mlp(block: PreNormBlock, ops: Any) -> MlpResidual | None:
    """Returns the replacement of `block.mlp_residual`, or None if it cannot be fused."""
    mlp: Any = block.mlp
    if not _has_unmodified(block, PreNormBlock, "mlp_residual") or not _has_unmodified(
        mlp, GatedMLP, "__call__", "gate_up"
    ):
        return None
    linears, norms = [mlp[name] for name in mlp.projection_names], [block.post_attention_layernorm]
    kind = layers.get_activation_name(mlp.activation)
    if kind is None or not _are_kernel_layers(linears, norms):
        return None
    if not linears[0].matmul.has_same_format(linears[1].matmul):
        return None

    def make(gate: Any, up: Any, down: Any, weight: mx.array) -> Any:
        return ops.MlpBlock((weight, norms[0].eps), kind, gate, up, down)

    fused = _CachedOp(lambda: _op_parts(linears, norms), make)
    block_ref = ref(block)

    def mlp_residual(x: mx.array) -> mx.array:
        rows, length, _ = x.shape
        if length > 1 or rows > MAX_FUSED_ROWS or x.dtype != mx.float32:
            return PreNormBlock.mlp_residual(_dereference(block_ref), x)
        return fused()(x)

    return mlp_residual


class _CachedOp:
    """Returns make(*get_parts()), which is rebuilt whenever one of the parts, such as a weight, was
    replaced."""

    def __init__(self, get_parts: Callable[[], Sequence[Any]], make: Callable[..., Any]) -> None:
        self._get_parts, self._make = get_parts, make
        self._parts: Sequence[Any] | None = None
        self._op: Any = None

    def __call__(self) -> Any:
        parts = self._get_parts()
        if self._parts is None or not all(map(is_, parts, self._parts)):
            self._op, self._parts = self._make(*parts), parts
        return self._op


def _has_unmodified(module: Any, base: type, *methods: str) -> bool:
    """Returns whether the module is a `base` and does not override these methods."""
    return isinstance(module, base) and all(
        getattr(type(module), name) is getattr(base, name) for name in methods
    )


def _are_kernel_layers(linears: Sequence[Any], norms: Sequence[Any]) -> bool:
    linear = layers.KernelLinear | layers.KernelQuantizedLinear
    return all(isinstance(layer, linear) for layer in linears) and all(
        isinstance(layer, layers.KernelRMSNorm) for layer in norms
    )


def _op_parts(linears: Sequence[Any], norms: Sequence[Any]) -> list[Any]:
    """Returns the arguments of a fused operation, taken from kernel layers."""
    return [*map(_GET_MATMUL, linears), *map(_GET_WEIGHT, norms)]


def _rope_arguments(rope: Any) -> dict[str, Any]:
    if not isinstance(rope, Rope):
        return {}
    return {
        "periods": rope.periods,
        "dims": rope.dims,
        "traditional": rope.traditional,
        "magnitude": rope.magnitude,
    }


def _dereference(block_ref: ref[PreNormBlock]) -> PreNormBlock:
    """Returns the block, which is alive because it is the caller."""
    block = block_ref()
    assert block is not None
    return block
