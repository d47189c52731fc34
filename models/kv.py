"""What a layer remembers of one sequence: the contract, and the cache of every position.

Knows: tensors of shape [batch, heads, length, head_dim] and how to keep them as a sequence grows
and is cut back. Must not know: tokens, requests, policies. A cache holds one sequence (or several
of equal length, in the batch axis); `offset` is the number of positions it has seen. A cache is
cut back only when what remains is exactly what a shorter run would have left behind.

Other kinds: models/rotating_kv.py, models/recurrent.py. Rows of a batch: models/batch_cache.py.
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
    """The part of the contract that the prefix cache and the engine need. What `sliceable`,
    `piece`, `append` and `reserve` mean is told in app/core/ports.py, for those who use them."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes held, free room included."""
        ...

    @property
    def sliceable(self) -> bool:
        """Whether any range of positions can be taken out and appended to another cache."""
        ...

    def can_trim(self, count: int) -> bool: ...

    def trim(self, count: int) -> None:
        """Forget the last `count` positions. Only after `can_trim(count)`."""
        ...

    def copy(self) -> Self:
        """An independent cache with the same content and no free room."""
        ...

    def slice(self, start: int, end: int) -> Self: ...

    def append(self, other: Self, start: int, end: int) -> None: ...

    def reserve(self, length: int) -> None: ...

    def estimate_nbytes(self, length: int, chunk: int) -> int:
        """Bytes that it takes to evaluate `length` positions, at most `chunk` of them at a time.
        Known once something has been evaluated."""
        ...

    def state(self) -> list[mx.array]:
        """The arrays that must be evaluated for the cache to be real."""
        ...

    def make_batch(self, rows: Sequence[Self], offsets: mx.array) -> object:
        """What the layer is given in place of one cache when it evaluates one new position of
        several sequences at once; asked of the first. offsets: [B], those of the rows."""
        ...


class AttentionCache(Protocol):
    """What an attention layer asks of its cache, be it one sequence's or a batch's."""

    @property
    def offset(self) -> int | mx.array:
        """Position of the first new token; [B] in a batch."""
        ...

    @property
    def in_place_caches(self) -> Sequence[InPlaceCache]:
        """The caches that are here, one a sequence, where they lend their buffers; else none."""
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
        """Append new keys and values [B, Hkv, L, D]; what the queries [B, Hq, L, D] of the same
        positions see of all that is here: [B, Hq, L, D]. scale, sinks, softcap: as
        `models.sdpa.scaled_dot_product_attention` takes them."""
        ...


def round_up_to_step(length: int) -> int:
    """Up to whole steps, in which buffers grow."""
    return -(-length // STEP) * STEP


def grow_buffer(
    buffer: mx.array | None, template: mx.array, length: int, capacity: int
) -> mx.array:
    """A buffer with room for `capacity` positions, whose first `length` are those of `buffer`."""
    batch, heads, _, dim = template.shape
    room = capacity - length
    if buffer is None or length == 0:
        return mx.zeros((batch, heads, room, dim), template.dtype)
    # what is in free room is never read: anything will do, and a view costs no memory
    filler = buffer[..., :room, :]
    if room > buffer.shape[2]:
        filler = mx.zeros((batch, heads, room, dim), template.dtype)
    return mx.concatenate([buffer[..., :length, :], filler], axis=2)


class KVBuffers(ABC):
    """The keys and values of one layer, and how many positions it has seen.

    supports_in_place: whether what they hold are keys and values as attention takes them, so that
    it may write to the buffers itself.
    """

    supports_in_place = True

    def __init__(self) -> None:
        self.offset = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @abstractmethod
    def mask(self, length: int) -> Mask:
        """What `length` new queries may see of the keys that `update` will return."""

    @abstractmethod
    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [B, H, L, D] keys and values; return all that the L queries may need."""

    @abstractmethod
    def allocate_slots(self, keys: mx.array, values: mx.array) -> SlotMapping:
        """Room for positions like these, [1, H, L, D], which count as here from now on: who asks
        writes them there before anybody reads. Of these arrays only shape and type matter."""

    @property
    def in_place_caches(self) -> Sequence[InPlaceCache]:
        return (self,) if self.supports_in_place else ()

    def take_buffers(self) -> tuple[mx.array, mx.array]:
        """The buffers, which nobody else holds then, to be written to and given back by `give`."""
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
        """Bytes of one position's key and value."""
        assert self._keys is not None, "nothing has been evaluated yet"
        return self.nbytes // self._keys.shape[2]


class KVCache(KVBuffers):
    """Every position since the first.

    keys, values: [B, H, capacity, D]; positions offset.. are free room. Writing is in place
    as long as nobody else holds the buffer.
    """

    sliceable = True

    def __init__(self) -> None:
        super().__init__()
        self._reserved = 0

    def mask(self, length: int) -> Mask:
        return None if length == 1 else "causal"

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [B, H, L, D] keys and values; return all that there are."""
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
        # taken up by the next write, which knows the shapes
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
            # contiguous: a mere slice would keep this cache's whole buffer alive
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
        """Forget positions [start, end); those behind move up to `start`. turn(keys, n): rotates
        keys [B, H, L, D] by n positions, since a rotary key carries the position it stands at."""
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
        """Room for all `offset` positions, of which the first `kept` are here. Half as much again
        unless told how much: n appended tokens copy O(n) tokens in all."""
        needed = self.offset
        current = 0 if self._keys is None else self._keys.shape[2]
        capacity = self._reserved
        if capacity < needed:
            capacity = round_up_to_step(max(needed, current + current // 2))
        self._keys = grow_buffer(self._keys, keys, kept, capacity)
        self._values = grow_buffer(self._values, values, kept, capacity)
