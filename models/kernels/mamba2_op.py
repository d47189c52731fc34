"""Fuses the Mamba-2 layer between its projections into one operation, and in decode steps the whole
half of its block.

Knows: the layer and its half of a block (models/mamba2.py), the cache of its states, the operations
of `_kernels`. Must not know: architectures. Subclasses that override a replaced method are not
fused.

The operations compute one position after another, for prompts and decode steps. So their results do
not depend on batches and chunks. They advance the state of each row in place.
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import mlx.core as mx

from models.kernels.fused_blocks import MAX_FUSED_ROWS, CachedOp, OpParts, are_kernel_layers
from models.mamba2 import Mamba2Half, Mamba2Mixer
from models.recurrent import RecurrentCache

Mix = Callable[[mx.array, RecurrentCache], mx.array]

# computes the output, the states and the tails from states and tails
_Operation = Callable[[list[mx.array], list[mx.array]], Any]


def fuse_mamba2(mixer: Mamba2Mixer, ops: Any) -> Mix | None:
    """Returns the replacement of `mixer.mix`, or None if it cannot be fused."""
    if type(mixer).mix is not Mamba2Mixer.mix:
        return None
    arguments, advance = get_arguments(mixer), _make_advance(mixer)

    def mix(projected: mx.array, kv: RecurrentCache) -> mx.array:
        projected = projected.astype(mx.float32)
        return advance(
            lambda states, tails: ops.mamba2(projected, states, tails, **arguments),
            projected.shape[0],
            kv,
        )

    return mix


def fuse_half(block: Mamba2Half, ops: Any) -> Mix | None:
    """Returns the replacement of `block.mamba_residual`, or None if it cannot be fused."""
    norm, mixer = (getattr(block, name) for name in block.mamba_names)
    linears = [mixer.in_proj, mixer.out_proj]
    if not (
        type(block).mamba_residual is Mamba2Half.mamba_residual
        and type(mixer) is Mamba2Mixer
        and are_kernel_layers(linears, [norm])
    ):
        return None
    arguments, advance = get_arguments(mixer), _make_advance(mixer)

    def make(in_proj: Any, out_proj: Any, weight: mx.array) -> Any:
        return ops.Mamba2Block((weight, norm.eps), in_proj, out_proj, **arguments)

    fused = CachedOp(OpParts(linears=linears, norms=[norm]), make)
    # a weak reference, so that a dropped model is freed immediately
    block_ref = ref(block)

    def mamba_residual(x: mx.array, kv: RecurrentCache) -> mx.array:
        rows, length, _ = x.shape
        if length > 1 or rows > MAX_FUSED_ROWS or x.dtype != mx.float32:
            block = block_ref()
            assert block is not None, "the caller is the block"
            return Mamba2Half.mamba_residual(block, x, kv)
        y = advance(lambda states, tails: fused()(x, states, tails), rows, kv)
        kv.advance(1)
        return y

    return mamba_residual


def get_arguments(mixer: Mamba2Mixer) -> Mapping[str, Any]:
    """Returns the arguments of the operations that do not depend on a step."""
    conv, (low, high) = mixer.conv1d, mixer.step_limits
    return {
        # the kernel reads the weights of all channels for one tap
        "conv_weight": mx.contiguous(_to_float32(conv.weight[..., 0]).T),
        "conv_bias": _to_float32(conv.bias) if "bias" in conv else None,
        "dt_bias": _to_float32(mixer.dt_bias),
        "a_log": _to_float32(mixer.A_log),
        "d": _to_float32(mixer.D),
        "norm_weight": _to_float32(mixer.norm.weight),
        "eps": mixer.norm.eps,
        "min_step": low,
        "max_step": high,
    }


def _make_advance(mixer: Mamba2Mixer) -> Callable[[_Operation, int, RecurrentCache], mx.array]:
    """Returns a function that calls an operation with the states and tails of a cache, and replaces
    them with the results."""
    state_shape = (mixer.heads, mixer.state_size, mixer.head_dim)
    tail_shape = (mixer.conv1d.weight.shape[1] - 1, mixer.channels)

    def advance(operation: _Operation, batch: int, kv: RecurrentCache) -> mx.array:
        tails, states = kv.row_states(0), kv.row_states(1)
        rows = batch // len(states)
        y, new_states, new_tails = operation(
            [mx.zeros((rows, *state_shape)) if state is None else state for state in states],
            [mx.zeros((rows, *tail_shape)) if tail is None else tail for tail in tails],
        )
        kv.set_row_states(0, new_tails)
        kv.set_row_states(1, new_states)
        return y

    return advance


def _to_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32)
