"""The state space model of Mamba-2 in mlx-lm's classes, for one position on a CPU.

Knows: the arguments of mlx-lm's `ssm_update`. Must not know: classes, caches.

mlx-lm has a kernel for one position only on Metal. Elsewhere, it computes products of matrices,
which round differently for a batch.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def make_ssm_update(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the replacement of `ssm_update`. original: computes everything but one position of
    each sequence on a CPU."""

    def ssm_update(
        hidden_states: mx.array,
        A_log: mx.array,
        B: mx.array,
        C: mx.array,
        D: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        mask: mx.array | None = None,
        lengths: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        if hidden_states.shape[1] > 1 or not on_cpu or mask is not None or lengths is not None:
            return original(
                hidden_states, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths
            )
        steps = mx.logaddexp(dt[:, 0].astype(mx.float32) + dt_bias, mx.array(0.0))
        steps = mx.clip(steps, *time_step_limit)
        values = hidden_states[:, 0]
        each = values.shape[1] // B.shape[2]
        keys, queries = (mx.repeat(x[:, 0], each, axis=1)[:, :, None] for x in (B, C))
        added = (steps[..., None] * values)[..., None] * keys
        if state is not None:
            decay = mx.exp(-mx.exp(A_log.astype(mx.float32)) * steps)
            added = added + decay[..., None, None] * state
        out = (added * queries).sum(axis=-1) + values * D[:, None]
        return out[:, None].astype(hidden_states.dtype), added

    return ssm_update
