"""Attention that writes new keys and values directly into the caches' buffers.

Knows: the buffers that a cache passes (`InPlaceCache`), the kernels. Must not know: kinds of
caches. One operation computes all rows of a batch, or the many positions of one sequence; MLX needs
several operations per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from models import kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMapping:
    """Where the positions of a sequence, new ones included, are in a ring buffer of slots.

    length: number of positions. head_slot: slot of the oldest position; after the last slot, slots
    continue at 0. first_position: absolute position of the oldest. write_slot: first slot of the
    new positions, which are the newest. window: how many positions a query attends to, its own
    included; 0 for all.
    """

    write_slot: int
    length: int
    head_slot: int
    first_position: int
    window: int


class InPlaceCache(Protocol):
    """See `models.kv.KVBuffers`."""

    @property
    def supports_in_place(self) -> bool: ...

    def allocate_slots(self, keys: mx.array, values: mx.array) -> SlotMapping:
        """Only shapes and types of the arrays are used."""
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
    """Like `models.kv.AttentionCache.attend`, with a cache per row. Returns None, with nothing
    changed, if the kernels do not support it: other types or devices, several sequences in one
    cache, or a cache without `supports_in_place`."""
    ops = kernels.ops(queries, keys, values)
    if ops is None or len(caches) != len(queries) or not caches[0].supports_in_place:
        return None

    def attend(*lent: Any, window: int) -> AttentionResult:
        return ops.attend(
            queries,
            keys,
            values,
            *lent,
            scale=scale,
            window=window,
            sinks=sinks,
            softcap=softcap or 0.0,
        )

    return write_in_place(caches, keys[:1], values[:1], attend)


# the result, and the buffers of keys and of values with the new positions in them
AttentionResult = tuple[mx.array, list[mx.array], list[mx.array]]


class InPlaceOp(Protocol):
    """An operation that writes new positions to buffers, one cache per row."""

    def __call__(
        self,
        keys: list[mx.array],
        values: list[mx.array],
        slots: list[int],
        lengths: list[int],
        heads: list[int],
        firsts: list[int],
        /,
        *,
        window: int,
    ) -> AttentionResult: ...


def write_in_place(
    caches: Sequence[InPlaceCache], keys: mx.array, values: mx.array, op: InPlaceOp
) -> mx.array:
    """The result of `op`, which gets the caches' buffers with slots for what it writes. keys,
    values: see `InPlaceCache.allocate_slots`."""
    places = [cache.allocate_slots(keys, values) for cache in caches]
    buffers = [cache.take_buffers() for cache in caches]
    seen, new_keys, new_values = op(
        [keys for keys, _ in buffers],
        [values for _, values in buffers],
        [place.write_slot for place in places],
        [place.length for place in places],
        [place.head_slot for place in places],
        [place.first_position for place in places],
        window=places[0].window,
    )
    for cache, made in zip(caches, zip(new_keys, new_values, strict=True), strict=True):
        cache.return_buffers(*made)
    return seen


def score_buffer_bytes(layer: object, heads: int, length: int) -> int | None:
    """An upper bound of the bytes that `attend_in_place` needs for scores if a query of the layer
    attends to `length` positions: those of the queries that one thread computes at a time
    (src/attention_job.cpp), on each thread. None for a layer that does not use our attention."""
    ops = kernels.ops()
    if ops is None or not getattr(layer, "supports_in_place", False):
        return None
    return ops.threads() * 4 * max(24, heads) * (length + 32)
