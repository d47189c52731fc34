"""The interface of layer caches, and the cache of all positions.

Knows: tensors of shape [batch, heads, length, head_dim], their storage while a sequence grows and
is trimmed. Must not know: tokens, requests, policies.

A cache contains one sequence, or several sequences of equal length along the batch axis. `offset`
is the number of positions computed so far. A cache may be trimmed only if the result is exactly the
same as after a shorter run.

models/rotating_kv.py and models/recurrent.py contain the other types of caches, and
models/batch_cache.py contains batches of caches.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import mlx.core as mx

from models.batch_cache import BatchKVCache
from models.kernels.in_place_attention import InPlaceCache, SlotMapping, attend_in_place
from models.sdpa import Mask, scaled_dot_product_attention

STEP = 256


class LayerCache(Protocol):
    """The part of the interface that the prefix cache and the engine use. app/core/ports.py
    documents `sliceable`, `slice`, `append` and `reserve`."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """The number of bytes held, including spare capacity."""
        ...

    @property
    def sliceable(self) -> bool:
        """Whether any range of positions can be copied and appended to another cache."""
        ...

    def can_trim(self, count: int) -> bool: ...

    def trim(self, count: int) -> None:
        """Removes the last `count` positions. Valid only if `can_trim(count)` is true."""
        ...

    def copy(self) -> Self:
        """Returns an independent cache with the same content and no spare capacity."""
        ...

    def slice(self, start: int, end: int) -> Self: ...

    def append(self, other: Self, start: int, end: int) -> None: ...

    def reserve(self, length: int) -> None: ...

    def estimate_nbytes(self, length: int, chunk: int) -> int:
        """Returns the number of bytes needed to compute `length` positions, at most `chunk` of them
        at a time. Available after at least one position has been computed."""
        ...

    def state(self) -> list[mx.array]:
        """Returns the arrays that must be evaluated to evaluate the cache."""
        ...

    def make_batch(self, rows: Sequence[Self], offsets: mx.array) -> object:
        """Returns the cache for computing one new position of several sequences together. Called on
        the first row. offsets: the offsets of the rows, [B]."""
        ...


class AttentionCache(Protocol):
    """The interface that an attention layer uses, for one sequence or a batch."""

    @property
    def offset(self) -> int | mx.array:
        """The position of the first new token, or [B] for a batch."""
        ...

    @property
    def in_place_caches(self) -> Sequence[InPlaceCache]:
        """The caches, one per sequence, if their buffers can be written in place, otherwise
        empty."""
        ...

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
        """Appends new keys and values [B, Hkv, L, D], and computes attention from the queries [B,
        Hq, L, D] of the same positions to all cached positions. Returns [B, Hq, L, D]. scale,
        sinks, softcap: see `models.sdpa.scaled_dot_product_attention`."""
        ...


def round_up_to_step(length: int) -> int:
    """Rounds up to a multiple of STEP, the growth increment of buffers."""
    return -(-length // STEP) * STEP


def grow_buffer(
    buffer: mx.array | None, template: mx.array, length: int, capacity: int
) -> mx.array:
    """Returns a buffer for `capacity` positions. The first `length` positions are copied from
    `buffer`."""
    batch, heads, _, dim = template.shape
    room = capacity - length
    if buffer is None or length == 0:
        return mx.zeros((batch, heads, room, dim), template.dtype)
    # spare capacity is never read, so its content is arbitrary, and a view needs no memory
    filler = buffer[..., :room, :]
    if room > buffer.shape[2]:
        filler = mx.zeros((batch, heads, room, dim), template.dtype)
    return mx.concatenate([buffer[..., :length, :], filler], axis=2)


class KVBuffers(ABC):
    """The keys and values of one layer, and the number of computed positions.

    supports_in_place: whether the buffers have the layout of the attention kernel, so that the
    kernel may write to them.
    """

    supports_in_place = True

    def __init__(self) -> None:
        self.offset = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @abstractmethod
    def mask(self, length: int) -> Mask:
        """Returns the mask of `length` new queries over the keys that `update` will return."""

    @abstractmethod
    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends keys and values [B, H, L, D]. Returns all keys and values that the L queries may
        attend to."""

    @abstractmethod
    def allocate_slots(self, keys: mx.array, values: mx.array) -> SlotMapping:
        """Allocates slots for positions of these shapes, [1, H, L, D]. From now on, these positions
        count as cached, so the caller must write them before they are read. Only the shapes and
        types of the arrays are used."""

    @property
    def in_place_caches(self) -> Sequence[InPlaceCache]:
        return (self,) if self.supports_in_place else ()

    def take_buffers(self) -> tuple[mx.array, mx.array]:
        """Hands over the only references to the buffers. The caller writes to the buffers and
        returns them with `return_buffers`."""
        keys, values = self._keys, self._values
        assert keys is not None
        assert values is not None
        self._keys = self._values = None
        return keys, values

    def return_buffers(self, keys: mx.array, values: mx.array) -> None:
        self._keys, self._values = keys, values

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
            [self], queries, keys, values, scale=scale, sinks=sinks, softcap=softcap
        )
        if seen is not None:
            return seen
        mask = self.mask(queries.shape[2])
        keys, values = self.update(keys, values)
        return scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks, softcap=softcap
        )

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state())

    def state(self) -> list[mx.array]:
        return [array for array in (self._keys, self._values) if array is not None]

    def position_bytes(self) -> int:
        """Returns the number of bytes of one position's key and value."""
        assert self._keys is not None, "no position has been computed yet"
        return self.nbytes // self._keys.shape[2]


class KVCache(KVBuffers):
    """All positions of a sequence.

    keys, values: [B, H, capacity, D]. Slots from `offset` on are spare capacity. Writes are in
    place unless another reference to the buffer exists.
    """

    sliceable = True

    def __init__(self) -> None:
        super().__init__()
        self._reserved = 0

    def mask(self, length: int) -> Mask:
        return None if length == 1 else "causal"

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends keys and values [B, H, L, D]. Returns all keys and values."""
        place = self.allocate_slots(keys, values)
        assert self._keys is not None
        assert self._values is not None
        self._keys[..., place.write_slot : self.offset, :] = keys
        self._values[..., place.write_slot : self.offset, :] = values
        return self._keys[..., : self.offset, :], self._values[..., : self.offset, :]

    def allocate_slots(self, keys: mx.array, values: mx.array) -> SlotMapping:
        slot, self.offset = self.offset, self.offset + keys.shape[2]
        if self._keys is None or self._values is None or self.offset > self._keys.shape[2]:
            self._grow(slot, keys, values)
        return SlotMapping(
            write_slot=slot, length=self.offset, head_slot=0, first_position=0, window=0
        )

    def reserve(self, length: int) -> None:
        # applied by the next write, because the shapes are not known here
        self._reserved = max(self._reserved, round_up_to_step(length))

    def estimate_nbytes(self, length: int, chunk: int) -> int:
        return self.position_bytes() * round_up_to_step(length)

    def can_trim(self, count: int) -> bool:
        return count <= self.offset

    def trim(self, count: int) -> None:
        assert self.can_trim(count)
        self.offset -= count

    def copy(self) -> Self:
        return self.slice(0, self.offset)

    def slice(self, start: int, end: int) -> Self:
        assert 0 <= start <= end <= self.offset
        twin = type(self)()
        twin.offset = end - start
        if self._keys is not None and self._values is not None and start < end:
            # contiguous, because a slice would keep this cache's whole buffer in memory
            twin._keys = mx.contiguous(self._keys[..., start:end, :])
            twin._values = mx.contiguous(self._values[..., start:end, :])
        return twin

    def append(self, other: "KVCache", start: int, end: int) -> None:
        assert 0 <= start <= end <= other.offset
        if start < end:
            assert other._keys is not None
            assert other._values is not None
            self.update(other._keys[..., start:end, :], other._values[..., start:end, :])

    def remove(self, start: int, end: int, rerotate: Callable[[mx.array, int], mx.array]) -> None:
        """Removes positions [start, end). The later positions move up to `start`. rerotate(keys,
        n): rotates keys [B, H, L, D] by n positions, because rotary keys contain their position."""
        assert 0 <= start <= end <= self.offset
        if start == end or self._keys is None or self._values is None:
            return
        capacity, moved = self._keys.shape[2], self.offset - end
        keys = rerotate(self._keys[..., end : self.offset, :], start - end)
        values = mx.contiguous(self._values[..., end : self.offset, :])
        self._keys = grow_buffer(self._keys, keys, start, capacity)
        self._values = grow_buffer(self._values, values, start, capacity)
        self.offset = start
        if moved:
            self.update(keys, values)

    def make_batch(self, rows: Sequence["KVCache"], offsets: mx.array) -> BatchKVCache:
        return BatchKVCache(rows, offsets)

    def _grow(self, kept: int, keys: mx.array, values: mx.array) -> None:
        """Grows the buffers to hold `offset` positions. The first `kept` positions are copied.
        Without a reserved capacity, the buffers grow by half, so that appending n tokens copies
        O(n) tokens in total."""
        needed = self.offset
        current = 0 if self._keys is None else self._keys.shape[2]
        capacity = self._reserved
        if capacity < needed:
            capacity = round_up_to_step(max(needed, current + current // 2))
        self._keys = grow_buffer(self._keys, keys, kept, capacity)
        self._values = grow_buffer(self._values, values, kept, capacity)


def evaluate_caches(layers: Sequence[LayerCache]) -> None:
    mx.eval([layer.state() for layer in layers])
