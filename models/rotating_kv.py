"""The cache of a layer with sliding window attention.

Knows: tensors. Must not know: tokens, requests, policies. The cache implements the interface of
models/kv.py.
"""

from collections.abc import Sequence
from typing import NoReturn, Self

import mlx.core as mx

from models.batch_cache import BatchKVCache
from models.kernels.in_place_attention import SlotMapping
from models.kv import KVBuffers, grow_buffer, round_up_to_step
from models.sdpa import Mask


def window_mask(earlier: int, length: int, window: int | None) -> mx.array:
    """Returns a mask [length, earlier + length] of queries over their keys and `earlier` ones.
    window: the number of positions that a query attends to; None for all."""
    queries = mx.arange(earlier, earlier + length)[:, None]
    keys = mx.arange(earlier + length)[None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


class RotatingKVCache(KVBuffers):
    """The last `window` positions.

    A query at position p attends to p-window+1 .. p. The buffer has one of two layouts:

        in order   [ oldest ................ newest | spare     ]   head = 0, any length
        ring       [ .... newest | oldest ......... ]               head = slot of the oldest,
                                                                     length = window

    A single new position overwrites the oldest slot. Several new positions are appended in order
    after the last window-1 positions, so that the first new position can attend to its whole
    window. The next write of a single position drops the excess. Attention does not depend on the
    order, because rope encodes the positions in the keys. Only masks depend on the order, and a
    mask is needed only for a buffer in order.
    """

    sliceable = False
    windowed = True

    def __init__(self, window: int) -> None:
        assert window > 0
        super().__init__()
        self.window = window
        self._length = 0
        self._head = 0

    def mask(self, length: int) -> Mask:
        return self._mask(min(self._length, self.window - 1), length)

    def mask_last(self, length: int) -> Mask:
        return self._mask(self._length - length, length)

    def _mask(self, earlier: int, length: int) -> Mask:
        """Returns the mask of `length` queries over their keys and `earlier` ones."""
        if earlier + length <= self.window:
            return None if length == 1 else "causal"
        return window_mask(earlier, length, self.window)

    def read_all(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        return self.read(self._length, dtype)

    def map_slots(self) -> SlotMapping:
        return SlotMapping(
            write_slot=self._head,
            length=self._length,
            head_slot=self._head,
            first_position=self.offset - self._length,
            window=self.window,
        )

    def allocate_slots(self, keys: mx.array, values: mx.array) -> SlotMapping:
        count = keys.shape[2]
        slot = self._allocate_one(keys, values) if count == 1 else self._allocate_many(keys, values)
        self.offset += count
        return self.map_slots()._replace(write_slot=slot)

    def reserve(self, length: int) -> None:
        """Does nothing, because the window limits the size."""

    def estimate_nbytes(self, length: int, chunk: int) -> int:
        most = min(round_up_to_step(length + length // 2), round_up_to_step(self.window) + chunk)
        return self.position_bytes() * most

    def can_trim(self, count: int) -> bool:
        """Returns whether all positions that a query after the trim may attend to are still stored.

        held:   [offset - length, offset)
        needed: [max(0, cut - (window - 1)), cut)     where cut = offset - count
        """
        cut = self.offset - count
        return cut >= 0 and self.offset - self._length <= max(0, cut - (self.window - 1))

    def trim(self, count: int) -> None:
        assert self.can_trim(count)
        if count == 0:
            return
        self._unroll()
        self._length -= count
        self.offset -= count

    def copy(self) -> Self:
        twin = type(self)(self.window)
        twin.dtype = self.dtype
        twin.offset, twin._length, twin._head = self.offset, self._length, self._head
        if self._keys is not None and self._values is not None and self._length:
            twin._keys = mx.contiguous(self._keys[..., : self._length, :])
            twin._values = mx.contiguous(self._values[..., : self._length, :])
        return twin

    def latest(self, count: int) -> tuple[mx.array, mx.array]:
        assert count <= self._length
        self._unroll()
        assert self._keys is not None
        assert self._values is not None
        last = slice(self._length - count, self._length)
        return self._keys[..., last, :], self._values[..., last, :]

    def skip(self, count: int) -> None:
        """Advances past positions that no later query attends to. A whole window must follow."""
        if count:
            self._length = self._head = 0
            self.offset += count

    def slice(self, start: int, end: int) -> NoReturn:
        raise AssertionError("a windowed cache cannot be sliced")

    def append(self, other: "RotatingKVCache", start: int, end: int) -> NoReturn:
        raise AssertionError("a windowed cache cannot be appended to")

    def make_batch(self, rows: Sequence["RotatingKVCache"], positions: mx.array) -> BatchKVCache:
        return BatchKVCache(rows, positions)

    def _allocate_one(self, keys: mx.array, values: mx.array) -> int:
        """Returns the slot of one more position."""
        if self._length > self.window:
            self._keep_last(self.window)
        if self._length < self.window:
            self._unroll()
            self._grow_for_one(keys, values)
            self._length += 1
            return self._length - 1
        self._shrink_to_window()
        slot = self._head
        self._head = (self._head + 1) % self.window
        return slot

    def _allocate_many(self, keys: mx.array, values: mx.array) -> int:
        """Returns the first slot of several more positions."""
        self._keep_last(self.window - 1)
        slot = self._length
        self._length += keys.shape[2]
        if self._keys is None or self._values is None or self._keys.shape[2] < self._length:
            self._grow_to(self._length, keys, values, kept=slot)
        return slot

    def _grow_to(self, capacity: int, keys: mx.array, values: mx.array, *, kept: int) -> None:
        self._keys = grow_buffer(self._keys, keys, kept, capacity, self.storage_dtype(keys))
        self._values = grow_buffer(self._values, values, kept, capacity, self.storage_dtype(values))

    def _shrink_to_window(self) -> None:
        """Drops the spare capacity, because a ring buffer has none."""
        assert self._keys is not None
        assert self._values is not None
        if self._keys.shape[2] != self.window:
            self._keys = mx.contiguous(self._keys[..., : self.window, :])
            self._values = mx.contiguous(self._values[..., : self.window, :])

    def _grow_for_one(self, keys: mx.array, values: mx.array) -> None:
        capacity = 0 if self._keys is None else self._keys.shape[2]
        if self._length < capacity:
            return
        capacity = min(
            round_up_to_step(max(self._length + 1, capacity + capacity // 2)), self.window
        )
        self._grow_to(capacity, keys, values, kept=self._length)

    def _unroll(self) -> None:
        if self._head == 0:
            return
        assert self._keys is not None
        assert self._values is not None
        # a ring buffer is always full, so there is no spare capacity to keep
        self._keys = mx.roll(self._keys[..., : self._length, :], -self._head, 2)
        self._values = mx.roll(self._values[..., : self._length, :], -self._head, 2)
        self._head = 0

    def _keep_last(self, count: int) -> None:
        self._unroll()
        drop = self._length - count
        if drop <= 0 or self._keys is None or self._values is None:
            return
        # contiguous, because a slice would keep the long buffer in memory
        self._keys = mx.contiguous(self._keys[..., drop : self._length, :])
        self._values = mx.contiguous(self._values[..., drop : self._length, :])
        self._length = count
