"""Attention in a chunk with image rows: three positions per token, and image rows that attend to
each other in both directions.

Knows: layer caches, masks, `ImageInputs`. Must not know: architectures, images.

A query of a group sees the keys of its whole group, and otherwise the keys that a causal query
sees. These are consecutive positions, so the kernels compute such a query like the newest one of a
shorter sequence. First, they compute all queries of the chunk causally and write the new keys and
values, then the queries of the groups again. So a text token has the same bits as in a chunk
without images. Without the kernels, there is one call with a mask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from models import kernels
from models.image_inputs import ImageInputs
from models.kernels.in_place_attention import InPlaceCache
from models.kv import KVBuffers, Positions
from models.sdpa import describe_attention, scaled_dot_product_attention


def wrap_caches(
    caches: Sequence[object], images: ImageInputs, two_way: Sequence[bool]
) -> list[object]:
    """Returns the layer caches of one sequence as its attention layers use them for a chunk with
    image rows. two_way: for each cache, whether the groups of the chunk attend to each other in
    both directions."""
    return [
        _wrap(cache, images, images.groups if both else ())
        for cache, both in zip(caches, two_way, strict=True)
    ]


def _wrap(
    cache: object, images: ImageInputs, groups: Sequence[tuple[int, int]]
) -> "object | ImageChunkCache":
    if not isinstance(cache, KVBuffers) or (images.positions is None and not groups):
        return cache
    return ImageChunkCache(cache, images.positions, groups)


class ImageChunkCache:
    """The cache of an attention layer during the pass of one chunk (`models.kv.AttentionCache`)."""

    # a fused operation has neither three positions per token nor groups
    in_place_caches: Sequence[InPlaceCache] = ()

    def __init__(
        self, cache: KVBuffers, positions: mx.array | None, groups: Sequence[tuple[int, int]]
    ) -> None:
        """positions, groups: see `ImageInputs`."""
        self._cache = cache
        self._groups = groups
        self.positions: Positions = cache.positions if positions is None else positions

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
        cache, start = self._cache, self._cache.offset
        ends = self._visible_ends(start, queries.shape[2])
        if not ends:
            return cache.attend(queries, keys, values, scale=scale, sinks=sinks, softcap=softcap)
        if sinks is None and softcap is None and self._uses_kernels(queries, keys, values):
            seen = cache.attend(queries, keys, values, scale=scale)
            return self._attend_groups(seen, queries, start, ends, scale)
        shape = describe_attention(queries, keys, values, sinks=sinks, softcap=softcap)
        cache.attention_shapes = (replace(shape, windowed=True),)
        keys, values = cache.update(keys, values)
        mask = self._mask(start, queries.shape[2], keys.shape[2], ends)
        return scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks, softcap=softcap
        )

    def attend_shared(self, queries: mx.array, *, scale: float) -> mx.array:
        cache, length = self._cache, queries.shape[2]
        start = cache.offset - length
        ends = self._visible_ends(start, length)
        if not ends:
            return cache.attend_shared(queries, scale=scale)
        if self._uses_kernels(queries):
            seen = cache.attend_shared(queries, scale=scale)
            return self._attend_groups(seen, queries, start, ends, scale)
        keys, values = cache.read_all(queries.dtype)
        mask = self._mask(start, length, keys.shape[2], ends)
        return scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    def _uses_kernels(self, *arrays: mx.array) -> bool:
        return self._cache.supports_in_place and kernels.ops(*arrays) is not None

    def _visible_ends(self, start: int, length: int) -> dict[int, int]:
        """Returns the end of the visible keys for each query of [start, start + length) that sees
        later keys. Raises ValueError if a group does not end in the chunk."""
        ends: dict[int, int] = {}
        for first, end in self._groups:
            if first >= start + length:
                continue
            if start + length < end:
                raise ValueError("an image must be computed in one chunk")
            ends |= dict.fromkeys(range(max(first, start), end - 1), end)
        return ends

    def _attend_groups(
        self,
        seen: mx.array,
        queries: mx.array,
        start: int,
        ends: Mapping[int, int],
        scale: float,
    ) -> mx.array:
        """Returns the causal result `seen` with the queries of the groups computed again, each as
        the only query of a sequence that ends with its last visible key."""
        ops, slots = kernels.ops(queries), self._cache.map_slots()
        assert ops is not None
        keys, values = self._cache.get_buffers()
        firsts = [
            max(slots.first_position, index - slots.window + 1 if slots.window else 0)
            for index in ends
        ]
        rows = mx.array([index - start for index in ends])
        again = ops.attend_shared(
            queries[:, :, rows].transpose(2, 1, 0, 3),
            [keys] * len(ends),
            [values] * len(ends),
            [end - first for first, end in zip(firsts, ends.values(), strict=True)],
            [(slots.head_slot + first - slots.first_position) % keys.shape[2] for first in firsts],
            firsts,
            scale=scale,
        )
        seen = mx.array(seen)  # assignments replace the content of the object
        seen[:, :, rows] = again.transpose(2, 1, 0, 3)
        return seen

    def _mask(self, start: int, length: int, total: int, ends: Mapping[int, int]) -> mx.array:
        """Returns the mask of the queries [start, start + length) over the last `total` keys, as
        [length, total]."""
        window = self._cache.map_slots().window
        indexes = list(range(start, start + length))
        keys = mx.arange(start + length - total, start + length)
        mask = keys < mx.array([ends.get(index, index + 1) for index in indexes])[:, None]
        return mask & (keys > mx.array(indexes)[:, None] - window) if window else mask
