"""Attention that writes new keys and values into the caches' own buffers as it goes.

Knows: what a cache lends of itself (`InPlaceCache`), the kernels. Must not know: kinds of caches.
One operation does for all rows of a batch, or for one sequence's many positions, what MLX takes
several for, each of them for each row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from models import kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMapping:
    """Where in a buffer of `capacity` slots a sequence's positions lie, new ones included.

    `length` positions, the oldest of which stands at absolute position `first_position` and lies in
    slot `head_slot`; slots go on at 0 behind the last. The new ones are the newest, and begin in
    `write_slot`. window: how many positions a query sees, its own included; 0 for all.
    """

    write_slot: int
    length: int
    head_slot: int
    first_position: int
    window: int


class InPlaceCache(Protocol):
    """As `models.kv.KVBuffers`."""

    @property
    def supports_in_place(self) -> bool: ...

    def allocate_slots(self, keys: mx.array, values: mx.array) -> SlotMapping:
        """Of what it is given only shapes and types matter."""
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
    """What `models.kv.AttentionCache.attend` says, of a cache a row; None, and nothing has
    changed, where the kernels cannot: other types or devices, several sequences in one
    cache, a cache that does not lend."""
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


# what comes out, and the buffers of keys and of values with the new positions in them
AttentionResult = tuple[mx.array, list[mx.array], list[mx.array]]


class InPlaceOp(Protocol):
    """An operation that writes new positions to buffers, a row a cache."""

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
    """What comes out of `op`, which is lent the caches' buffers with room for what it writes.
    keys, values: as `InPlaceCache.allocate_slots` takes them, of each of the caches."""
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
    """At most so much does `attend_in_place` hold of scores, where a query of the layer sees
    `length` positions: those of the queries that one thread has before it (src/attention_job.cpp),
    on each thread. None for a layer whose attention is not ours."""
    ops = kernels.ops()
    if ops is None or not getattr(layer, "supports_in_place", False):
        return None
    return ops.threads() * 4 * max(24, heads) * (length + 32)
