"""Fuses the Mamba-2 layer between its projections into one operation.

Knows: the layer (models/mamba2.py), the cache of its states, the operations of `_kernels`. Must not
know: architectures. Subclasses that override the replaced method are not fused.

The operation computes one position after another, for prompts and decode steps. So its results do
not depend on batches and chunks. It advances the state of each row in place.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from models.mamba2 import Mamba2Mixer
from models.recurrent import RecurrentCache

Mix = Callable[[mx.array, RecurrentCache], mx.array]


def fuse_mamba2(mixer: Mamba2Mixer, ops: Any) -> Mix | None:
    """Returns the replacement of `mixer.mix`, or None if it cannot be fused."""
    if type(mixer).mix is not Mamba2Mixer.mix:
        return None
    conv = mixer.conv1d
    # the kernel reads the weights of all channels for one tap
    conv_weight = mx.contiguous(_to_float32(conv.weight[..., 0]).T)
    weights = {
        "conv_bias": _to_float32(conv.bias) if "bias" in conv else None,
        "dt_bias": _to_float32(mixer.dt_bias),
        "a_log": _to_float32(mixer.A_log),
        "d": _to_float32(mixer.D),
        "norm_weight": _to_float32(mixer.norm.weight),
    }
    taps, channels = conv_weight.shape
    state_shape = (mixer.heads, mixer.state_size, mixer.head_dim)
    eps, (low, high) = mixer.norm.eps, mixer.step_limits

    def mix(projected: mx.array, kv: RecurrentCache) -> mx.array:
        tails, states = kv.row_states(0), kv.row_states(1)
        rows = projected.shape[0] // len(states)
        y, new_states, new_tails = ops.mamba2(
            projected.astype(mx.float32),
            [mx.zeros((rows, *state_shape)) if state is None else state for state in states],
            [mx.zeros((rows, taps - 1, channels)) if tail is None else tail for tail in tails],
            conv_weight=conv_weight,
            eps=eps,
            min_step=low,
            max_step=high,
            **weights,
        )
        kv.set_row_states(0, new_tails)
        kv.set_row_states(1, new_states)
        return y

    return mix


def _to_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32)
