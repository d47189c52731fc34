"""Chooses how the attention of a layer is computed on a device, and how much memory that holds.

Knows: shapes, and the shapes for which MLX has fused kernels. Must not know: arrays, caches,
architectures.

A fused kernel holds no scores. Without one, MLX holds the scores of all queries and all keys, which
grow with the context. Such attention is computed in pieces: for some of the heads, or for some of
the queries of one head. At most two pieces are in flight (models/attention_pieces.py). The models
and the memory ledger use the same functions.

The shapes come from MLX's source: mlx/fast.cpp at commit 0017d3c (the unfused operations),
mlx/backend/metal/scaled_dot_product_attention.cpp at 00703ea, and
mlx/backend/cuda/scaled_dot_product_attention.cpp at 0569a18 and .cu at 08be80b. They are the newest
stored versions near 0.32.4, the version that requirements/ pins. No GPU was
available: tests/models/mlx_attention.py transcribes the conditions of the source, and the routes
are tested against this transcription.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

# The maximum size of a piece, for attention without a fused kernel. With more than this, Metal's
# fused kernels are used although MLX considers them slower.
PIECE_BYTES = 128 << 20

# Pieces of up to this size are dispatched without waiting for earlier ones. The ledger counts
# several of them, because layers overlap on the device.
UNWAITED_BYTES = 16 << 20
_UNWAITED_IN_FLIGHT = 4

# The score arrays that exist at the same time, including the softmax, which is computed in place if
# possible.
_SCORE_ARRAYS, _COMPOSED_SCORE_ARRAYS = 2, 3

_METAL_VECTOR_LENGTH = 8  # the maximum number of queries of Metal's kernels for few queries
_METAL_FULL_DIMS = (64, 72, 80, 96, 128, 192, 256)
_METAL_VECTOR_DIMS = (64, 96, 128, 192, 256)
_METAL_SLOW_FULL_DIMS, _METAL_SLOW_VECTOR_DIMS = (192, 256), (192,)
_CUDA_VECTOR_LENGTH = 3
_CUDA_VECTOR_DIMS = (64, 96, 128)
_CUDNN_MAX_DIM = 128


class AttentionDevice(StrEnum):
    """The implementations of attention. KERNELS: our CPU kernels. CPU: MLX's operations on a
    CPU."""

    KERNELS = auto()
    CPU = auto()
    METAL = auto()
    CUDA = auto()


class AttentionMask(Enum):
    """The kinds of masks of `models.sdpa.scaled_dot_product_attention`."""

    NONE = auto()
    CAUSAL = auto()
    ARRAY = auto()


class AttentionRoute(Enum):
    """FUSED: MLX or our kernels use a fused kernel. FORCED: the same, if `force_fused` is set.
    PIECES: there is no fused kernel, or the scores are small."""

    FUSED = auto()
    FORCED = auto()
    PIECES = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The properties of a layer's attention that do not depend on the position.

    batch: the number of sequences with one cache. key_dim, value_dim: the sizes of a head. softcap:
    whether scores are soft-capped. sinks: whether heads have attention sinks. absorbed: whether
    latent attention is computed in the absorbed form (models/mla.py), for which there is no fused
    kernel. expanded_dims: for the expanded form, the numbers per head and position that are
    computed from the latents; otherwise 0. windowed: whether the mask may be an array, for a
    sliding window. splittable: whether we compute the attention, and can therefore compute it in
    pieces.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    itemsize: int
    batch: int = 1
    softcap: bool = False
    sinks: bool = False
    absorbed: bool = False
    expanded_dims: int = 0
    windowed: bool = False
    splittable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPiece:
    """A range of query heads and of queries. kv_heads: the heads of their keys and values. visible:
    the number of keys that the last query of the range may attend to."""

    heads: slice
    kv_heads: slice
    queries: slice
    visible: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """How a call is computed. head_step, query_step: the number of query heads and of queries per
    piece. piece_bytes: the size of a piece."""

    route: AttentionRoute
    head_step: int
    query_step: int
    piece_bytes: int

    def pieces(
        self, shape: AttentionShape, *, length: int, total: int, causal: bool
    ) -> Iterator[AttentionPiece]:
        """Yields the pieces. All ranges of queries of a range of heads are consecutive."""
        group = shape.heads // shape.kv_heads
        for head in range(0, shape.heads, self.head_step):
            last = min(head + self.head_step, shape.heads)
            for query in range(0, length, self.query_step):
                end = min(query + self.query_step, length)
                yield AttentionPiece(
                    heads=slice(head, last),
                    kv_heads=slice(head // group, -(-last // group)),
                    queries=slice(query, end),
                    visible=total - length + end if causal else total,
                )


def choose_route(
    device: AttentionDevice,
    shape: AttentionShape,
    *,
    length: int,
    total: int,
    mask: AttentionMask,
) -> AttentionRoute:
    """Returns the route of `length` queries over `total` keys."""
    if shape.absorbed:
        return AttentionRoute.PIECES
    if device is AttentionDevice.KERNELS and mask is not AttentionMask.ARRAY:
        return AttentionRoute.FUSED
    if shape.softcap:
        return AttentionRoute.PIECES
    if device is AttentionDevice.CUDA:
        has_kernel = _has_cuda_kernel(shape, length, total, mask)
        return AttentionRoute.FUSED if has_kernel else AttentionRoute.PIECES
    if device is not AttentionDevice.METAL or not _has_metal_kernel(shape, length, total, mask):
        return AttentionRoute.PIECES
    slow = _METAL_SLOW_VECTOR_DIMS if length <= _METAL_VECTOR_LENGTH else _METAL_SLOW_FULL_DIMS
    if shape.key_dim != shape.value_dim or shape.key_dim not in slow:
        return AttentionRoute.FUSED
    if _score_bytes(shape, length, total) > PIECE_BYTES and shape.splittable:
        return AttentionRoute.FORCED
    return AttentionRoute.PIECES


def plan_attention(
    device: AttentionDevice,
    shape: AttentionShape,
    *,
    length: int,
    total: int,
    mask: AttentionMask,
) -> AttentionPlan:
    """Plans `length` queries over `total` keys."""
    route = choose_route(device, shape, length=length, total=total, mask=mask)
    if route is not AttentionRoute.PIECES:
        return AttentionPlan(
            route=route, head_step=shape.heads, query_step=max(1, length), piece_bytes=0
        )
    each = _score_bytes(shape, 1, total)
    heads, queries = shape.heads, max(1, length)
    if each * queries > PIECE_BYTES and shape.splittable:
        head_bytes = max(1, each // shape.heads)
        heads = _round_to_groups(shape, PIECE_BYTES // (head_bytes * queries))
        if heads == 0:
            heads, queries = 1, max(1, min(queries, PIECE_BYTES // head_bytes))
    return AttentionPlan(
        route=route,
        head_step=heads,
        query_step=queries,
        piece_bytes=_score_bytes(shape, queries, total) * heads // shape.heads,
    )


def expansion_step(shape: AttentionShape, total: int) -> int:
    """Returns the number of heads whose keys and values are computed from `total` latents at the
    same time (`AttentionShape.expanded_dims`)."""
    head_bytes = shape.batch * shape.expanded_dims * shape.itemsize * total
    return max(1, min(shape.heads, PIECE_BYTES // max(1, head_bytes)))


def workspace_bytes(
    device: AttentionDevice, shape: AttentionShape, *, length: int, total: int
) -> int:
    """Returns an upper bound on the memory that `length` queries over `total` keys hold besides
    their inputs and outputs. It does not decrease if `total` increases."""
    inner = max(_scores_in_flight(device, shape, length, total, mask) for mask in _masks(shape))
    head_bytes = shape.batch * shape.expanded_dims * shape.itemsize * total
    if not head_bytes:
        return inner
    return _in_flight(head_bytes * shape.heads, head_bytes) + 2 * inner


def longest_query(device: AttentionDevice, shape: AttentionShape, total: int, length: int) -> int:
    """Returns the number of queries, at most `length`, whose scores over `total` keys are at most
    as large as a piece. For attention that is not computed in pieces."""
    routes = {
        choose_route(device, shape, length=length, total=total, mask=mask) for mask in _masks(shape)
    }
    if AttentionRoute.PIECES not in routes:
        return length
    return max(1, min(length, PIECE_BYTES // _score_bytes(shape, 1, total)))


def _masks(shape: AttentionShape) -> Sequence[AttentionMask]:
    return [AttentionMask.CAUSAL, *([AttentionMask.ARRAY] if shape.windowed else [])]


def _scores_in_flight(
    device: AttentionDevice, shape: AttentionShape, length: int, total: int, mask: AttentionMask
) -> int:
    if length == 0 or total == 0:
        return 0
    route = choose_route(device, shape, length=length, total=total, mask=mask)
    mask_bytes = length * total * (1 + shape.itemsize)
    if route is AttentionRoute.FUSED:
        return mask_bytes if mask is AttentionMask.ARRAY else 0
    whole, row = _score_bytes(shape, length, total), _score_bytes(shape, 1, total)
    if route is AttentionRoute.FORCED:  # counts like the largest context that is not forced
        return _in_flight(min(whole, PIECE_BYTES), 0)
    return _in_flight(whole, row if not shape.splittable else row // shape.heads)


def _in_flight(whole: int, smallest: int) -> int:
    """Returns the bytes in flight for a computation of `whole` bytes whose smallest possible piece
    has `smallest` bytes."""
    piece = min(whole, max(PIECE_BYTES, smallest))
    return min(_UNWAITED_IN_FLIGHT * whole, max(_UNWAITED_IN_FLIGHT * UNWAITED_BYTES, 2 * piece))


def _score_bytes(shape: AttentionShape, length: int, total: int) -> int:
    """Returns the size of all score arrays of all heads, and of the mask."""
    composed = shape.softcap or shape.sinks or shape.absorbed
    arrays = _COMPOSED_SCORE_ARRAYS if composed else _SCORE_ARRAYS
    scores = arrays * shape.batch * shape.heads * shape.itemsize
    return (scores + 1) * length * total


def _round_to_groups(shape: AttentionShape, heads: int) -> int:
    """Returns the number of heads per piece, at most `heads`: whole groups of heads that share
    their keys, or an equal part of a group."""
    group = shape.heads // shape.kv_heads
    if heads >= group:
        return min(shape.heads, heads // group * group)
    return max((part for part in range(1, heads + 1) if group % part == 0), default=0)


def _has_metal_kernel(shape: AttentionShape, length: int, total: int, mask: AttentionMask) -> bool:
    """Returns whether Metal has a fused kernel (`has_fused_kernel`). Head size 512 counts as
    unsupported, because it depends on an environment variable."""
    same = shape.key_dim == shape.value_dim
    if length > _METAL_VECTOR_LENGTH:
        fits = mask is not AttentionMask.CAUSAL or length <= total
        return same and shape.key_dim in _METAL_FULL_DIMS and fits
    supported = (same and shape.key_dim in _METAL_VECTOR_DIMS) or (
        shape.key_dim == 192 and shape.value_dim == 128
    )
    rows = length * (shape.heads // shape.kv_heads)
    return supported and length <= total and rows <= 32


def _has_cuda_kernel(shape: AttentionShape, length: int, total: int, mask: AttentionMask) -> bool:
    """Returns whether CUDA has a fused kernel (`supports_sdpa_cudnn`, `supports_sdpa_vector`) on a
    GPU with compute capability 8.0 or newer. For single queries, cuDNN does not count, because MLX
    uses it only for keys that were already computed."""
    array_mask = mask is AttentionMask.ARRAY
    dims = {shape.key_dim, shape.value_dim}
    vector = len(dims) == 1 and shape.key_dim in _CUDA_VECTOR_DIMS
    if vector and length <= _CUDA_VECTOR_LENGTH and not array_mask:
        return True
    if length <= 1 or (mask is AttentionMask.CAUSAL and length > total):
        return False
    return shape.itemsize == 2 and all(dim % 8 == 0 and dim <= _CUDNN_MAX_DIM for dim in dims)
