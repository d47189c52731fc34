"""Attention that writes new keys and values into the caches' own buffers as it goes.

Knows: what a cache lends of itself (`Lender`), the kernels. Must not know: kinds of caches. One
operation does for all rows of a batch, or for one sequence's many positions, what MLX takes
several for, each of them for each row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from models import kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a buffer of `capacity` slots a sequence's positions lie, new ones included.

    `length` positions, the oldest of which stands at absolute position `first` and lies in slot
    `head`; slots go on at 0 behind the last. The new ones are the newest, and begin in `slot`.
    window: how many positions a query sees, its own included; 0 for all.
    """

    slot: int
    length: int
    head: int
    first: int
    window: int


class Lender(Protocol):
    """As `models.kv.Buffers`."""

    @property
    def lends(self) -> bool: ...

    def claim(self, keys: mx.array, values: mx.array) -> Place:
        """Of what it is given only shapes and types matter."""
        ...

    def taken(self) -> tuple[mx.array, mx.array]: ...

    def give(self, keys: mx.array, values: mx.array) -> None: ...


def attend_in_place(
    caches: Sequence[Lender],
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
    if ops is None or len(caches) != len(queries) or not caches[0].lends:
        return None

    def attend(*lent: Any, window: int) -> Attended:
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

    return written(caches, keys[:1], values[:1], attend)


# what comes out, and the buffers of keys and of values with the new positions in them
Attended = tuple[mx.array, list[mx.array], list[mx.array]]


class Writer(Protocol):
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
    ) -> Attended: ...


def written(caches: Sequence[Lender], keys: mx.array, values: mx.array, write: Writer) -> mx.array:
    """What comes out of `write`, which is lent the caches' buffers with room for what it writes.
    keys, values: as `Lender.claim` takes them, of each of the caches."""
    places = [cache.claim(keys, values) for cache in caches]
    buffers = [cache.taken() for cache in caches]
    seen, new_keys, new_values = write(
        [keys for keys, _ in buffers],
        [values for _, values in buffers],
        [place.slot for place in places],
        [place.length for place in places],
        [place.head for place in places],
        [place.first for place in places],
        window=places[0].window,
    )
    for cache, made in zip(caches, zip(new_keys, new_values, strict=True), strict=True):
        cache.give(*made)
    return seen


def score_bytes(layer: object, heads: int, seen: int) -> int | None:
    """At most so much does `attend_in_place` hold of scores, where a query of the layer sees `seen`
    positions: those of the queries that one thread has before it (src/attention_job.cpp), on each
    thread. None for a layer whose attention is not ours."""
    ops = kernels.ops()
    if ops is None or not getattr(layer, "lends", False):
        return None
    return ops.threads() * 4 * max(24, heads) * (seen + 32)
