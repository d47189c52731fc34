"""The gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks").

Knows: tensors. Must not know: layers, caches, checkpoints.

A head remembers in a matrix S that answers keys with values. At each position what S holds fades by
a gate g, and what it answers the new key k with is moved towards the new value v, by a step b:

    u = b (v - g S k)
    S <- g S + u k^T
    out = S q

S is kept in float32 whatever the activations are: it sums up thousands of small steps.
"""

import mlx.core as mx

# positions that are worked off together; a power of two
CHUNK_LENGTH = 32

# up to so many positions go one after the other: on a CPU that costs the same, on Metal MLX has a
# kernel for it
MAX_RECURRENT_LENGTH = 16


def gated_delta(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """queries, keys [B, L, Hk, Dk], values [B, L, Hv, Dv], log_gates (<= 0) and steps [B, L, Hv],
    state [B, Hv, Dv, Dk], all float32 -> (out [B, L, Hv, Dv], the state after them). Hv is a
    multiple of Hk: value head h belongs to key head h // (Hv / Hk)."""
    form = (
        gated_delta_recurrent if queries.shape[1] <= MAX_RECURRENT_LENGTH else gated_delta_chunked
    )
    return form(queries, keys, values, log_decay, beta, state)


def gated_delta_recurrent(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """As `gated_delta`, one position after the other. On Metal one kernel for the shapes of known
    models, elsewhere plain operations.

    Not for long prompts: the plain operations are a graph that grows with every position, and the
    kernel takes more than 16 positions in chunks, divided by products of gates that may be zero.
    """
    out, state = mx.fast.gated_delta_update(queries, keys, values, mx.exp(log_decay), beta, state)
    return out, state


def gated_delta_chunked(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """As `gated_delta`, a chunk of positions at a time (section 3.3 of the paper).

    Within a chunk, with D[i, j] the fading from position j to i and d[i] that from before the
    chunk, the corrections u of all its positions solve a triangular system,

        (I + A) U = b V - (b d K) S^T     A[i, j] = b[i] D[i, j] k[i] k[j]^T for j < i

    whose matrix and whose parts without S are found for all chunks at once. What is left to do
    chunk after chunk is three products with S.
    """
    length, heads = queries.shape[1], keys.shape[2]
    chunk = min(CHUNK_LENGTH, 1 << (length - 1).bit_length())
    queries, keys = (_split_chunks(x[:, :, :, None], chunk) for x in (queries, keys))
    values, log_decay, beta = (
        _split_chunks(x.reshape(*x.shape[:2], heads, -1, *x.shape[3:]), chunk)
        for x in (values, log_decay, beta)
    )

    fading = _decay_matrix(log_decay)
    from_start = mx.exp(mx.cumsum(log_decay, axis=-1))[..., None]
    beta = beta[..., None]
    system = mx.tril(keys @ keys.swapaxes(-1, -2), -1) * fading * beta
    solved = _invert_unit_lower(system)
    fresh = solved @ (beta * values)
    stale = solved @ (beta * from_start * keys)
    attended = queries @ keys.swapaxes(-1, -2) * fading
    queries = queries * from_start
    to_end = keys * fading[..., -1, :, None]
    faded = from_start[..., -1:, :]

    shape = state.shape
    state = state.reshape(shape[0], heads, -1, *shape[2:])
    outs: list[mx.array] = []
    for n in range(fading.shape[3]):
        each = (slice(None),) * 3 + (n,)
        answers = state.swapaxes(-1, -2)
        corrections = fresh[each] - stale[each] @ answers
        outs.append(queries[each] @ answers + attended[each] @ corrections)
        state = faded[each] * state + corrections.swapaxes(-1, -2) @ to_end[each]
    out = mx.concatenate(outs, axis=3)[:, :, :, :length]
    out = out.transpose(0, 3, 1, 2, 4).reshape(shape[0], length, shape[1], -1)
    return out, state.reshape(shape)


def _split_chunks(x: mx.array, chunk: int) -> mx.array:
    """[B, L, Hk, Hv / Hk, ...] -> [B, Hk, Hv / Hk, chunks, chunk, ...]. Positions that fill the
    last chunk up are all zero: no step, no fading."""
    short = -x.shape[1] % chunk
    if short:
        x = mx.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return x.transpose(0, 3, 4, 1, 2, *range(5, x.ndim))


def _decay_matrix(logs: mx.array) -> mx.array:
    """[..., C] logarithms of gates -> [..., C, C], at [i, j] the product of the gates after j up to
    i, nothing above the diagonal. Each is summed up by itself: the difference of two sums since the
    start would be rounded to the size of the sums."""
    size = logs.shape[-1]
    rows = mx.broadcast_to(logs[..., None], (*logs.shape, size))
    return mx.tril(mx.exp(mx.cumsum(mx.tril(rows, -1), axis=-2)))


def _invert_unit_lower(lower: mx.array) -> mx.array:
    """(I + lower)^-1 of strictly lower triangular matrices [..., C, C], C a power of two.

    From the diagonal outwards: of [[P, 0], [R, Q]] it is [[P', 0], [-Q' R P', Q']], where P' and Q'
    are known from the turn before. As stable as substituting row by row, unlike the series
    I - A + A^2 - ..., whose terms grow without bound where a prompt repeats itself.
    """
    *outer, size, _ = lower.shape
    found = mx.ones((*outer, size, 1, 1), lower.dtype)
    width = 1
    while width < size:
        pairs = size // (2 * width)
        blocks = lower.reshape(*outer, pairs, 2 * width, pairs, 2 * width)
        diagonal = mx.diagonal(blocks, axis1=-4, axis2=-2)
        corner = mx.moveaxis(diagonal, -1, -3)[..., width:, :width]
        first, second = found[..., 0::2, :, :], found[..., 1::2, :, :]
        corner = -(second @ corner @ first)
        top = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        found = mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return found[..., 0, :, :]
