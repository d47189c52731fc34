"""Attention that writes new keys and values directly into the buffers of the caches.

Knows: the buffers that a cache passes (`InPlaceCache`), the kernels. Must not know: types of
caches. One operation computes all rows of a batch, or many positions of one sequence, while MLX
needs several operations per row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from models import kernels


class SlotMapping(NamedTuple):
    """The slots of a sequence's positions, including the new ones, in a ring buffer.

    length: the number of positions. head_slot: the slot of the oldest position. The slot after the
    last one is slot 0. first_position: the absolute position of the oldest position. write_slot:
    the first slot of the new positions, which are the newest. window: the number of positions that
    a query attends to, including its own position; 0 for all positions.
    """

    write_slot: int
    length: int
    head_slot: int
    first_position: int
    window: int


class InPlaceCache(Protocol):
    """A cache whose buffers can be written in place. See `models.kv.KVBuffers`."""

    position_delta: int
    """See `models.kv.set_position_delta`."""

    @property
    def supports_in_place(self) -> bool: ...

    def allocate_slots(self, keys: mx.array, values: mx.array) -> SlotMapping:
        """Allocates slots. Only the shapes and types of the arrays are used."""
        ...

    def map_slots(self) -> SlotMapping:
        """Returns the slots of the cached positions, without new ones."""
        ...

    def get_buffers(self) -> tuple[mx.array, mx.array]:
        """Returns the buffers, which the caller does not write."""
        ...

    def take_buffers(self) -> tuple[mx.array, mx.array]: ...

    def return_buffers(self, keys: mx.array, values: mx.array) -> None: ...


def attend_in_place(
    caches: Sequence[InPlaceCache],
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
) -> mx.array | None:
    """Computes attention like `models.kv.AttentionCache.attend`, with one cache per row. If the
    kernels do not support it, returns None and changes nothing. They do not support other types or
    devices, several sequences in one cache, and caches without `supports_in_place`."""
    ops = kernels.ops(queries, keys, values)
    if ops is None or len(caches) != len(queries) or not caches[0].supports_in_place:
        return None

    def attend(*buffers: Any, window: int) -> AttentionResult:
        return ops.attend(
            queries,
            keys,
            values,
            *buffers,
            scale=scale,
            window=window,
            sinks=sinks,
            softcap=softcap or 0.0,
        )

    return write_in_place(caches, keys[:1], values[:1], attend)


def attend_shared_in_place(
    caches: Sequence[InPlaceCache], queries: mx.array, *, scale: float
) -> mx.array | None:
    """Computes attention like `models.kv.AttentionCache.attend_shared`, with one cache per row.
    Returns None if the kernels do not support it, see `attend_in_place`."""
    ops = kernels.ops(queries)
    if ops is None or len(caches) != len(queries) or not caches[0].supports_in_place:
        return None
    return read_in_place(caches, partial(ops.attend_shared, queries, scale=scale))


# the result, and the buffers of keys and of values, which contain the new positions
AttentionResult = tuple[mx.array, list[mx.array], list[mx.array]]


class InPlaceOp(Protocol):
    """An operation that writes new positions to buffers, with one cache per row."""

    def __call__(
        self,
        keys: list[mx.array],
        values: list[mx.array],
        slots: list[int],
        lengths: list[int],
        head_slots: list[int],
        first_positions: list[int],
        /,
        *,
        window: int,
    ) -> AttentionResult: ...


def write_in_place(
    caches: Sequence[InPlaceCache], keys: mx.array, values: mx.array, op: InPlaceOp
) -> mx.array:
    """Returns the result of `op`. The operation receives the buffers of the caches, with slots for
    the positions that it writes. keys, values: see `InPlaceCache.allocate_slots`."""
    key_buffers: list[mx.array] = []
    value_buffers: list[mx.array] = []
    write_slots: list[int] = []
    lengths: list[int] = []
    head_slots: list[int] = []
    first_positions: list[int] = []
    window = 0
    # one loop, because this runs in each layer for each token
    for cache in caches:
        mapping = cache.allocate_slots(keys, values)
        write_slots.append(mapping.write_slot)
        lengths.append(mapping.length)
        head_slots.append(mapping.head_slot)
        first_positions.append(mapping.first_position)
        window = mapping.window
        buffers = cache.take_buffers()
        key_buffers.append(buffers[0])
        value_buffers.append(buffers[1])
    output, new_keys, new_values = op(
        key_buffers,
        value_buffers,
        write_slots,
        lengths,
        head_slots,
        first_positions,
        window=window,
    )
    for cache, arrays in zip(caches, zip(new_keys, new_values, strict=True), strict=True):
        cache.return_buffers(*arrays)
    return output


def read_in_place(caches: Sequence[InPlaceCache], op: Callable[..., mx.array]) -> mx.array:
    """Returns the result of `op`, which receives the arguments of an `InPlaceOp` except the slots,
    and does not write the buffers."""
    mappings = [cache.map_slots() for cache in caches]
    buffers = [cache.get_buffers() for cache in caches]
    return op(
        [keys for keys, _ in buffers],
        [values for _, values in buffers],
        [mapping.length for mapping in mappings],
        [mapping.head_slot for mapping in mappings],
        [mapping.first_position for mapping in mappings],
        window=mappings[0].window,
    )


def score_buffer_bytes(layer: object, heads: int, length: int) -> int | None:
    """Returns an upper bound on the memory in bytes that `attend_in_place` needs for scores if a
    query of the layer attends to `length` positions. Each thread stores the scores of the queries
    that it is computing (src/attention_job.cpp). Returns None for a layer that does not use
    in-place attention."""
    ops = kernels.ops()
    if ops is None or not getattr(layer, "supports_in_place", False):
        return None
    rows = max(ops.max_rows_per_task(length), heads)
    # the newest query of a task may see as many keys more as the task has queries
    return ops.num_threads() * 4 * rows * (length + rows + 16)
