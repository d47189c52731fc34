"""mlxrunner's layer caches, with the interface that mlx-lm's model classes expect.

Knows: that interface (mlx_lm/models/cache.py), the interface of models/kv.py. Must not know:
architectures. mlx-lm's cache module is not imported here. It is passed as an argument where its
classes are needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from models.attention_route import AttentionShape
from models.base import ModelError
from models.checkpoint_config import DEFAULT_QUERY_HEADS
from models.kv import KVBuffers, KVCache, LayerCache, set_kv_dtype
from models.recurrent import RecurrentCache
from models.rotating_kv import RotatingKVCache
from models.sdpa import Mask


class _MlxLmKVMixin(KVBuffers):
    """The methods that mlx-lm's two kinds of attention caches share. mlx-lm computes attention with
    MLX's operations."""

    supports_in_place = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.update(keys, values)

    @property
    def keys(self) -> mx.array | None:
        return self._keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        """Replaces the buffer. Some classes replace it by the same buffer with added dependencies
        (`mx.depends`)."""
        self._keys = keys

    @property
    def values(self) -> mx.array | None:
        return self._values

    @values.setter
    def values(self, values: mx.array) -> None:
        self._values = values


class MlxLmKVCache(_MlxLmKVMixin, KVCache):
    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> Mask:
        if window_size is not None or (return_array and length > 1):
            return _window_mask(self.offset, length, window_size)
        return self.mask(length)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self._keys is not None
        assert self._values is not None
        return self._keys[..., : self.offset, :], self._values[..., : self.offset, :]


class MlxLmRotatingKVCache(_MlxLmKVMixin, RotatingKVCache):
    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> Mask:
        """Returns the mask. Raises ModelError for a window that is narrower than the cache. A
        single query would need a mask, but the buffer is not in order in this case."""
        if window_size is not None and window_size < self.window:
            raise ModelError("a sliding window smaller than its cache is not supported")
        if return_array and length > 1:
            return _window_mask(min(self._length, self.window - 1), length, self.window)
        return self.mask(length)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self._keys is not None
        assert self._values is not None
        return self._keys[..., : self._length, :], self._values[..., : self._length, :]

    def copy(self) -> "MlxLmRotatingKVCache":
        plain, twin = super().copy(), MlxLmRotatingKVCache(self.window)
        twin.dtype = plain.dtype
        twin.offset, twin._length, twin._head = plain.offset, plain._length, plain._head
        twin._keys, twin._values = plain._keys, plain._values
        return twin


class MlxLmChunkedKVCache(MlxLmKVCache):
    """Corresponds to mlx-lm's ChunkedKVCache, for layers that attend within chunks of the context.
    It retains all positions, so that they can be sliced and trimmed. The mask of the class hides
    the positions of other chunks."""

    start_position = 0

    def maybe_trim_front(self) -> None:
        """Does nothing."""


class MlxLmArraysCache(RecurrentCache):
    """Corresponds to mlx-lm's ArraysCache. Some classes require exactly this type, so each step
    copies the slots to an ArraysCache and back."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.slots = slots

    def __setitem__(self, slot: int, value: mx.array) -> None:
        # contiguous, because it is often a slice, which would keep the activations of a whole chunk
        # in memory
        super().__setitem__(slot, mx.contiguous(value))

    def copy(self) -> "MlxLmArraysCache":
        plain, twin = super().copy(), MlxLmArraysCache(self.slots)
        twin.offset, twin._slots = plain.offset, plain._slots
        return twin


class MlxLmLayerCache:
    """The cache of one layer, which consists of one native cache, or of several caches for mlx-lm's
    CacheList. All caches have the same offset. is_cache_list: whether mlx-lm uses a CacheList.
    heads: the number of query heads of the layer."""

    def __init__(
        self, caches: Sequence[LayerCache], *, is_cache_list: bool, heads: int = DEFAULT_QUERY_HEADS
    ) -> None:
        assert caches
        self.caches = tuple(caches)
        self.is_cache_list = is_cache_list
        self._heads = heads

    @property
    def offset(self) -> int:
        return self.caches[0].offset

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.caches)

    @property
    def attention_shapes(self) -> Sequence[AttentionShape]:
        """Returns the shapes that the buffers imply. mlx-lm computes the attention, and not in
        pieces. Latents are stored as keys and values of different sizes. mlx-lm holds scores for
        them on every device."""
        shapes: list[AttentionShape] = []
        for part in self.caches:
            if not isinstance(part, KVBuffers) or not part.state():
                continue
            keys, values = part.state()
            heads, kv_heads = max(self._heads, keys.shape[1]), keys.shape[1]
            shapes.append(
                AttentionShape(
                    # a layer may have fewer heads than the config names for another layer
                    heads=heads // kv_heads * kv_heads,
                    kv_heads=kv_heads,
                    key_dim=keys.shape[3],
                    value_dim=values.shape[3],
                    itemsize=keys.dtype.size,
                    absorbed=keys.shape[3] != values.shape[3],
                    windowed=part.windowed,
                    splittable=False,
                )
            )
        return shapes

    @property
    def sliceable(self) -> bool:
        return all(part.sliceable for part in self.caches)

    def set_dtype(self, dtype: mx.Dtype | None) -> None:
        set_kv_dtype(self.caches, dtype)

    def can_trim(self, count: int) -> bool:
        return all(part.can_trim(count) for part in self.caches)

    def trim(self, count: int) -> None:
        for part in self.caches:
            part.trim(count)

    def copy(self) -> "MlxLmLayerCache":
        return self._copy_with([part.copy() for part in self.caches])

    def slice(self, start: int, end: int) -> "MlxLmLayerCache":
        return self._copy_with([part.slice(start, end) for part in self.caches])

    def append(self, other: "MlxLmLayerCache", start: int, end: int) -> None:
        for part, more in zip(self.caches, other.caches, strict=True):
            part.append(more, start, end)

    def reserve(self, length: int) -> None:
        for part in self.caches:
            part.reserve(length)

    def estimate_nbytes(self, length: int, chunk: int) -> int:
        return sum(part.estimate_nbytes(length, chunk) for part in self.caches)

    def state(self) -> list[mx.array]:
        return [array for part in self.caches for array in part.state()]

    def make_batch(self, rows: Sequence["MlxLmLayerCache"], offsets: mx.array) -> "MlxLmBatch":
        return MlxLmBatch(rows)

    def to_mlx_lm(self, library: Any) -> Any:
        """Returns the cache that the mlx-lm layer gets for one step."""
        given = [_to_mlx_lm(part, library) for part in self.caches]
        return library.CacheList(*given) if self.is_cache_list else given[0]

    def update_from_mlx_lm(self, cache: Any, length: int) -> bool:
        """Reads the state after a step. cache: the result of `to_mlx_lm`, `length` positions later.
        Returns whether all parts have the same offset."""
        for part, one in zip(
            self.caches, cache.caches if self.is_cache_list else [cache], strict=True
        ):
            if isinstance(part, MlxLmArraysCache):
                for slot in range(part.slots):
                    if one[slot] is not None:
                        part[slot] = one[slot]
                part.advance(length)
        return all(part.offset == self.offset for part in self.caches)

    def _copy_with(self, parts: Sequence[LayerCache]) -> "MlxLmLayerCache":
        return MlxLmLayerCache(parts, is_cache_list=self.is_cache_list, heads=self._heads)


@dataclass(frozen=True, slots=True)
class MlxLmBatch:
    """The caches of one layer, for several sequences."""

    rows: Sequence[MlxLmLayerCache]


def _wrap_layer(cache: Any, library: Any, heads: int) -> MlxLmLayerCache:
    is_list = type(cache) is library.CacheList
    parts = cache.caches if is_list else [cache]
    return MlxLmLayerCache(
        [_wrap_one(one, library) for one in parts], is_cache_list=is_list, heads=heads
    )


def wrap_caches(
    caches: Sequence[Any], library: Any, *, heads: int, dtype: mx.Dtype | None
) -> list[LayerCache]:
    """Returns our empty caches for the empty caches of all layers of mlx-lm. library:
    mlx_lm.models.cache. heads: the number of query heads of a layer. dtype: see
    `models.kv.set_kv_dtype`. Raises ModelError for an unsupported kind."""
    wrapped: list[LayerCache] = [_wrap_layer(one, library, heads) for one in caches]
    set_kv_dtype(wrapped, dtype)
    return wrapped


def _wrap_one(cache: Any, library: Any) -> LayerCache:
    # only exact types are accepted, because a subclass may have more state
    kind: Any = type(cache)
    if kind is library.KVCache:
        return MlxLmKVCache()
    if kind is library.RotatingKVCache and not cache.keep:
        return MlxLmRotatingKVCache(cache.max_size)
    if kind is library.ChunkedKVCache:
        return MlxLmChunkedKVCache()
    if kind is library.ArraysCache:
        return MlxLmArraysCache(len(cache.cache))
    raise ModelError(f"mlx-lm's {kind.__name__} is not supported as a layer's cache")


def _to_mlx_lm(cache: LayerCache, library: Any) -> Any:
    """Converts a native cache. Attention caches are used directly. Recurrent states are copied to
    an ArraysCache."""
    if not isinstance(cache, MlxLmArraysCache):
        return cache
    given = library.ArraysCache(cache.slots)
    for slot in range(cache.slots):
        given[slot] = cache[slot]
    return given


def _window_mask(past_length: int, length: int, window: int | None) -> mx.array:
    """Returns a mask [length, past_length + length], for keys that begin `past_length` positions
    before the queries."""
    queries = mx.arange(past_length, past_length + length)[:, None]
    keys = mx.arange(past_length + length)[None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
