"""The interface of layer caches, and the cache of all positions.

Knows: tensors of shape [batch, heads, length, head_dim], their storage while a sequence grows and
is trimmed. Must not know: tokens, requests, policies.

A cache contains one sequence, or several sequences of equal length along the batch axis. `offset`
is the number of positions computed so far. A cache may be trimmed only if the result is exactly the
same as after a shorter run.

models/rotating_kv.py and models/recurrent.py contain the other types of caches, and
models/batch_cache.py contains batches of caches.

Keys and values have the type of the activations, or a type of 16 bits (`set_kv_dtype`). In the
second case, a number is rounded once, when it is written. Every query sees the rounded numbers,
including the queries that are computed together with them. Therefore the results do not depend on
chunks or batches, nor on whether a position was copied from another cache. The kernels read 16-bit
buffers directly. Without them, the rounded numbers are stored in the type of the activations,
because MLX's operations would convert the whole cache in each step, which takes longer than
attention.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, Self

import mlx.core as mx

from models import kernels
from models.attention_route import AttentionShape
from models.batch_cache import BatchKVCache
from models.kernels.in_place_attention import (
    InPlaceCache,
    SlotMapping,
    attend_in_place,
    attend_shared_in_place,
)
from models.layer_cache import LayerKV
from models.sdpa import Mask, describe_attention, scaled_dot_product_attention

STEP = 256

LARGEST_FLOAT16 = 65504.0

# The positions of new tokens: that of the first one, or [B] with one per row, or [3, L] with three
# per token of a single sequence (models/mrope.py).
Positions = int | mx.array


class LayerCache(LayerKV, Protocol):
    """The part of the interface that the engine uses."""

    @property
    def attention_shapes(self) -> Sequence[AttentionShape]:
        """The shapes of the attention over this cache, once several positions have been computed
        together. Empty without attention, and in a copy."""
        ...

    def set_dtype(self, dtype: mx.Dtype | None) -> None:
        """See `set_kv_dtype`. Called before the first position is computed."""
        ...

    def estimate_nbytes(self, length: int, chunk: int) -> int:
        """Returns the number of bytes needed to compute `length` positions, at most `chunk` of them
        at a time. Available after at least one position has been computed."""
        ...

    def state(self) -> list[mx.array]:
        """Returns the arrays that must be evaluated to evaluate the cache."""
        ...

    def make_batch(self, rows: Sequence[Self], positions: mx.array) -> object:
        """Returns the cache for computing one new position of several sequences together. Called on
        the first row. positions: those of the new tokens, see `AttentionCache.positions`, [B]."""
        ...


class AttentionCache(Protocol):
    """The interface that an attention layer uses, for one sequence or a batch."""

    @property
    def positions(self) -> Positions:
        """The positions of the new tokens for rope. They are not the indexes of the tokens after an
        image with M-RoPE (models/mrope.py)."""
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

    def attend_shared(self, queries: mx.array, *, scale: float) -> mx.array:
        """Computes attention from queries [B, Hq, L, D] of another layer, which has no keys, to all
        cached positions. The positions of the queries are the last ones that `attend` appended.
        Returns [B, Hq, L, D]."""
        ...


def round_up_to_step(length: int) -> int:
    """Rounds up to a multiple of STEP, the growth increment of buffers."""
    return -(-length // STEP) * STEP


def set_kv_dtype(caches: Sequence[LayerCache], dtype: mx.Dtype | None) -> None:
    """Selects the type to which keys and values are rounded. None: the type of the activations. A
    type that is not narrower than the activations has no effect, because it would not save memory.
    Recurrent states keep their type, because they accumulate rounding errors."""
    for cache in caches:
        cache.set_dtype(dtype)


def set_position_delta(caches: Sequence[LayerCache], delta: int) -> None:
    """Sets the position of the next token of a sequence minus its index, for the following passes.
    It differs from 0 only after an image with M-RoPE (`models.mrope.find_delta`). It is a property
    of the sequence and not of the cached positions, so copies and slices do not have it."""
    for cache in caches:
        if isinstance(cache, KVBuffers):
            cache.position_delta = delta


def get_position_delta(caches: Sequence[LayerCache]) -> int:
    """Returns the delta of `set_position_delta`, or 0 without attention."""
    return next((cache.position_delta for cache in caches if isinstance(cache, KVBuffers)), 0)


def round_to(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Converts keys or values to the type of a cache, like the kernels. Numbers beyond the range of
    float16 become its largest finite number, because an infinity would make all later attention
    NaN."""
    if dtype == mx.float16 and array.dtype != mx.float16:
        array = mx.clip(array, -LARGEST_FLOAT16, LARGEST_FLOAT16)
    return array.astype(dtype)


def _narrower(own: mx.Dtype | None, other: mx.Dtype) -> mx.Dtype:
    return own if own is not None and own.size < other.size else other


def grow_buffer(
    buffer: mx.array | None, template: mx.array, length: int, capacity: int, dtype: mx.Dtype
) -> mx.array:
    """Returns a buffer for `capacity` positions of the type `dtype`. The first `length` positions
    are copied from `buffer`."""
    batch, heads, _, dim = template.shape
    room = capacity - length
    if buffer is None or length == 0:
        return mx.zeros((batch, heads, room, dim), dtype)
    # spare capacity is never read, so its content is arbitrary, and a view needs no memory
    filler = buffer[..., :room, :]
    if room > buffer.shape[2]:
        filler = mx.zeros((batch, heads, room, dim), dtype)
    return mx.concatenate([buffer[..., :length, :], filler], axis=2)


class KVBuffers(ABC):
    """The keys and values of one layer, and the number of computed positions.

    supports_in_place: whether the buffers have the layout of the attention kernel, so that the
    kernel may write to them. dtype: see `set_kv_dtype`. windowed: whether the mask may be an array.
    absorbed: whether decode steps compute latent attention (models/mla.py). attention_shapes: see
    `LayerCache`. position_delta: see `set_position_delta`.
    """

    supports_in_place = True
    windowed = False
    absorbed = False

    def __init__(self) -> None:
        self.offset = 0
        self.position_delta = 0
        self.dtype: mx.Dtype | None = None
        self.attention_shapes: tuple[AttentionShape, ...] = ()
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @property
    def positions(self) -> int:
        return self.offset + self.position_delta

    @abstractmethod
    def mask(self, length: int) -> Mask:
        """Returns the mask of `length` new queries over the keys that `update` will return."""

    @abstractmethod
    def mask_last(self, length: int) -> Mask:
        """Returns the mask of the last `length` cached positions over the cached keys in the order
        of `read_all`."""

    @abstractmethod
    def read_all(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Returns all keys and values that `update` last returned, converted to `dtype`."""

    @abstractmethod
    def map_slots(self) -> SlotMapping:
        """Returns the slots of the cached positions, without new ones."""

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends keys and values [B, H, L, D]. Returns all keys and values that the L queries may
        attend to, in the type of `keys`, as they are stored."""
        slot = self.allocate_slots(keys, values).write_slot
        self.write(slice(slot, slot + keys.shape[2]), keys, values)
        return self.read_all(keys.dtype)

    @abstractmethod
    def allocate_slots(self, keys: mx.array, values: mx.array) -> SlotMapping:
        """Allocates slots for positions of these shapes, [1, H, L, D]. From now on, these positions
        count as cached, so the caller must write them before they are read. Only the shapes and
        types of the arrays are used."""

    def set_dtype(self, dtype: mx.Dtype | None) -> None:
        assert self._keys is None, "the cache already contains positions"
        self.dtype = dtype

    def storage_dtype(self, given: mx.array) -> mx.Dtype:
        """Returns the type of a buffer for keys or values like `given`."""
        readable = self.supports_in_place and kernels.ops(given) is not None
        return _narrower(self.dtype, given.dtype) if readable else given.dtype

    @property
    def precision(self) -> mx.Dtype | None:
        """The type of the numbers in the cache, whose buffers may have a wider type. None if it is
        empty."""
        return None if self._keys is None else _narrower(self.dtype, self._keys.dtype)

    def write(self, slots: slice, keys: mx.array, values: mx.array) -> None:
        """Rounds keys and values [B, H, L, D], and writes them to these slots."""
        assert self._keys is not None
        assert self._values is not None
        for buffer, given in ((self._keys, keys), (self._values, values)):
            rounded = round_to(given, _narrower(self.dtype, buffer.dtype))
            buffer[..., slots, :] = rounded.astype(buffer.dtype)

    def read(self, length: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Returns the first `length` keys and values, converted to `dtype`."""
        assert self._keys is not None
        assert self._values is not None
        keys, values = self._keys[..., :length, :], self._values[..., :length, :]
        return keys.astype(dtype), values.astype(dtype)

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
        if queries.shape[2] > 1:
            shape = describe_attention(queries, keys, values, sinks=sinks, softcap=softcap)
            self.attention_shapes = (replace(shape, windowed=self.windowed),)
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

    def attend_shared(self, queries: mx.array, *, scale: float) -> mx.array:
        seen = attend_shared_in_place([self], queries, scale=scale)
        if seen is not None:
            return seen
        keys, values = self.read_all(queries.dtype)
        mask = self.mask_last(queries.shape[2])
        return scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    def get_buffers(self) -> tuple[mx.array, mx.array]:
        """Returns the buffers, which the caller does not write."""
        assert self._keys is not None
        assert self._values is not None
        return self._keys, self._values

    @staticmethod
    def attend_masked(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        softcap: float | None,
    ) -> mx.array:
        """Computes attention of one query per row over keys and values as `attend` stores them.
        mask: the positions of each row, [B, 1, 1, S] bool."""
        return scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks, softcap=softcap
        )

    @abstractmethod
    def latest(self, count: int) -> tuple[mx.array, mx.array]:
        """Returns the last `count` keys and values, oldest first, in the type of the buffers."""

    def written(self) -> list[mx.array]:
        """Returns the written parts of the buffers. Valid before a position was removed."""
        return [array[..., : self.offset, :] for array in self.state()]

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

    def mask_last(self, length: int) -> Mask:
        return self.mask(length)

    def read_all(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        return self.read(self.offset, dtype)

    def map_slots(self) -> SlotMapping:
        return SlotMapping(
            write_slot=self.offset, length=self.offset, head_slot=0, first_position=0, window=0
        )

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

    def latest(self, count: int) -> tuple[mx.array, mx.array]:
        assert self._keys is not None
        assert self._values is not None
        last = slice(self.offset - count, self.offset)
        return self._keys[..., last, :], self._values[..., last, :]

    def copy(self) -> Self:
        return self.slice(0, self.offset)

    def slice(self, start: int, end: int) -> Self:
        assert 0 <= start <= end <= self.offset
        twin = type(self)()
        twin.dtype, twin.offset = self.dtype, end - start
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
        n): rotates keys [B, H, L, D] by n positions, because rotary keys contain their position.
        Rotated keys are rounded again."""
        assert 0 <= start <= end <= self.offset
        if start == end or self._keys is None or self._values is None:
            return
        capacity, moved = self._keys.shape[2], self.offset - end
        # in float32, like all other arithmetic on stored numbers
        keys = rerotate(self._keys[..., end : self.offset, :].astype(mx.float32), start - end)
        values = mx.contiguous(self._values[..., end : self.offset, :])
        self._keys = grow_buffer(self._keys, keys, start, capacity, self._keys.dtype)
        self._values = grow_buffer(self._values, values, start, capacity, values.dtype)
        self.offset = start
        if moved:
            self.update(keys, values)

    def make_batch(self, rows: Sequence["KVCache"], positions: mx.array) -> BatchKVCache:
        return BatchKVCache(rows, positions)

    def _grow(self, kept: int, keys: mx.array, values: mx.array) -> None:
        """Grows the buffers to hold `offset` positions. The first `kept` positions are copied.
        Without a reserved capacity, the buffers grow by half, so that appending n tokens copies
        O(n) tokens in total."""
        needed = self.offset
        current = 0 if self._keys is None else self._keys.shape[2]
        capacity = self._reserved
        if capacity < needed:
            capacity = round_up_to_step(max(needed, current + current // 2))
        self._keys = grow_buffer(self._keys, keys, kept, capacity, self.storage_dtype(keys))
        self._values = grow_buffer(self._values, values, kept, capacity, self.storage_dtype(values))


def evaluate_caches(layers: Sequence[LayerCache]) -> None:
    mx.eval([layer.state() for layer in layers])


def dispatch_caches(layers: Sequence[LayerCache]) -> None:
    """Like `evaluate_caches`, without waiting for the device."""
    mx.async_eval([layer.state() for layer in layers])
