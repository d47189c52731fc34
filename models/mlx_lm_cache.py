"""mlxrunner's layer caches, with the interface that mlx-lm's model classes expect.

Knows: that interface (mlx_lm/models/cache.py), the interface of models/kv.py. Must not know:
architectures. mlx-lm's cache module is not imported here. It is passed as an argument where its
classes are needed.

An attention layer of mlx-lm gives new keys and values to its cache, gets those of all positions,
and calls one function with them, `scaled_dot_product_attention`. This function is replaced
(models/mlx_lm_adapter.py), so that the cache can compute the attention with our operations, for one
sequence or for the rows of a batch. For such a layer, the cache returns the new keys and values
unchanged, and the function recognizes them (`AttentionTrait`). A trial finds out which layers are
of this kind. All other layers get the keys and values of all positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from models.attention_route import AttentionShape
from models.base import ModelError
from models.batch_cache import BatchKVCache
from models.checkpoint_config import DEFAULT_QUERY_HEADS
from models.kv import KVBuffers, KVCache, LayerCache, set_kv_dtype
from models.recurrent import RecurrentCache
from models.rotating_kv import RotatingKVCache, window_mask
from models.sdpa import Mask

# An operation of MLX that no class of mlx-lm uses.
LEAK_PRIMITIVE = "ErfInv"


class NotBatchableError(Exception):
    """A class of mlx-lm does something with a batch of caches that only a single cache supports."""


class AttentionTrait:
    """The known properties of an attention layer. The caches of all sequences share it.

    attends: whether the layer only calls `scaled_dot_product_attention` with the output of its
    cache, and without its own mask, so that the cache may compute the attention. calls: while a
    trial runs, the number of such calls, or None if the layer does anything else. marks: while a
    trial runs, whether the layer gets keys and values that leave `LEAK_PRIMITIVE` in the graph of
    everything that is computed from them.
    """

    def __init__(self) -> None:
        self.attends = False
        self.calls: int | None = None
        self.marks = False


@dataclass(frozen=True, slots=True)
class _Pending:
    """The keys and values that a layer got back from its cache. new_keys, new_values: those of the
    new positions."""

    keys: mx.array
    values: mx.array
    new_keys: mx.array
    new_values: mx.array


def make_attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Returns the replacement of mlx-lm's `scaled_dot_product_attention`. original: computes the
    attention of all other caches."""

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(cache, _MlxLmKVMixin | MlxLmBatchKV):
            seen = cache.attend_pending(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
            if seen is not None:
                return seen
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return scaled_dot_product_attention


class _MlxLmKVMixin(KVBuffers):
    """The methods that mlx-lm's two kinds of attention caches share. trait: their layer's."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.trait = AttentionTrait()
        self._pending: _Pending | None = None

    @property
    def supports_in_place(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.trait.attends

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        given = keys, values
        if not self.trait.attends:
            given = self.update(keys, values)
        elif self.trait.marks:
            given = mx.erfinv(keys), mx.erfinv(values)
        self._pending = _Pending(*given, new_keys=keys, new_values=values)
        return given

    def attend_pending(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Computes attention if the keys and values are those that the layer got from this cache.
        Otherwise, or if the attention is mlx-lm's, returns None."""
        pending, self._pending = self._pending, None
        fetched = pending is not None and keys is pending.keys and values is pending.values
        plain = fetched and not isinstance(mask, mx.array)
        if self.trait.calls is not None:
            self.trait.calls = self.trait.calls + 1 if plain else -1000
        if not self.trait.attends:
            return None
        if not plain:
            raise ModelError("attention with a mask that differs from that of the first positions")
        assert pending is not None
        new_keys, new_values = pending.new_keys, pending.new_values
        return self.attend(queries, new_keys, new_values, scale=scale, sinks=sinks)

    @property
    def is_pending(self) -> bool:
        """Whether the layer has not used the keys and values that it got."""
        return self._pending is not None

    def _adopt(self, other: "_MlxLmKVMixin") -> Self:
        self.trait = other.trait
        return self

    def make_batch(self, rows: Sequence[Any], positions: mx.array) -> "MlxLmBatchKV":
        return MlxLmBatchKV(rows, positions)

    @property
    def keys(self) -> mx.array | None:
        return self._keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        """Replaces the buffer. Some classes replace it with the same buffer with added dependencies
        (`mx.depends`)."""
        self._keys = keys

    @property
    def values(self) -> mx.array | None:
        return self._values

    @values.setter
    def values(self, values: mx.array) -> None:
        self._values = values


class MlxLmKVCache(_MlxLmKVMixin, KVCache):  # pyright: ignore[reportIncompatibleMethodOverride]
    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> Mask:
        if window_size is not None or (return_array and length > 1):
            return window_mask(self.offset, length, window_size)
        return self.mask(length)

    def slice(self, start: int, end: int) -> Self:
        return super().slice(start, end)._adopt(self)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self._keys is not None
        assert self._values is not None
        return self._keys[..., : self.offset, :], self._values[..., : self.offset, :]


class MlxLmRotatingKVCache(_MlxLmKVMixin, RotatingKVCache):  # pyright: ignore[reportIncompatibleMethodOverride]
    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> Mask:
        """Returns the mask. Raises ModelError for a window that differs from the cache. If it is
        narrower, a single query would need a mask, but the buffer is not in order in this case. If
        it is wider, the class computes prompts and single positions with different windows."""
        if window_size is not None and window_size != self.window:
            raise ModelError(
                f"a sliding window of {window_size} positions with a cache of {self.window} is not "
                "supported"
            )
        if return_array and length > 1:
            return window_mask(min(self._length, self.window - 1), length, self.window)
        if self.trait.attends or self.trait.calls is not None:
            return None if length == 1 else "causal"  # `attend` makes the mask
        return self.mask(length)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self._keys is not None
        assert self._values is not None
        return self._keys[..., : self._length, :], self._values[..., : self._length, :]

    def copy(self) -> Self:
        return super().copy()._adopt(self)


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
            if part.supports_in_place:
                shapes.extend(part.attention_shapes)
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

    def make_batch(self, rows: Sequence["MlxLmLayerCache"], positions: mx.array) -> "MlxLmBatch":
        return MlxLmBatch(rows, positions)

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


class MlxLmBatchKV:
    """The attention caches of one layer, for one new position of several sequences. offset: the
    sequences' offsets, [B]."""

    def __init__(self, rows: Sequence[Any], offsets: mx.array) -> None:
        self._rows = rows
        self._pending: _Pending | None = None
        self.offset = offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if not self._rows[0].trait.attends:
            raise NotBatchableError
        self._pending = _Pending(keys, values, new_keys=keys, new_values=values)
        return keys, values

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> Mask:
        if length != 1 or (window_size is not None and not self._rows[0].windowed):
            raise NotBatchableError
        return None

    def attend_pending(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
    ) -> mx.array:
        pending, self._pending = self._pending, None
        if pending is None or keys is not pending.keys or values is not pending.values:
            raise NotBatchableError
        if isinstance(mask, mx.array):
            raise NotBatchableError
        rows = BatchKVCache(self._rows, self.offset)
        return rows.attend(queries, keys, values, scale=scale, sinks=sinks)

    @property
    def is_pending(self) -> bool:
        return self._pending is not None


@dataclass(frozen=True, slots=True)
class MlxLmBatch:
    """The caches of one layer, for several sequences. offsets: the sequences', [B]."""

    rows: Sequence[MlxLmLayerCache]
    offsets: mx.array

    def to_mlx_lm(self, library: Any) -> Any:
        """Returns the cache that the mlx-lm layer gets for one step of all rows."""
        first = self.rows[0]
        parts = zip(*(row.caches for row in self.rows), strict=True)
        given = [self._convert(part, library) for part in parts]
        return library.CacheList(*given) if first.is_cache_list else given[0]

    def _convert(self, rows: Sequence[Any], library: Any) -> Any:
        if not isinstance(rows[0], MlxLmArraysCache):
            return rows[0].make_batch(rows, self.offsets)
        given = library.ArraysCache(rows[0].slots)
        for slot in range(rows[0].slots):
            states = [row[slot] for row in rows]
            if all(state is not None for state in states):
                given[slot] = mx.concatenate(states)
            elif any(state is not None for state in states):
                raise NotBatchableError
        return given

    def update_from_mlx_lm(self, cache: Any) -> None:
        """Reads the states after a step. Raises NotBatchableError if a layer did not compute the
        attention."""
        first = self.rows[0]
        for i, one in enumerate(cache.caches if first.is_cache_list else [cache]):
            if isinstance(one, MlxLmBatchKV):
                if one.is_pending:
                    raise NotBatchableError
                continue
            rows: Sequence[Any] = [row.caches[i] for row in self.rows]
            for slot in range(rows[0].slots):
                if one[slot] is not None:
                    states = mx.split(one[slot], len(rows))
                    for row, state in zip(rows, states, strict=True):
                        row[slot] = state
            for row in rows:
                row.advance(1)


def list_traits(layers: Sequence[Any]) -> list[AttentionTrait]:
    """Returns the traits of the attention caches, in the order of layers and parts."""
    parts = [part for layer in layers for part in layer.caches]
    return [part.trait for part in parts if isinstance(part, _MlxLmKVMixin)]


def share_traits(layers: Sequence[Any], traits: Sequence[AttentionTrait]) -> None:
    """Gives the traits of a model to the caches of a sequence."""
    parts = [part for layer in layers for part in layer.caches]
    caches = [part for part in parts if isinstance(part, _MlxLmKVMixin)]
    for cache, trait in zip(caches, traits, strict=True):
        cache.trait = trait


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
