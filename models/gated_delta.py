"""The gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks").

Knows: tensors. Must not know: layers, caches, checkpoints.

The state of a head is a matrix S that maps keys to values. At each position, S decays by a gate g.
Its output for the new key k moves toward the new value v by a step size b:

    u = b (v - g S k)
    S <- g S + u k^T
    out = S q

S is always float32, regardless of the dtype of the activations, because it accumulates thousands of
small steps.
"""

import mlx.core as mx

# the number of positions computed together, a power of two
CHUNK_LENGTH = 32

# Up to this number of positions, the recurrence is computed one position at a time. On a CPU, the
# cost is the same, and on Metal, MLX has a kernel for it.
MAX_RECURRENT_LENGTH = 16


def gated_delta(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Returns (out [B, L, Hv, Dv], the new state). queries, keys: [B, L, Hk, Dk]. values: [B, L,
    Hv, Dv]. log_decay (at most 0) and beta: [B, L, Hv]. state: [B, Hv, Dv, Dk]. All arrays are
    float32. Hv is a multiple of Hk, and value head h belongs to key head h // (Hv / Hk)."""
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
    """Computes `gated_delta` one position at a time. On Metal, a kernel is used for the shapes of
    known models. Otherwise, plain operations are used.

    Not suitable for long prompts. The plain operations build a graph that grows
    with every position. The kernel computes more than 16 positions in chunks, where it divides by
    products of gates that may be zero.
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
    """Computes `gated_delta` one chunk of positions at a time (section 3.3 of the paper).

    Within a chunk, D[i, j] is the decay from position j to i, and d[i] is the decay from the start
    of the chunk. The corrections u of all positions solve a triangular system:

        (I + A) U = b V - (b d K) S^T     A[i, j] = b[i] D[i, j] k[i] k[j]^T for j < i

    The matrix and the terms without S are computed for all chunks at once. The remaining
    computation is three products with S per chunk, in sequence.
    """
    length, heads = queries.shape[1], keys.shape[2]
    chunk = min(CHUNK_LENGTH, 1 << (length - 1).bit_length())
    queries, keys = (split_chunks(x[:, :, :, None], chunk) for x in (queries, keys))
    values, log_decay, beta = (
        split_chunks(x.reshape(*x.shape[:2], heads, -1, *x.shape[3:]), chunk)
        for x in (values, log_decay, beta)
    )

    fading = decay_matrix(log_decay)
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


def split_chunks(x: mx.array, chunk: int) -> mx.array:
    """Converts [B, L, Hk, Hv / Hk, ...] to [B, Hk, Hv / Hk, chunks, chunk, ...]. The last chunk is
    padded with zeros, which means no step and no decay."""
    short = -x.shape[1] % chunk
    if short:
        x = mx.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return x.transpose(0, 3, 4, 1, 2, *range(5, x.ndim))


def decay_matrix(logs: mx.array) -> mx.array:
    """Converts logarithms of gates [..., C] to decays [..., C, C]. The element [i, j] is the
    product of the gates after j up to i. Elements above the diagonal are zero. Each sum is computed
    separately, because the difference of two cumulative sums would have a rounding error of the
    size of these sums."""
    size = logs.shape[-1]
    rows = mx.broadcast_to(logs[..., None], (*logs.shape, size))
    return mx.tril(mx.exp(mx.cumsum(mx.tril(rows, -1), axis=-2)))


def _invert_unit_lower(lower: mx.array) -> mx.array:
    """Computes (I + lower)^-1 of strictly lower triangular matrices [..., C, C]. C must be a power
    of two.

    The inverse is computed from the diagonal outwards: the inverse of [[P, 0], [R, Q]] is [[P', 0],
    [-Q' R P', Q']], where P' and Q' are the inverses from the previous step. This is as stable as
    substitution row by row. The series I - A + A^2 - ... is not stable, because its terms grow
    without bound if a prompt repeats itself.
    """
    *outer, size, _ = lower.shape
    inverse = mx.ones((*outer, size, 1, 1), lower.dtype)
    width = 1
    while width < size:
        pairs = size // (2 * width)
        blocks = lower.reshape(*outer, pairs, 2 * width, pairs, 2 * width)
        diagonal = mx.diagonal(blocks, axis1=-4, axis2=-2)
        corner = mx.moveaxis(diagonal, -1, -3)[..., width:, :width]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ corner @ first)
        top = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        inverse = mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :, :]
