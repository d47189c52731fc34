"""What each layer of a model remembers of one sequence.

Knows: tensors of shape [batch, heads, length, head_dim] and how to keep them as a sequence grows
and is cut back. Must not know: tokens, requests, policies. A cache holds one sequence (or several
of equal length, in the batch axis); `offset` is the number of positions it has seen.

Every kind answers the same six questions: `offset`, `nbytes`, `can_trim(n)`, `trim(n)`, `copy()`,
`state()` (the arrays that must be evaluated for the cache to be real). A cache is cut back only
when what remains is exactly what a shorter run would have left behind.
"""

from typing import Literal, Protocol

import mlx.core as mx

# What scaled_dot_product_attention takes: nothing to hide · lower-right causal · [L, keys] of bool
Mask = Literal["causal"] | mx.array | None

STEP = 256


class LayerCache(Protocol):
    """The part of the contract that the prefix cache and the engine need."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes held, free room included."""
        ...

    def can_trim(self, count: int) -> bool: ...

    def trim(self, count: int) -> None:
        """Forget the last `count` positions. Only after `can_trim(count)`."""
        ...

    def copy(self) -> "LayerCache":
        """An independent cache with the same content and no free room."""
        ...

    def state(self) -> list[mx.array]: ...


class AttentionCache(LayerCache, Protocol):
    """A cache of keys and values."""

    def mask(self, length: int) -> Mask:
        """What `length` new queries may see of the keys that `update` will return."""
        ...

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [B, H, L, D] keys and values; return all that the L queries may need."""
        ...


def _capacity(needed: int, current: int) -> int:
    """Half as much again, in whole steps: n appended tokens copy O(n) tokens in all."""
    wanted = max(needed, current + current // 2)
    return -(-wanted // STEP) * STEP


def _grown(buffer: mx.array | None, like: mx.array, length: int, capacity: int) -> mx.array:
    """A buffer with room for `capacity` positions, whose first `length` are those of `buffer`."""
    batch, heads, _, dim = like.shape
    room = mx.zeros((batch, heads, capacity - length, dim), like.dtype)
    if buffer is None or length == 0:
        return room
    return mx.concatenate([buffer[..., :length, :], room], axis=2)


class _Buffers:
    """The keys and values of one layer, and how many positions it has seen."""

    def __init__(self) -> None:
        self.offset = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state())

    def state(self) -> list[mx.array]:
        return [array for array in (self._keys, self._values) if array is not None]


class KVCache(_Buffers):
    """Every position since the first.

    keys, values: [B, H, capacity, D]; positions offset.. are free room. Writing is in place
    as long as nobody else holds the buffer.
    """

    def mask(self, length: int) -> Mask:
        return None if length == 1 else "causal"

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        end = self.offset + keys.shape[2]
        capacity = 0 if self._keys is None else self._keys.shape[2]
        if self._keys is None or self._values is None or end > capacity:
            capacity = _capacity(end, capacity)
            self._keys = _grown(self._keys, keys, self.offset, capacity)
            self._values = _grown(self._values, values, self.offset, capacity)
        self._keys[..., self.offset : end, :] = keys
        self._values[..., self.offset : end, :] = values
        self.offset = end
        return self._keys[..., :end, :], self._values[..., :end, :]

    def can_trim(self, count: int) -> bool:
        return count <= self.offset

    def trim(self, count: int) -> None:
        assert self.can_trim(count)
        self.offset -= count

    def copy(self) -> "KVCache":
        twin = KVCache()
        twin.offset = self.offset
        if self._keys is not None and self._values is not None and self.offset:
            # contiguous: a mere slice would keep this cache's whole buffer alive
            twin._keys = mx.contiguous(self._keys[..., : self.offset, :])
            twin._values = mx.contiguous(self._values[..., : self.offset, :])
        return twin


class RotatingKVCache(_Buffers):
    """The last `window` positions, for layers whose queries see no further back.

    A query at position p sees p-window+1 .. p. The buffer is in one of two shapes:

        in order   [ oldest ................ newest | free room ]   head = 0, any length
        ring       [ .... newest | oldest ......... ]               head = slot of the oldest,
                                                                     length = window

    One new position overwrites the oldest slot; several are appended behind the last window-1
    positions in order, so that the first of them still sees its whole window, and the excess is
    dropped by the next single write. Order does not matter to attention (positions are in the
    keys' rotation), only the mask needs it, and a mask is needed only in order.
    """

    def __init__(self, window: int) -> None:
        assert window > 0
        super().__init__()
        self.window = window
        self._length = 0
        self._head = 0

    def mask(self, length: int) -> Mask:
        if length == 1:
            return None
        kept = min(self._length, self.window - 1)
        if kept + length <= self.window:
            return "causal"
        queries = mx.arange(kept, kept + length)[:, None]
        keys = mx.arange(kept + length)[None]
        return (keys <= queries) & (keys > queries - self.window)

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        write = self._write_one if keys.shape[2] == 1 else self._append
        write(keys, values)
        self.offset += keys.shape[2]
        assert self._keys is not None
        assert self._values is not None
        return self._keys[..., : self._length, :], self._values[..., : self._length, :]

    def can_trim(self, count: int) -> bool:
        """Whether the positions that a query after the cut may see are still here.

        held:   [offset - length, offset)
        needed: [max(0, cut - (window - 1)), cut)     where cut = offset - count
        """
        cut = self.offset - count
        return cut >= 0 and self.offset - self._length <= max(0, cut - (self.window - 1))

    def trim(self, count: int) -> None:
        assert self.can_trim(count)
        if count == 0:
            return
        self._put_in_order()
        self._length -= count
        self.offset -= count

    def copy(self) -> "RotatingKVCache":
        twin = RotatingKVCache(self.window)
        twin.offset, twin._length, twin._head = self.offset, self._length, self._head
        if self._keys is not None and self._values is not None and self._length:
            twin._keys = mx.contiguous(self._keys[..., : self._length, :])
            twin._values = mx.contiguous(self._values[..., : self._length, :])
        return twin

    def _write_one(self, keys: mx.array, values: mx.array) -> None:
        if self._length > self.window:
            self._keep_last(self.window)
        if self._length < self.window:
            self._put_in_order()
            slot = self._length
            self._make_room(keys, values)
            self._length += 1
        else:
            slot = self._head
            self._head = (self._head + 1) % self.window
        assert self._keys is not None
        assert self._values is not None
        self._keys[..., slot : slot + 1, :] = keys
        self._values[..., slot : slot + 1, :] = values

    def _append(self, keys: mx.array, values: mx.array) -> None:
        self._keep_last(self.window - 1)
        if self._keys is None or self._values is None or self._length == 0:
            self._keys, self._values = keys, values
        else:
            self._keys = mx.concatenate([self._keys[..., : self._length, :], keys], axis=2)
            self._values = mx.concatenate([self._values[..., : self._length, :], values], axis=2)
        self._length += keys.shape[2]

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        capacity = 0 if self._keys is None else self._keys.shape[2]
        if self._length < capacity:
            return
        capacity = min(_capacity(self._length + 1, capacity), self.window)
        self._keys = _grown(self._keys, keys, self._length, capacity)
        self._values = _grown(self._values, values, self._length, capacity)

    def _put_in_order(self) -> None:
        if self._head == 0:
            return
        assert self._keys is not None
        assert self._values is not None
        # a ring is always full, so there is no free room to mind
        self._keys = mx.roll(self._keys[..., : self._length, :], -self._head, 2)
        self._values = mx.roll(self._values[..., : self._length, :], -self._head, 2)
        self._head = 0

    def _keep_last(self, count: int) -> None:
        self._put_in_order()
        drop = self._length - count
        if drop <= 0 or self._keys is None or self._values is None:
            return
        # contiguous: a mere slice would keep the long buffer alive
        self._keys = mx.contiguous(self._keys[..., drop : self._length, :])
        self._values = mx.contiguous(self._values[..., drop : self._length, :])
        self._length = count


class RecurrentCache:
    """States that sum up the whole past (convolution tails, delta-rule matrices), by slot.

    They cannot be cut back, only copied before they move on. Accumulating states belong in
    float32, whatever the activations are.
    """

    def __init__(self, slots: int) -> None:
        self.offset = 0
        self._slots: list[mx.array | None] = [None] * slots

    def __getitem__(self, slot: int) -> mx.array | None:
        return self._slots[slot]

    def __setitem__(self, slot: int, value: mx.array) -> None:
        self._slots[slot] = value

    def advance(self, length: int) -> None:
        """The slots now stand for `length` more positions."""
        self.offset += length

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state())

    def can_trim(self, count: int) -> bool:
        return count == 0

    def trim(self, count: int) -> None:
        assert self.can_trim(count)

    def copy(self) -> "RecurrentCache":
        twin = RecurrentCache(len(self._slots))
        twin.offset = self.offset
        # states are replaced, never written into: sharing them is a copy
        twin._slots = list(self._slots)
        return twin

    def state(self) -> list[mx.array]:
        return [array for array in self._slots if array is not None]
