"""The gated delta rule as one Metal kernel, position by position.

Knows: the rule (models/gated_delta.py), MLX's custom kernels. Must not know: layers, caches,
checkpoints.

A chunk of a prompt in plain operations takes hundreds of kernels, and MLX's own kernel for many
positions divides by products of gates that may be zero. This kernel launches once and has no
quotients. A SIMD group keeps one row of the state in registers: each of its 32 lanes has every 32nd
key dimension. mlx-lm computes prompts with the same division of work.

No Metal device was available: tests/models/test_gated_delta_metal.py compiles the source as C++ and
compares it with the formulas. A model therefore uses the kernel only after `find_fault` compared it
with the plain operations on the device.
"""

from functools import cache
from typing import Any, cast

import mlx.core as mx

from models.gated_delta import (
    CHUNK_LENGTH,
    MAX_RECURRENT_LENGTH,
    gated_delta_chunked,
    gated_delta_recurrent,
)

LANES = 32

# the rows of the state per threadgroup
_ROWS = 4

# The largest accepted difference of an output of `find_fault`, whose values are about 1.
_TOLERANCE = 1e-3

SOURCE = """
    const uint value = thread_position_in_grid.y;
    const uint place = thread_position_in_grid.z;
    const uint batch = place / Hv;
    const uint head = place % Hv;
    const uint key_head = head / (Hv / Hk);
    const uint lane = thread_index_in_simdgroup;
    constexpr int count = Dk / 32;

    float memory[count];
    for (int i = 0; i < count; ++i) {
        memory[i] = state[(place * Dv + value) * Dk + 32 * i + lane];
    }
    for (int t = 0; t < length; ++t) {
        const uint position = batch * length + t;
        const uint first_key = (position * Hk + key_head) * Dk + lane;
        const uint gate = position * Hv + head;
        const float decay = exp(log_decay[gate]);
        float known = 0;
        for (int i = 0; i < count; ++i) {
            memory[i] *= decay;
            known += memory[i] * keys[first_key + 32 * i];
        }
        known = simd_sum(known);
        const float correction = beta[gate] * (values[gate * Dv + value] - known);
        float seen = 0;
        for (int i = 0; i < count; ++i) {
            memory[i] += correction * keys[first_key + 32 * i];
            seen += memory[i] * queries[first_key + 32 * i];
        }
        seen = simd_sum(seen);
        if (lane == 0) {
            out[gate * Dv + value] = seen;
        }
    }
    for (int i = 0; i < count; ++i) {
        new_state[(place * Dv + value) * Dk + 32 * i + lane] = memory[i];
    }
"""

INPUT_NAMES = ("queries", "keys", "values", "log_decay", "beta", "state", "length")


def gated_delta_on_metal(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Computes `models.gated_delta.gated_delta`, with MLX's kernel for a few positions, and with
    the kernel of this module for more."""
    few = queries.shape[1] <= MAX_RECURRENT_LENGTH
    form = gated_delta_recurrent if few else gated_delta_sequential
    return form(queries, keys, values, log_decay, beta, state)


def gated_delta_sequential(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Computes `models.gated_delta.gated_delta`. Needs Metal, and key heads whose size is a
    multiple of LANES."""
    batch, length, key_heads, key_size = keys.shape
    value_heads, value_size = values.shape[2:]
    out, state = _kernel()(
        inputs=[queries, keys, values, log_decay, beta, state, length],
        template=[("Dk", key_size), ("Dv", value_size), ("Hk", key_heads), ("Hv", value_heads)],
        grid=(LANES, value_size, batch * value_heads),
        threadgroup=(LANES, min(_ROWS, value_size), 1),
        output_shapes=[values.shape, state.shape],
        output_dtypes=[mx.float32, mx.float32],
    )
    return out, state


def find_fault(*, key_heads: int, value_heads: int, key_size: int, value_size: int) -> str | None:
    """Returns why the kernel cannot be used on this device for heads of these sizes, or None.
    Evaluates arrays, for a few milliseconds."""
    if not mx.metal.is_available():
        return "it is written for Metal"
    if key_size % LANES:
        return f"key heads of size {key_size} are not a multiple of {LANES}"
    inputs = _draw_inputs(key_heads, value_heads, key_size, value_size)
    try:
        differences = [
            mx.max(mx.abs(ours - expected))
            for ours, expected in zip(
                gated_delta_sequential(*inputs), gated_delta_chunked(*inputs), strict=True
            )
        ]
        largest = max(cast(float, difference.item()) for difference in differences)
    except Exception as error:  # the kernel does not compile, or does not run
        return f"it fails: {str(error).partition(chr(10))[0]}"
    # a NaN is not below the tolerance
    return None if largest < _TOLERANCE else f"its results differ by {largest:.2g}"


def _draw_inputs(
    key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[mx.array, ...]:
    """More positions than MLX's own kernel computes one by one, and more than a chunk."""
    length = 2 * CHUNK_LENGTH + 3
    keys = [mx.random.key(seed) for seed in range(6)]
    heads = (1, length, key_heads, key_size)
    return (
        mx.random.normal(heads, key=keys[0]) * key_size**-0.5,
        mx.random.normal(heads, key=keys[1]) * key_size**-0.5,
        mx.random.normal((1, length, value_heads, value_size), key=keys[2]),
        -mx.exp(mx.random.uniform(-8, 2, (1, length, value_heads), key=keys[3])),
        mx.random.uniform(0, 1, (1, length, value_heads), key=keys[4]),
        mx.random.normal((1, value_heads, value_size, key_size), key=keys[5]),
    )


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel(
        name="mlxrunner_gated_delta",
        input_names=list(INPUT_NAMES),
        output_names=["out", "new_state"],
        source=SOURCE,
    )
