"""The slab layout: the keys and values of several sequences in one buffer per layer.

Knows: buffers, slots, the layer caches whose positions are copied. Must not know: sequences,
requests, which rows share a slab and when (app/engine/decode_slab.py, app/engine/decode_slab.py).

    slot 0   [ positions of a row ............. | zeros      ]
    slot 1   [ positions of another row .. | zeros           ]     masked by the length of each row
    slot 2   [ free: zeros, or what its last row left        ]

A decode step writes the new positions of all rows with one operation each for keys and values, and
computes the attention of all rows with one operation, however many rows there are. With separate
buffers (models/batch_cache.py), a GPU needs several operations per row. A row that joins is copied
to a free slot, and only its own slot is written. A row that leaves takes only its new positions
along.

The cache of a row does not change while the row is in a slab: it still contains the positions up
to the join, or up to the last `copy_out`, and is consistent at that length.

A slot with a window is a ring: position p is in place p modulo the window. Attention does not
depend on the order of positions, so the mask only hides places that were never written.
"""

from collections.abc import Hashable, Sequence

import mlx.core as mx

from models.batch_cache import AttentionRow, BatchKVCache
from models.kernels.in_place_attention import InPlaceCache
from models.kv import KVBuffers, KVCache, LayerCache, round_to
from models.rotating_kv import RotatingKVCache
from models.slab_step import SlabRow, SlabStep


def ring_size(like: KVBuffers, capacity: int) -> int:
    """Returns the number of places of a slot for `capacity` positions."""
    return min(capacity, like.window) if isinstance(like, RotatingKVCache) else capacity


class KVSlab:
    """The slab of an attention layer.

    The buffers are [slots * heads * capacity, dim], because one index per row and head then selects
    the place of a new position.
    """

    def __init__(self, like: KVCache | RotatingKVCache) -> None:
        """Creates a slab without slots. like: a cache of the layer with at least one position."""
        keys, values = like.state()
        self._slots = self._capacity = 0
        self._window = like.window if isinstance(like, RotatingKVCache) else None
        self._heads = keys.shape[1]
        self._dims = (keys.shape[3], values.shape[3])
        self._precision = like.precision
        self._attend_masked = type(like).attend_masked
        self._buffers = [mx.zeros((0, array.shape[3]), array.dtype) for array in (keys, values)]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def state(self) -> list[mx.array]:
        return list(self._buffers)

    def join(self, slot: int, cache: LayerCache, *, clear_to: int) -> None:
        assert isinstance(cache, KVCache | RotatingKVCache)
        kept = min(cache.offset, self._capacity)
        clear_to = min(clear_to, self._capacity)
        for index, array in enumerate(cache.latest(kept)):
            slab = self._take(index)
            for place, part in self._split(array, cache.offset - kept):
                slab[slot : slot + 1, :, place : place + part.shape[2]] = part
            if clear_to > kept:
                # A mask multiplies by zero, which does not hide an infinity.
                slab[slot : slot + 1, :, kept:clear_to] = 0
            self._put(index, slab)

    def copy_out(self, row: SlabRow, cache: LayerCache) -> None:
        assert isinstance(cache, KVCache | RotatingKVCache)
        if row.slot is None or cache.offset == row.offset:
            return
        kept = min(row.offset - cache.offset, self._capacity)
        if isinstance(cache, RotatingKVCache):
            cache.skip(row.offset - cache.offset - kept)
        first = (row.offset - kept) % self._capacity
        slices = [slice(first, min(first + kept, self._capacity))]
        if first + kept > self._capacity:
            slices.append(slice(0, first + kept - self._capacity))
        found: list[mx.array] = []
        for index in range(2):
            slab = self._view(index)
            parts = [slab[row.slot : row.slot + 1, :, part] for part in slices]
            found.append(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2))
        cache.update(found[0], found[1])

    def leave(self, key: Hashable) -> None:
        """Does nothing, because the next row of the slot overwrites it."""

    def grow(self, slots: int, capacity: int) -> None:
        new = capacity if self._window is None else min(capacity, self._window)
        for index, dim in enumerate(self._dims):
            if self._slots == 0:
                rows = slots * self._heads * new
                self._buffers[index] = mx.zeros((rows, dim), self._buffers[index].dtype)
                continue
            padding = [(0, slots - self._slots), (0, 0), (0, new - self._capacity), (0, 0)]
            self._buffers[index] = mx.pad(self._view(index), padding).reshape(-1, dim)
        self._slots, self._capacity = slots, new

    def make_batch(self, step: SlabStep, rows: Sequence[LayerCache]) -> "SlabKVCache":
        separate = [row for row in rows[step.num_placed :] if isinstance(row, KVBuffers)]
        assert len(separate) == len(rows) - step.num_placed
        return SlabKVCache(self, step, separate)

    def attend(
        self,
        step: SlabStep,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        softcap: float | None,
    ) -> mx.array:
        """Writes one new position per row, and computes the attention of all rows."""
        for index, given in enumerate((keys, values)):
            self._write(index, step, given)
        return self.attend_shared(step, queries, scale=scale, sinks=sinks, softcap=softcap)

    def attend_shared(
        self,
        step: SlabStep,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Computes the attention of all rows, whose new positions are written."""
        places = min(step.longest, self._capacity)
        arrays = [
            self._view(index)[: step.span, :, :places].astype(queries.dtype) for index in range(2)
        ]
        spread = step.spread() if step.has_holes else None
        if spread is not None:
            queries = mx.take(queries, spread[0], axis=0)
        seen = self._attend_masked(
            queries,
            arrays[0],
            arrays[1],
            step.mask(places),
            scale=scale,
            sinks=sinks,
            softcap=softcap,
        )
        return seen if spread is None else mx.take(seen, spread[1], axis=0)

    def _write(self, index: int, step: SlabStep, given: mx.array) -> None:
        buffer = self._buffers[index]
        dim = self._dims[index]
        if self._precision is not None:
            given = round_to(given, self._precision)
        given = given.astype(buffer.dtype).reshape(-1, dim)
        where = step.write_index(self._heads, self._capacity, dim)
        self._buffers[index] = mx.put_along_axis(buffer, where, given, axis=0)

    def _view(self, index: int) -> mx.array:
        """Returns a buffer as [slots, heads, capacity, dim]."""
        shape = (self._slots, self._heads, self._capacity, self._dims[index])
        return self._buffers[index].reshape(shape)

    def _take(self, index: int) -> mx.array:
        """Like `_view`, but drops the only reference to the buffer, so that writes to the result do
        not copy it. `_put` returns the result."""
        view = self._view(index)
        self._buffers[index] = view
        return view

    def _put(self, index: int, view: mx.array) -> None:
        self._buffers[index] = view.reshape(-1, self._dims[index])

    def _split(self, array: mx.array, start: int) -> list[tuple[int, mx.array]]:
        """Returns the parts of positions [start, start + L), and the place of each part in the
        ring."""
        place, length = start % self._capacity, array.shape[2]
        first = min(length, self._capacity - place)
        parts = [(place, array[:, :, :first])]
        return parts if first == length else [*parts, (0, array[:, :, first:])]


class SlabKVCache:
    """The cache that an attention layer uses in a decode step (`models.kv.AttentionCache`). The
    first rows are in the slab. separate: the caches of the other rows."""

    in_place_caches: Sequence[InPlaceCache] = ()

    def __init__(self, slab: KVSlab, step: SlabStep, separate: Sequence[AttentionRow]) -> None:
        self._slab, self._step = slab, step
        self._separate = BatchKVCache(separate, step.positions) if separate else None
        self.positions = step.positions

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
        placed = self._step.num_placed
        if self._separate is None:
            return self._slab.attend(
                self._step, queries, keys, values, scale=scale, sinks=sinks, softcap=softcap
            )
        seen = [
            self._separate.attend(
                queries[placed:],
                keys[placed:],
                values[placed:],
                scale=scale,
                sinks=sinks,
                softcap=softcap,
            )
        ]
        if placed:
            shared = self._slab.attend(
                self._step,
                queries[:placed],
                keys[:placed],
                values[:placed],
                scale=scale,
                sinks=sinks,
                softcap=softcap,
            )
            seen.insert(0, shared)
        return seen[0] if len(seen) == 1 else mx.concatenate(seen)

    def attend_shared(self, queries: mx.array, *, scale: float) -> mx.array:
        placed = self._step.num_placed
        seen: list[mx.array] = []
        if placed:
            seen.append(self._slab.attend_shared(self._step, queries[:placed], scale=scale))
        if self._separate is not None:
            seen.append(self._separate.attend_shared(queries[placed:], scale=scale))
        return seen[0] if len(seen) == 1 else mx.concatenate(seen)
