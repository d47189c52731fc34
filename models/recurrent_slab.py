"""The recurrent states of the rows of a batch, which stay batched between decode steps.

Knows: states by slot, the rows of a step. Must not know: sequences, requests, attention.

`models.batch_cache.BatchRecurrentCache` concatenates the states of all rows before each step and
splits them afterwards. Here, the states remain one array [B, ...] for as long as the rows are the
same. If a row joins or leaves, all states are copied once, because a state has a constant size and
is replaced as a whole in each step anyway.
"""

from collections.abc import Hashable, Sequence

import mlx.core as mx

from models.kv import LayerCache
from models.recurrent import RecurrentCache
from models.slab_step import SlabRow, SlabStep


class RecurrentSlab:
    """The states of one recurrent layer. Layers use it like a `RecurrentCache` with B rows. All
    rows of a step take part, with or without a slot for attention."""

    def __init__(self) -> None:
        self._keys: tuple[Hashable, ...] = ()
        self._states: list[mx.array] = []

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._states)

    def state(self) -> list[mx.array]:
        return list(self._states)

    def join(self, slot: int, cache: LayerCache, *, clear_to: int) -> None:
        """Does nothing, because `make_batch` adds the new rows of a step."""

    def copy_out(self, row: SlabRow, cache: LayerCache) -> None:
        assert isinstance(cache, RecurrentCache)
        if row.key not in self._keys or cache.offset == row.offset:
            return
        place = self._keys.index(row.key)
        for slot, states in enumerate(self._states):
            # contiguous, because a slice would keep the states of all rows in memory
            cache[slot] = mx.contiguous(states[place : place + 1])
        cache.advance(row.offset - cache.offset)

    def leave(self, key: Hashable) -> None:
        if key in self._keys:
            self._select([other for other in self._keys if other != key], [])

    def grow(self, slots: int, capacity: int) -> None:
        """Does nothing, because the number of states is the number of rows."""

    def make_batch(self, step: SlabStep, rows: Sequence[LayerCache]) -> "RecurrentSlab":
        known = set(self._keys)
        keys = [row.key for row in step.rows]
        joining = [
            (key, row)
            for key, row in zip(keys, rows, strict=True)
            if key not in known and isinstance(row, RecurrentCache)
        ]
        if joining or keys != list(self._keys):
            self._select(keys, joining)
        return self

    def __getitem__(self, slot: int) -> mx.array:
        return self._states[slot]

    def __setitem__(self, slot: int, value: mx.array) -> None:
        self._states[slot] = value

    def row_states(self, slot: int) -> list[mx.array]:
        """See `RecurrentCache.row_states`."""
        return [self._states[slot]]

    def set_row_states(self, slot: int, states: Sequence[mx.array]) -> None:
        [self._states[slot]] = states

    def advance(self, length: int) -> None:
        """Does nothing, because `copy_out` receives the number of positions."""

    def _select(
        self, keys: Sequence[Hashable], joining: Sequence[tuple[Hashable, RecurrentCache]]
    ) -> None:
        """Makes these the rows, in this order."""
        sources = [*self._keys, *(key for key, _ in joining)]
        order = mx.array([sources.index(key) for key in keys], dtype=mx.int32)
        count = joining[0][1].num_slots if joining else len(self._states)
        found: list[mx.array] = []
        for slot in range(count):
            parts = self._states[slot : slot + 1]
            for _, cache in joining:
                state = cache[slot]
                assert state is not None, "a sequence must be prefilled before it decodes"
                parts.append(state)
            found.append(mx.take(mx.concatenate(parts), order, axis=0))
        self._keys, self._states = tuple(keys), found
