"""Fuses each half of a decoder block into one operation, for decode steps, and consecutive blocks
for a single row.

Knows: the descriptions of sublayers (models/sublayers.py), the order of the halves in a block,
kernel layers, the operations of `_kernels`. Must not know: architectures, types of caches.

For a small model, the dispatch of an MLX operation takes as long as the operation itself. A block
consists of about 21 operations, which are dispatched again for each token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter, is_, itemgetter
from typing import Any
from weakref import ref

import mlx.core as mx

from models.kernels import layers
from models.kernels.block_layers import KernelGgufLinear
from models.kernels.in_place_attention import (
    InPlaceCache,
    SlotMapping,
    read_in_place,
    write_in_place,
)
from models.kv import AttentionCache
from models.prenorm import PreNormBlock
from models.rope import Rope
from models.sublayers import DescribedBlock, LayerStack, has_unmodified

# The maximum number of sequences in a fused step. With more sequences, the dispatch overhead is
# negligible, and the intermediate results grow, which MLX's memory accounting does not include.
MAX_FUSED_ROWS = 64

# The maximum number of blocks in one operation. Each buffer of keys or values is an output, and MLX
# keeps a list of all other outputs in each of them.
MAX_FUSED_BLOCKS = 8

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

_GET_MATMUL, _GET_WEIGHT = attrgetter("matmul"), itemgetter("weight")
_GET_HALVES = attrgetter("attention_residual", "mlp_residual")

Residual = Callable[..., mx.array]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpParts:
    """The parts of a model of which an operation is made. others: functions that return arrays."""

    linears: Sequence[Any]
    norms: Sequence[Any]
    others: Sequence[Callable[[], mx.array]] = ()

    def read(self) -> list[Any]:
        """Returns the matmuls, the weights of the norms, and the other arrays."""
        return [
            *map(_GET_MATMUL, self.linears),
            *map(_GET_WEIGHT, self.norms),
            *(get() for get in self.others),
        ]


class CachedOp:
    """Returns make(*parts), which is rebuilt whenever one of the parts, such as a weight, was
    replaced."""

    def __init__(self, parts: OpParts, make: Callable[..., Any]) -> None:
        self.parts = parts
        self._make = make
        self._current: Sequence[Any] = ()
        self._op: Any = None

    def __call__(self) -> Any:
        current = self.parts.read()
        if self._op is None or not all(map(is_, current, self._current)):
            self._op, self._current = self._make(*current), current
        return self._op


def fuse_attention(block: DescribedBlock, ops: Any) -> "FusedAttention | None":
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
    is_shared, has_sinks = "k_proj" not in present, attention.get("sinks") is not None
    key_dim = linears[0]["weight"].shape[0] // heads
    values = attention.get("v_proj")
    value_dim = key_dim if values is None else values["weight"].shape[0] // kv_heads
    others = _rope_arguments(parts.rope)
    if parts.value_norm_eps is not None and not is_shared:
        others["v_norm"] = (mx.ones((value_dim,)), parts.value_norm_eps)

    def make(*given: Any) -> Any:
        """Creates the operation. given: the matmuls, the weights of the norms, and the sinks, if
        there are any."""
        matmuls: Any = {name[0]: None for name in _PROJECTIONS}
        matmuls |= zip((name[0] for name in present), given, strict=False)
        weights = given[len(present) : len(present) + len(norms)]
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
            sinks=given[-1] if has_sinks else None,
            **others,
        )

    op_parts = OpParts(
        linears=linears,
        norms=list(norms.values()),
        others=[lambda: attention["sinks"]] if has_sinks else [],
    )
    return FusedAttention(
        block,
        CachedOp(op_parts, make),
        # the shapes for `allocate_slots`, which are never evaluated
        new_keys=mx.zeros((1, kv_heads, 1, key_dim)),
        new_values=mx.zeros((1, kv_heads, 1, value_dim)),
        is_shared=is_shared,
    )


class FusedAttention:
    """The replacement of `attention_residual`. new_keys, new_values: see
    `InPlaceCache.allocate_slots`. is_shared: whether it attends with the keys of another layer."""

    def __init__(
        self,
        block: DescribedBlock,
        op: CachedOp,
        *,
        new_keys: mx.array,
        new_values: mx.array,
        is_shared: bool,
    ) -> None:
        # a weak reference, so that a dropped model is freed immediately
        self._block = ref(block)
        self.op = op
        self.new_keys, self.new_values = new_keys, new_values
        self.is_shared = is_shared

    def __call__(self, x: mx.array, kv: AttentionCache, *rest: Any) -> mx.array:
        caches = kv.in_place_caches
        rows, length, _ = x.shape
        if length > 1 or rows > MAX_FUSED_ROWS or rows != len(caches) or x.dtype != mx.float32:
            original = _dereference(self._block)
            return type(original).attention_residual(original, x, kv, *rest)
        deltas = [cache.position_delta for cache in caches]
        if self.is_shared:
            return read_in_place(caches, partial(self.op().attend_shared, x, deltas))
        return write_in_place(caches, self.new_keys, self.new_values, partial(self.op(), x, deltas))


def fuse_mlp(block: DescribedBlock, ops: Any) -> "FusedMlp | None":
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
        """rest: the weights of the norms, and the scale, if there is one."""
        norm, *after = zip(rest, (n.eps for n in norms), strict=False)
        post_norm = after[0] if after else None
        scale = rest[-1] if parts.get_scale else None
        return ops.MlpBlock(norm, kind, gate, up, down, post_norm=post_norm, scale=scale)

    others = [parts.get_scale] if parts.get_scale else []
    return FusedMlp(block, CachedOp(OpParts(linears=linears, norms=norms, others=others), make))


class FusedMlp:
    """The replacement of `mlp_residual`."""

    def __init__(self, block: DescribedBlock, op: CachedOp) -> None:
        self._block = ref(block)
        self.op = op

    def __call__(self, x: mx.array) -> mx.array:
        rows, length, _ = x.shape
        if length > 1 or rows > MAX_FUSED_ROWS or x.dtype != mx.float32:
            original = _dereference(self._block)
            return type(original).mlp_residual(original, x)
        return self.op()(x)


def fuse_input_gate(block: DescribedBlock, ops: Any) -> Residual | None:
    """Returns the replacement of `block.input_residual`, or None if it cannot be fused."""
    parts = block.describe_input_gate()
    if parts is None:
        return None
    linears, norms = [parts.gate, parts.projection], [parts.post_norm]
    kind = layers.get_activation_name(parts.activation)
    if kind is None or not are_kernel_layers(linears, norms):
        return None

    def make(gate: Any, projection: Any, weight: mx.array, scale: mx.array | None = None) -> Any:
        post_norm = (weight, norms[0].eps)
        return ops.InputGateBlock(kind, gate, projection, post_norm, scale=scale)

    others = [parts.get_scale] if parts.get_scale else []
    fused = CachedOp(OpParts(linears=linears, norms=norms, others=others), make)
    block_ref = ref(block)

    def input_residual(x: mx.array, given: mx.array) -> mx.array:
        rows, length, _ = x.shape
        if length > 1 or rows > MAX_FUSED_ROWS or x.dtype != mx.float32:
            original = _dereference(block_ref)
            return type(original).input_residual(original, x, given)
        return fused()(x, given)

    return input_residual


def fuse_layers(stack: LayerStack, ops: Any) -> "FusedLayers | None":
    """Returns the replacement of `stack.run_layers`, or None if no block can be fused. Called after
    the halves of the blocks are fused."""
    blocks = stack.layers
    if not all(isinstance(block, PreNormBlock) for block in blocks):
        return None
    return FusedLayers(stack, ops) if any(map(_is_fused, blocks)) else None


class FusedLayers:
    """The replacement of `run_layers`.

    For one row, consecutive blocks are one operation, because the thread that builds the graph
    shares processors with the threads that compute the previous step.
    """

    def __init__(self, stack: LayerStack, ops: Any) -> None:
        self._stack, self._ops = ref(stack), ops
        self._halves: Sequence[Any] = ()
        self._runs: Sequence[_Run] = ()

    def __call__(self, x: mx.array, kv: Sequence[Any]) -> mx.array:
        stack: Any = _dereference(self._stack)
        if x.shape[:2] != (1, 1) or x.dtype != mx.float32:
            return type(stack).run_layers(stack, x, kv)
        blocks = stack.layers
        halves = [*map(_GET_HALVES, blocks)]
        if halves != self._halves:
            self._halves, self._runs = halves, [*_find_runs(blocks, halves, self._ops)]
        for begin, end, op in self._runs:
            kept = kv[begin:end]
            caches = [] if op is None else [one for each in kept for one in each.in_place_caches]
            if op is not None and len(caches) == len(kept):
                x = _decode_blocks(op(), x, caches, halves[begin:end])
                continue
            for block, layer_kv in zip(blocks[begin:end], kept, strict=True):
                x = block(x, layer_kv)
        return x


# the first block, the one after the last, and their operation, if there is one
_Run = tuple[int, int, CachedOp | None]


def _find_runs(blocks: Sequence[Any], halves: Sequence[Any], ops: Any) -> Iterator[_Run]:
    end = 0
    for fused, group in groupby(blocks, _is_fused):
        begin, end = end, end + len(list(group))
        if not fused:
            yield begin, end, None
            continue
        for first in range(begin, end, MAX_FUSED_BLOCKS):
            last = min(end, first + MAX_FUSED_BLOCKS)
            yield first, last, _fuse_blocks(halves[first:last], ops)


def _is_fused(block: Any) -> bool:
    """Returns whether all of a block can be part of an operation."""
    attention, mlp = _GET_HALVES(block)
    return (
        isinstance(attention, FusedAttention)
        and not attention.is_shared
        and isinstance(mlp, FusedMlp)
        and has_unmodified(block, PreNormBlock, "__call__")
    )


def _fuse_blocks(halves: Sequence[tuple[FusedAttention, FusedMlp]], ops: Any) -> CachedOp:
    parts = [half.op.parts for pair in halves for half in pair]
    return CachedOp(
        OpParts(
            linears=[linear for one in parts for linear in one.linears],
            norms=[norm for one in parts for norm in one.norms],
            others=[other for one in parts for other in one.others],
        ),
        lambda *_: ops.DecoderLayers([(attention.op(), mlp.op()) for attention, mlp in halves]),
    )


def _decode_blocks(
    op: Any,
    x: mx.array,
    caches: Sequence[InPlaceCache],
    halves: Sequence[tuple[FusedAttention, FusedMlp]],
) -> mx.array:
    """Like `models.kernels.in_place_attention.write_in_place`, for one row and several blocks."""
    keys: list[mx.array] = []
    values: list[mx.array] = []
    slots: list[SlotMapping] = []
    for cache, (attention, _) in zip(caches, halves, strict=True):
        slots.append(cache.allocate_slots(attention.new_keys, attention.new_values))
        key_buffer, value_buffer = cache.take_buffers()
        keys.append(key_buffer)
        values.append(value_buffer)
    output, keys, values = op(x, [cache.position_delta for cache in caches], keys, values, slots)
    for cache, *buffers in zip(caches, keys, values, strict=True):
        cache.return_buffers(*buffers)
    return output


def are_kernel_layers(linears: Sequence[Any], norms: Sequence[Any]) -> bool:
    """Returns whether a fused operation can take these layers."""
    linear = layers.KernelLinear | layers.KernelQuantizedLinear | KernelGgufLinear
    return all(isinstance(layer, linear) for layer in linears) and all(
        isinstance(layer, layers.KernelRMSNorm) for layer in norms
    )


def _rope_arguments(rope: Any) -> dict[str, Any]:
    if not isinstance(rope, Rope):
        return {}
    return {
        "periods": rope.periods,
        "dims": rope.dims,
        "traditional": rope.traditional,
        "magnitude": rope.magnitude,
    }


def _dereference(module_ref: ref[Any]) -> Any:
    """Returns the module, which is alive because it is the caller."""
    module = module_ref()
    assert module is not None
    return module
