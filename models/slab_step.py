"""A decode step over slabs: its rows, the arrays that all layers share, and the interface of a
layer's slab.

Knows: slots, lengths. Must not know: the content of slabs, sequences, requests. models/kv_slab.py
describes the layout.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from models.kv import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabRow:
    """A row of a decode step. slot: None if the row keeps its separate caches, because its length
    is too different. offset: the number of positions before the new one. position_delta: see
    `models.kv.set_position_delta`."""

    key: Hashable
    slot: int | None
    offset: int
    position_delta: int = 0


class SlabStep:
    """The rows of a decode step, and the arrays that all layers share.

    rows: the rows in a slot come first, in the order of their slots.
    positions: see `models.kv.AttentionCache`, [B].
    num_placed: the number of rows in a slot.
    span: the number of slots that attention covers, up to the last one in use.
    longest: the number of positions of the longest row in a slot, including the new one.
    """

    def __init__(self, rows: Sequence[SlabRow]) -> None:
        self.rows = rows
        self.positions = mx.array([row.offset + row.position_delta for row in rows])
        self._places = [(row.slot, row.offset) for row in rows if row.slot is not None]
        slots = [slot for slot, _ in self._places]
        assert slots == sorted(set(slots)), "the rows are not in the order of their slots"
        self.num_placed = len(slots)
        self.span = slots[-1] + 1 if slots else 0
        self.longest = max((offset for _, offset in self._places), default=0) + 1
        self._indexes: dict[tuple[int, int, int], mx.array] = {}
        self._masks: dict[int, mx.array] = {}
        self._spread: tuple[mx.array, mx.array] | None = None

    @property
    def has_holes(self) -> bool:
        """Whether free slots lie between the slots of the rows."""
        return self.span != self.num_placed

    def write_index(self, heads: int, capacity: int, dim: int) -> mx.array:
        """Returns the places of the new positions in a buffer [slots * heads * capacity, dim], as
        [rows * heads, dim]."""
        found = self._indexes.get((heads, capacity, dim))
        if found is None:
            places = [
                [(slot * heads + head) * capacity + offset % capacity]
                for slot, offset in self._places
                for head in range(heads)
            ]
            found = mx.broadcast_to(mx.array(places), (len(places), dim))
            self._indexes[heads, capacity, dim] = found
        return found

    def mask(self, places: int) -> mx.array:
        """Returns which of the first places of each slot contain a position, [span, 1, 1,
        places]."""
        if places not in self._masks:
            # A free slot shows its first place, because a softmax over nothing is NaN.
            last = [0] * self.span
            for slot, offset in self._places:
                last[slot] = min(offset, places - 1)
            self._masks[places] = mx.arange(places) <= mx.array(last)[:, None, None, None]
        return self._masks[places]

    def spread(self) -> tuple[mx.array, mx.array]:
        """Returns the row of each slot of the span, where free slots repeat a row, and the slot of
        each row."""
        if self._spread is None:
            rows = [0] * self.span
            for row, (slot, _) in enumerate(self._places):
                rows[slot] = row
            self._spread = mx.array(rows), mx.array([slot for slot, _ in self._places])
        return self._spread


class LayerSlab(Protocol):
    """The slab of one layer."""

    @property
    def nbytes(self) -> int: ...

    def join(self, slot: int, cache: LayerCache, *, clear_to: int) -> None:
        """Copies the positions of a cache to a free slot. clear_to: the number of places that
        earlier rows may have written."""
        ...

    def copy_out(self, row: SlabRow, cache: LayerCache) -> None:
        """Appends the positions that the cache of the row does not contain yet."""
        ...

    def leave(self, key: Hashable) -> None:
        """Forgets a row, without `copy_out`."""
        ...

    def grow(self, slots: int, capacity: int) -> None:
        """Grows to this number of slots and of positions per slot, which copies the slab."""
        ...

    def make_batch(self, step: SlabStep, rows: Sequence[LayerCache]) -> object:
        """Returns the cache for one new position of each row. See `LayerCache.make_batch`. rows:
        the separate caches of all rows of the step."""
        ...

    def state(self) -> list[mx.array]: ...
