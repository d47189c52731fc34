"""Fuses each half of a decoder block into one operation, for decode steps.

Knows: the descriptions of sublayers (models/sublayers.py), kernel layers, the operations of
`_kernels`. Must not know: architectures, types of caches.

For a small model, the dispatch of an MLX operation takes as long as the operation itself. A block
consists of about 21 operations, which are dispatched again for each token.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_, itemgetter
from typing import Any
from weakref import ref

import mlx.core as mx

from models.kernels import layers
from models.kernels.block_layers import KernelGgufLinear
from models.kernels.in_place_attention import read_in_place, write_in_place
from models.kv import AttentionCache
from models.rope import Rope
from models.sublayers import DescribedBlock

# The maximum number of sequences in a fused step. With more sequences, the dispatch overhead is
# negligible, and the intermediate results grow, which MLX's memory accounting does not include.
MAX_FUSED_ROWS = 64

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

_GET_MATMUL, _GET_WEIGHT = attrgetter("matmul"), itemgetter("weight")

Residual = Callable[..., mx.array]


def fuse_attention(block: DescribedBlock, ops: Any) -> Residual | None:
    """Returns the replacement of `block.attention_residual`, or None if it cannot be fused."""
    parts = block.describe_attention()
    if parts is None:
        return None
    attention = parts.attention
    present = [name for name in _PROJECTIONS if attention.get(name) is not None]
    linears = [attention[name] for name in present]
    norms = {"norm": parts.norm}
    for name, norm in (
        ("q_norm", attention.get("q_norm")),
        ("k_norm", attention.get("k_norm")),
        ("post_norm", parts.post_norm),
    ):
        if norm is not None:
            norms[name] = norm
    if not are_kernel_layers(linears, list(norms.values())):
        return None
    heads, kv_heads, scale = parts.heads, parts.kv_heads, parts.scale
    is_shared = "k_proj" not in present
    key_dim = linears[0]["weight"].shape[0] // heads
    values = attention.get("v_proj")
    value_dim = key_dim if values is None else values["weight"].shape[0] // kv_heads
    others = _rope_arguments(parts.rope)
    if parts.value_norm_eps is not None and not is_shared:
        others["v_norm"] = (mx.ones((value_dim,)), parts.value_norm_eps)

    def make(*given: Any) -> Any:
        """Creates the operation. given: the matmuls, the weights of the norms, and the sinks."""
        matmuls: Any = {name[0]: None for name in _PROJECTIONS}
        matmuls |= zip((name[0] for name in present), given, strict=False)
        weights = given[len(present) : -1]
        pairs = {
            name: (weight, norm.eps)
            for (name, norm), weight in zip(norms.items(), weights, strict=True)
        }
        return ops.AttentionBlock(
            **pairs,
            **matmuls,
            heads=heads,
            kv_heads=kv_heads,
            scale=scale,
            sinks=given[-1],
            **others,
        )

    kept_norms = list(norms.values())
    fused = CachedOp(lambda: [*op_parts(linears, kept_norms), attention.get("sinks")], make)
    # the shapes for `allocate_slots`, which are never evaluated
    new_keys = mx.zeros((1, kv_heads, 1, key_dim))
    new_values = mx.zeros((1, kv_heads, 1, value_dim))
    # a weak reference, so that a dropped model is freed immediately
    block_ref = ref(block)

    def attention_residual(x: mx.array, kv: AttentionCache, *rest: Any) -> mx.array:
        caches = kv.in_place_caches
        rows, length, _ = x.shape
        if length > 1 or rows > MAX_FUSED_ROWS or rows != len(caches) or x.dtype != mx.float32:
            original = _dereference(block_ref)
            return type(original).attention_residual(original, x, kv, *rest)
        deltas = [cache.position_delta for cache in caches]
        if is_shared:
            return read_in_place(caches, partial(fused().attend_shared, x, deltas))
        return write_in_place(caches, new_keys, new_values, partial(fused(), x, deltas))

    return attention_residual


def fuse_mlp(block: DescribedBlock, ops: Any) -> Residual | None:
    """Returns the replacement of `block.mlp_residual`, or None if it cannot be fused."""
    parts = block.describe_mlp()
    if parts is None:
        return None
    mlp: Any = parts.mlp
    linears = [mlp[name] for name in mlp.projection_names]
    norms = [parts.norm, *([] if parts.post_norm is None else [parts.post_norm])]
    kind = layers.get_activation_name(mlp.activation)
    if kind is None or not are_kernel_layers(linears, norms):
        return None
    if not linears[0].matmul.has_same_format(linears[1].matmul):
        return None

    def make(gate: Any, up: Any, down: Any, *rest: Any) -> Any:
        (norm, *after), scale = zip(rest[:-1], (n.eps for n in norms), strict=True), rest[-1]
        post_norm = after[0] if after else None
        return ops.MlpBlock(norm, kind, gate, up, down, post_norm=post_norm, scale=scale)

    get_scale = parts.get_scale or _no_scale
    fused = CachedOp(lambda: [*op_parts(linears, norms), get_scale()], make)
    block_ref = ref(block)

    def mlp_residual(x: mx.array) -> mx.array:
        rows, length, _ = x.shape
        if length > 1 or rows > MAX_FUSED_ROWS or x.dtype != mx.float32:
            original = _dereference(block_ref)
            return type(original).mlp_residual(original, x)
        return fused()(x)

    return mlp_residual


def fuse_input_gate(block: DescribedBlock, ops: Any) -> Residual | None:
    """Returns the replacement of `block.input_residual`, or None if it cannot be fused."""
    parts = block.describe_input_gate()
    if parts is None:
        return None
    linears, norms = [parts.gate, parts.projection], [parts.post_norm]
    kind = layers.get_activation_name(parts.activation)
    if kind is None or not are_kernel_layers(linears, norms):
        return None

    def make(gate: Any, projection: Any, weight: mx.array, scale: mx.array | None) -> Any:
        post_norm = (weight, norms[0].eps)
        return ops.InputGateBlock(kind, gate, projection, post_norm, scale=scale)

    get_scale = parts.get_scale or _no_scale
    fused = CachedOp(lambda: [*op_parts(linears, norms), get_scale()], make)
    block_ref = ref(block)

    def input_residual(x: mx.array, given: mx.array) -> mx.array:
        rows, length, _ = x.shape
        if length > 1 or rows > MAX_FUSED_ROWS or x.dtype != mx.float32:
            original = _dereference(block_ref)
            return type(original).input_residual(original, x, given)
        return fused()(x, given)

    return input_residual


def _no_scale() -> None:
    return None


class CachedOp:
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


def are_kernel_layers(linears: Sequence[Any], norms: Sequence[Any]) -> bool:
    """Returns whether a fused operation can take these layers."""
    linear = layers.KernelLinear | layers.KernelQuantizedLinear | KernelGgufLinear
    return all(isinstance(layer, linear) for layer in linears) and all(
        isinstance(layer, layers.KernelRMSNorm) for layer in norms
    )


def op_parts(linears: Sequence[Any], norms: Sequence[Any]) -> list[Any]:
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


def _dereference(block_ref: ref[Any]) -> Any:
    """Returns the block, which is alive because it is the caller."""
    block = block_ref()
    assert block is not None
    return block
