"""Batches of layer caches. A layer receives a batch instead of a single cache when it computes
several sequences.

Knows: rows with separate caches. Must not know: the types of caches, sequences.

Weights are applied to all rows together. Attention and recurrent states are computed per row, in
buffers that are not shared between rows. On a CPU, one operation computes attention for all rows. A
row can therefore join or leave the batch between any two steps without copying.
docs/decisions/engine.md compares this design with padded and paged layouts.

`BatchKVCache` and `BatchRecurrentCache` compute exactly one new position per row.
`PackedKVCache` computes several new positions of each sequence, for prompts of different lengths:

    tokens    [ prompt A ............ | prompt B .... | prompt C . ]    [T, 1], one position per row
    weights   [------------------- one product for all ------------]
    attention [ A · cache A           | B · cache B   | C · cache C]
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import mlx.core as mx

from models.kernels.in_place_attention import (
    InPlaceCache,
    attend_in_place,
    attend_shared_in_place,
)


class AttentionRow(InPlaceCache, Protocol):
    """The cache of one sequence's attention layer."""

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

    def attend_shared(self, queries: mx.array, *, scale: float) -> mx.array: ...


class _RecurrentRow(Protocol):
    def __getitem__(self, slot: int) -> mx.array | None: ...

    def __setitem__(self, slot: int, value: mx.array) -> None: ...

    def advance(self, length: int) -> None: ...


class BatchKVCache:
    """The attention caches of a batch. positions: the position of each row's new
    token, [B]; see `models.kv.AttentionCache`."""

    def __init__(self, rows: Sequence[AttentionRow], positions: mx.array) -> None:
        self._rows = rows
        self.positions = positions

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

    def attend_shared(self, queries: mx.array, *, scale: float) -> mx.array:
        seen = attend_shared_in_place(self._rows, queries, scale=scale)
        if seen is not None:
            return seen
        parts = mx.split(queries, len(self._rows))
        return mx.concatenate(
            [
                row.attend_shared(part, scale=scale)
                for row, part in zip(self._rows, parts, strict=True)
            ]
        )


class PackedKVCache:
    """The attention caches of several sequences, each with several new positions. The layer gets
    all positions as rows, so it needs no padding.

    lengths: the number of new positions of each sequence. positions: the position of each
    row, [T]; see
    `models.kv.AttentionCache`.
    """

    in_place_caches: Sequence[InPlaceCache] = ()

    def __init__(
        self, sequences: Sequence[AttentionRow], lengths: Sequence[int], positions: mx.array
    ) -> None:
        self._sequences = sequences
        self._ranges = list(pairwise(accumulate(lengths, initial=0)))
        self.positions = positions

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
        parts = list[mx.array]()
        for sequence, (start, end) in zip(self._sequences, self._ranges, strict=True):
            # [L, H, 1, D] → [1, H, L, D]
            q, k, v = (x[start:end].transpose(2, 1, 0, 3) for x in (queries, keys, values))
            seen = sequence.attend(q, k, v, scale=scale, sinks=sinks, softcap=softcap)
            parts.append(seen.transpose(2, 1, 0, 3))
        return mx.concatenate(parts)

    def attend_shared(self, queries: mx.array, *, scale: float) -> mx.array:
        parts = list[mx.array]()
        for sequence, (start, end) in zip(self._sequences, self._ranges, strict=True):
            seen = sequence.attend_shared(queries[start:end].transpose(2, 1, 0, 3), scale=scale)
            parts.append(seen.transpose(2, 1, 0, 3))
        return mx.concatenate(parts)


class BatchRecurrentCache:
    """The recurrent states of a batch, each [B, ...]."""

    def __init__(self, rows: Sequence[_RecurrentRow]) -> None:
        self._rows = rows

    def __getitem__(self, slot: int) -> mx.array | None:
        states = [row[slot] for row in self._rows]
        known = [state for state in states if state is not None]
        if not known:
            return None
        assert len(known) == len(states), "a sequence must be prefilled before it decodes"
        return mx.concatenate(known)

    def __setitem__(self, slot: int, value: mx.array) -> None:
        for row, state in zip(self._rows, mx.split(value, len(self._rows)), strict=True):
            row[slot] = state

    def row_states(self, slot: int) -> list[mx.array | None]:
        """See `models.recurrent.RecurrentCache.row_states`. Nothing is concatenated."""
        return [row[slot] for row in self._rows]

    def set_row_states(self, slot: int, states: Sequence[mx.array]) -> None:
        for row, state in zip(self._rows, states, strict=True):
            row[slot] = state

    def advance(self, length: int) -> None:
        for row in self._rows:
            row.advance(length)
