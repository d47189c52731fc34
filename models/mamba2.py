"""The Mamba-2 layer (Dao and Gu 2024, "Transformers are SSMs").

Knows: tensors, the parameter names of the layer in checkpoints, the cache that it needs. Must not
know: the block around the layer, individual architectures, checkpoints.

The state of a head is a matrix S that maps keys to values. At each position, S decays by a gate
that depends on a step size d, and the new value v, times d, is stored under the new key k:

    S <- exp(d A) S + k (d v)^T
    out = q S + D v

Values, keys and queries (x, B and C in the paper) pass through a short convolution. Each group of
heads shares its keys and queries. S is always float32, regardless of the dtype of the activations,
because it accumulates thousands of small steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn

from models.base import ModelError
from models.conv import CausalConv
from models.gated_delta import decay_matrix, split_chunks
from models.layers import apply_glu, compile_on_gpu
from models.recurrent import RecurrentCache
from models.sharding import REPLICATED, ShardSpec

# the number of positions computed together, a power of two
CHUNK_LENGTH = 64

# the most taps of the convolution, which is also the limit of the CPU kernel
MAX_CONV_WIDTH = 16

# the largest finite limit of a step size, which float32 must hold
_LARGEST_STEP = 1e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """The sizes and parameters of the layer. step_limits: the smallest and the largest step size.
    bias, conv_bias: whether the projections and the convolution have biases."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    eps: float
    bias: bool = False
    conv_bias: bool = True
    step_limits: tuple[float, float] = (0.0, math.inf)

    def check(self) -> None:
        """Raises ModelError for invalid sizes."""
        sizes = {
            "the number of heads": self.num_heads,
            "the size of a head": self.head_dim,
            "the size of a state": self.state_size,
            "the number of groups": self.num_groups,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ModelError(f"config.json: {name} of a Mamba-2 layer is {size}")
        if self.num_heads % self.num_groups:
            raise ModelError(
                f"config.json: {self.num_heads} heads of a Mamba-2 layer cannot be split into "
                f"{self.num_groups} groups"
            )
        if not 2 <= self.conv_width <= MAX_CONV_WIDTH:
            raise ModelError(
                f"config.json: the convolution of a Mamba-2 layer has {self.conv_width} taps, but "
                f"must have between 2 and {MAX_CONV_WIDTH}"
            )


def read_step_limits(value: Any) -> tuple[float, float]:
    """Reads `time_step_limit` of config.json, a list of two numbers. transformers writes an
    infinite number as {"__float__": "Infinity"}. Raises ModelError."""
    if value is None:
        return 0.0, math.inf
    items = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()
    limits = [_read_number(item) for item in items]
    low, high = limits if len(limits) == 2 else (None, None)
    if low is None or high is None or not 0 <= low <= high or low == math.inf:
        raise ModelError(
            f"config.json: time_step_limit is {str(value)[:60]}, but must be two numbers in order"
        )
    return low, high


def _read_number(value: Any) -> float | None:
    if value in (math.inf, {"__float__": "Infinity"}):
        return math.inf
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= _LARGEST_STEP else None


class GroupedGatedNorm(nn.Module):
    """Normalizes each group of `size` numbers of x * silu(gates)."""

    def __init__(self, width: int, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = mx.ones((width,))

    def __call__(self, x: mx.array, gates: mx.array) -> mx.array:
        """Maps x and gates [B, L, D], which are float32, to [B, L, D] of float32."""
        gated = apply_glu(nn.silu, gates, x)
        grouped = mx.unflatten(gated, -1, (-1, self.size))
        return mx.fast.rms_norm(grouped, None, self.eps).flatten(-2) * self.weight


class Mamba2Mixer(nn.Module):
    """A Mamba-2 layer. `mix` is everything between its two projections."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        config.check()
        self.heads, self.head_dim, self.state_size = (
            config.num_heads,
            config.head_dim,
            config.state_size,
        )
        self.groups, self.step_limits = config.num_groups, config.step_limits
        self.in_proj = nn.Linear(
            config.hidden_size, self.inner + self.channels + self.heads, bias=config.bias
        )
        self.conv1d = CausalConv(self.channels, config.conv_width, bias=config.conv_bias)
        self.dt_bias = mx.ones((self.heads,))
        self.A_log = mx.zeros((self.heads,))
        self.D = mx.ones((self.heads,))
        self.norm = GroupedGatedNorm(self.inner, self.inner // self.groups, config.eps)
        self.out_proj = nn.Linear(self.inner, config.hidden_size, bias=config.bias)

    @property
    def inner(self) -> int:
        """The width of the values."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """The width of values, keys and queries together."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def shard_spec(self) -> ShardSpec:
        """Returns the shard spec. The layer is divided by groups, together with their heads. With
        one group, every rank computes the whole layer."""
        if self.groups == 1:
            return REPLICATED
        inner, keys = self.inner, self.groups * self.state_size
        kinds = (inner, inner + keys)
        projected = (inner, *(inner + end for end in (*kinds, self.channels)))
        return ShardSpec(
            column_parallel=("in_proj",),
            row_parallel=("out_proj",),
            first_axis=("conv1d", "A_log", "dt_bias", "D", "norm"),
            segments={"in_proj": projected, "conv1d": kinds},
            counts=("heads", "groups"),
        )

    def __call__(self, x: mx.array, kv: RecurrentCache) -> mx.array:
        """Maps hidden states [B, L, D] to [B, L, D]. The slots of the cache contain the tail of the
        convolution and the states."""
        y = self.mix(self.in_proj(x), kv)
        kv.advance(x.shape[1])
        return self.out_proj(y)

    # On a CPU, models/cpu_layout.py replaces this method with one operation.

    def mix(self, projected: mx.array, kv: RecurrentCache) -> mx.array:
        """Maps gates, values, keys, queries and logits of step sizes, concatenated, to the input of
        the output projection [B, L, inner]."""
        batch, length, _ = projected.shape
        gates, mixed, steps = mx.split(projected, [self.inner, self.inner + self.channels], axis=-1)
        mixed, kv[0] = self.conv1d(mixed, kv[0])
        values, keys, queries = mx.split(
            _silu_float32(mixed), [self.inner, self.inner + self.groups * self.state_size], axis=-1
        )
        state = kv[1]
        if state is None:
            state = mx.zeros((batch, self.heads, self.state_size, self.head_dim))
        steps = mx.clip(_softplus_float32(steps, self.dt_bias), *self.step_limits)
        values = values.reshape(batch, length, self.heads, -1)
        y, kv[1] = selective_scan(
            values,
            keys.reshape(batch, length, self.groups, -1),
            queries.reshape(batch, length, self.groups, -1),
            steps,
            _log_decay(self.A_log, steps),
            state,
        )
        y = _add_skipped(y, self.D[:, None], values).reshape(batch, length, -1)
        return self.norm(y, gates.astype(mx.float32)).astype(projected.dtype)


class Mamba2Half(nn.Module):
    """A base class of blocks that compute x + mixer(norm(x)) with a Mamba-2 layer.

    mamba_names: the names of the norm and of the layer.
    """

    mamba_names: ClassVar[tuple[str, str]]

    # On devices with a fused operation, models/cpu_layout.py replaces this method with it.

    def mamba_residual(self, x: mx.array, kv: RecurrentCache) -> mx.array:
        norm, mixer = (getattr(self, name) for name in self.mamba_names)
        return x + mixer(norm(x), kv)


def selective_scan(
    values: mx.array,
    keys: mx.array,
    queries: mx.array,
    steps: mx.array,
    log_decay: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Returns (out [B, L, H, P] without the term of D, the new state). values: [B, L, H, P]. keys,
    queries: [B, L, G, N]. steps and log_decay (at most 0): [B, L, H]. state: [B, H, N, P]. All
    arrays are float32. Head h belongs to group h // (H / G)."""
    shape, groups = state.shape, keys.shape[2]
    state = state.reshape(shape[0], groups, -1, *shape[2:])
    values = (values * steps[..., None]).reshape(*values.shape[:2], groups, -1, values.shape[3])
    log_decay = log_decay.reshape(*log_decay.shape[:2], groups, -1)
    form = _scan_position if values.shape[1] == 1 else _scan_chunks
    out, state = form(values, keys[:, :, :, None], queries[:, :, :, None], log_decay, state)
    return out.reshape(shape[0], -1, shape[1], shape[3]), state.reshape(shape)


def _scan_position(
    values: mx.array, keys: mx.array, queries: mx.array, log_decay: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Computes one position. values: [B, 1, G, H / G, P], keys and queries: [B, 1, G, 1, N],
    log_decay: [B, 1, G, H / G], state: [B, G, H / G, N, P]. Returns [B, 1, G, H / G, P]."""
    state = _advance(
        state, log_decay[:, 0, :, :, None, None], keys[:, 0, ..., None], values[:, 0, ..., None, :]
    )
    out = queries[:, 0, ..., None, :] @ state
    return out[:, None, ..., 0, :], state


def _scan_chunks(
    values: mx.array, keys: mx.array, queries: mx.array, log_decay: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Like `_scan_position`, for L positions, one chunk at a time (section 6 of the paper). Within
    a chunk, element [i, j] of a matrix is the effect of position j on i. The states are computed in
    sequence, everything else for all chunks at once."""
    length = values.shape[1]
    chunk = min(CHUNK_LENGTH, 1 << (length - 1).bit_length())
    values, keys, queries, log_decay = (
        split_chunks(x, chunk) for x in (values, keys, queries, log_decay)
    )
    fading = decay_matrix(log_decay)
    from_start = mx.exp(mx.cumsum(log_decay, axis=-1))[..., None]
    within = (queries @ keys.swapaxes(-1, -2) * fading) @ values
    added = (keys * fading[..., -1, :, None]).swapaxes(-1, -2) @ values
    queries = queries * from_start
    outs: list[mx.array] = []
    for n in range(within.shape[3]):
        each = (slice(None),) * 3 + (n,)
        outs.append(within[each] + queries[each] @ state)
        state = from_start[each][..., -1:, :] * state + added[each]
    out = mx.concatenate(outs, axis=3)[:, :, :, :length]
    return out.transpose(0, 3, 1, 2, 4), state


@compile_on_gpu
def _silu_float32(x: mx.array) -> mx.array:
    return nn.silu(x.astype(mx.float32))


@compile_on_gpu
def _softplus_float32(x: mx.array, bias: mx.array) -> mx.array:
    return mx.logaddexp(x.astype(mx.float32) + bias.astype(mx.float32), mx.array(0.0))


@compile_on_gpu
def _log_decay(a_log: mx.array, steps: mx.array) -> mx.array:
    return -mx.exp(a_log.astype(mx.float32)) * steps


@compile_on_gpu
def _advance(state: mx.array, log_decay: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    return mx.exp(log_decay) * state + keys * values


@compile_on_gpu
def _add_skipped(y: mx.array, weight: mx.array, values: mx.array) -> mx.array:
    return y + weight.astype(mx.float32) * values
