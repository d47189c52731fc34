"""Our layer caches, as mlx-lm's model classes want to be given them.

Knows: what those classes ask of a cache (mlx_lm/models/cache.py), and the contract of models/kv.py.
Must not know: architectures. That library's module of caches is handed in where its classes are
needed, and not imported here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from models.attention import Mask
from models.base import ModelError
from models.kv import Buffers, KVCache, LayerCache
from models.recurrent import RecurrentCache
from models.window import RotatingKVCache


class _Lent(Buffers):
    """The methods that both kinds of attention cache have there."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.update(keys, values)

    @property
    def keys(self) -> mx.array | None:
        return self._keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        """Some replace a buffer by the same one, bound to others (`mx.depends`)."""
        self._keys = keys

    @property
    def values(self) -> mx.array | None:
        return self._values

    @values.setter
    def values(self, values: mx.array) -> None:
        self._values = values


class WholeKV(_Lent, KVCache):
    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> Mask:
        if window_size is not None or (return_array and length > 1):
            return _mask(self.offset, length, window_size)
        return self.mask(length)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self._keys is not None
        assert self._values is not None
        return self._keys[..., : self.offset, :], self._values[..., : self.offset, :]


class WindowKV(_Lent, RotatingKVCache):
    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> Mask:
        """Raises ModelError for a window that is narrower than the cache: a single query would
        need a mask, and the buffer is not in order then."""
        if window_size is not None and window_size < self.window:
            raise ModelError("a sliding window smaller than its cache is not supported")
        if return_array and length > 1:
            return _mask(min(self._length, self.window - 1), length, self.window)
        return self.mask(length)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self._keys is not None
        assert self._values is not None
        return self._keys[..., : self._length, :], self._values[..., : self._length, :]

    def copy(self) -> "WindowKV":
        plain, twin = super().copy(), WindowKV(self.window)
        twin.offset, twin._length, twin._head = plain.offset, plain._length, plain._head
        twin._keys, twin._values = plain._keys, plain._values
        return twin


class States(RecurrentCache):
    """What is an ArraysCache there. Some classes ask for that very type, so for each step one of
    these is filled from here."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.slots = slots

    def __setitem__(self, slot: int, value: mx.array) -> None:
        # often a slice, which would keep a whole chunk's activations in memory
        super().__setitem__(slot, mx.contiguous(value))

    def copy(self) -> "States":
        plain, twin = super().copy(), States(self.slots)
        twin.offset, twin._slots = plain.offset, plain._slots
        return twin


class LayerParts:
    """All that one layer remembers: one cache, or several where mlx-lm has a CacheList. They stand
    at the same position. listed: which of the two."""

    def __init__(self, parts: Sequence[LayerCache], *, listed: bool) -> None:
        assert parts
        self.parts = tuple(parts)
        self.listed = listed

    @property
    def offset(self) -> int:
        return self.parts[0].offset

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def divisible(self) -> bool:
        return all(part.divisible for part in self.parts)

    def can_trim(self, count: int) -> bool:
        return all(part.can_trim(count) for part in self.parts)

    def trim(self, count: int) -> None:
        for part in self.parts:
            part.trim(count)

    def copy(self) -> "LayerParts":
        return self._with([part.copy() for part in self.parts])

    def piece(self, start: int, end: int) -> "LayerParts":
        return self._with([part.piece(start, end) for part in self.parts])

    def append(self, other: "LayerParts", start: int, end: int) -> None:
        for part, more in zip(self.parts, other.parts, strict=True):
            part.append(more, start, end)

    def reserve(self, length: int) -> None:
        for part in self.parts:
            part.reserve(length)

    def nbytes_at(self, length: int, chunk: int) -> int:
        return sum(part.nbytes_at(length, chunk) for part in self.parts)

    def state(self) -> list[mx.array]:
        return [array for part in self.parts for array in part.state()]

    def together(self, rows: Sequence["LayerParts"], offsets: mx.array) -> "Rows":
        return Rows(rows)

    def lent(self, library: Any) -> Any:
        """What the layer is given in its place for one step."""
        given = [_lent(part, library) for part in self.parts]
        return library.CacheList(*given) if self.listed else given[0]

    def take_back(self, given: Any, length: int) -> bool:
        """given: what was lent, `length` positions later. Whether all parts stand where the first
        does."""
        for part, one in zip(self.parts, given.caches if self.listed else [given], strict=True):
            if isinstance(part, States):
                for slot in range(part.slots):
                    if one[slot] is not None:
                        part[slot] = one[slot]
                part.advance(length)
        return all(part.offset == self.offset for part in self.parts)

    def _with(self, parts: Sequence[LayerCache]) -> "LayerParts":
        return LayerParts(parts, listed=self.listed)


@dataclass(frozen=True, slots=True)
class Rows:
    """One layer's caches of several sequences, side by side."""

    rows: Sequence[LayerParts]


def adopted(theirs: Any, library: Any) -> LayerParts:
    """An empty one of ours for an empty one of theirs. library: mlx_lm.models.cache. Raises
    ModelError for a kind that has no like here."""
    if type(theirs) is library.CacheList:
        return LayerParts([_part(one, library) for one in theirs.caches], listed=True)
    return LayerParts([_part(theirs, library)], listed=False)


def _part(theirs: Any, library: Any) -> LayerCache:
    # by the very type: a descendant may keep what we would lose
    kind: Any = type(theirs)
    if kind is library.KVCache:
        return WholeKV()
    if kind is library.RotatingKVCache and not theirs.keep:
        return WindowKV(theirs.max_size)
    if kind is library.ArraysCache:
        return States(len(theirs.cache))
    raise ModelError(f"mlx-lm's {kind.__name__} is not supported as a layer's cache")


def _lent(part: LayerCache, library: Any) -> Any:
    """A cache of ours that speaks as theirs do; of states an object of theirs."""
    if not isinstance(part, States):
        return part
    given = library.ArraysCache(part.slots)
    for slot in range(part.slots):
        given[slot] = part[slot]
    return given


def _mask(before: int, length: int, window: int | None) -> mx.array:
    """[length, before + length], of keys that begin `before` positions ahead of the queries."""
    queries = mx.arange(before, before + length)[:, None]
    keys = mx.arange(before + length)[None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
