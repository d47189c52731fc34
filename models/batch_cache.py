"""Batches of layer caches: what a layer gets in place of one cache when it evaluates several
sequences.

Knows: that every row has a cache of its own. Must not know: kinds of caches, which sequences they
belong to.

Weights are applied to all rows at once; attention and states are computed for each row (on a CPU
one operation attends for all rows), on buffers that belong to that row alone. So a row can join or
leave between any two steps without copying (measured against padded and paged layouts:
docs/decisions/engine.md).

Every row evaluates exactly one new position.
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from models.kernels.in_place_attention import InPlaceCache, attend_in_place


class _AttentionRow(InPlaceCache, Protocol):
    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array: ...


class _RecurrentRow(Protocol):
    def __getitem__(self, slot: int) -> mx.array | None: ...

    def __setitem__(self, slot: int, value: mx.array) -> None: ...

    def advance(self, length: int) -> None: ...


class BatchKVCache:
    """The attention caches of a batch. offset: [B]."""

    def __init__(self, rows: Sequence[_AttentionRow], offsets: mx.array) -> None:
        self._rows = rows
        self.offset = offsets

    @property
    def in_place_caches(self) -> Sequence[InPlaceCache]:
        return self._rows if self._rows[0].supports_in_place else ()

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        seen = attend_in_place(
            self._rows, queries, keys, values, scale=scale, sinks=sinks, softcap=softcap
        )
        if seen is not None:
            return seen
        count = len(self._rows)
        parts = zip(*(mx.split(array, count) for array in (queries, keys, values)), strict=True)
        return mx.concatenate(
            [
                row.attend(q, k, v, scale=scale, sinks=sinks, softcap=softcap)
                for row, (q, k, v) in zip(self._rows, parts, strict=True)
            ]
        )


class BatchRecurrentCache:
    """The recurrent states of a batch, each [B, ...]. offset: [B]."""

    def __init__(self, rows: Sequence[_RecurrentRow], offsets: mx.array) -> None:
        self._rows = rows
        self.offset = offsets

    def __getitem__(self, slot: int) -> mx.array | None:
        states = [row[slot] for row in self._rows]
        known = [state for state in states if state is not None]
        if not known:
            return None
        assert len(known) == len(states), "a sequence decodes only once it was prefilled"
        return mx.concatenate(known)

    def __setitem__(self, slot: int, value: mx.array) -> None:
        for row, state in zip(self._rows, mx.split(value, len(self._rows)), strict=True):
            row[slot] = state

    def advance(self, length: int) -> None:
        for row in self._rows:
            row.advance(length)
