"""Layouts of the keys and values of several sequences: caches that replace those of models/kv.py,
so that the served model runs on them.

    per sequence   each row has its own buffers and its own attention; the layout of the engine
    padded         slots [B, heads, capacity, dim], one masked attention; new positions are written
                   row by row (slices) or all at once (scatter)
    slab           the layout of the engine on a GPU (models/kv_slab.py): padded slots and scatter,
                   but other rows are never copied
    paged          a pool of pages for each layer; each step gathers the pages of all rows
    alone          each sequence has its own forward pass

In all but the last, weights are applied to the batch at once. A sequence joins after its prompt was
evaluated in its own buffers, as after prefill.
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from models.base import Model
from models.kernels.in_place_attention import InPlaceCache
from models.kv import STEP, KVCache
from models.sdpa import scaled_dot_product_attention
from models.slab_step import SlabRow, SlabStep
from models.slabs import create_slab

PAGE = 64

# the caches of one sequence, one per layer
SequenceCaches = Sequence[KVCache]


class KVLayout(Protocol):
    def join(self, past: SequenceCaches) -> None: ...

    def leave(self, row: int) -> None: ...

    def grow(self) -> None:
        """Make room for STEP more positions, as the first full row does."""
        ...

    def step(self, model: Model, tokens: mx.array) -> mx.array:
        """[B] ids -> [B, D] hidden states."""
        ...

    def arrays(self) -> list[mx.array]: ...


class PerSequenceLayout:
    def __init__(self, pasts: Sequence[SequenceCaches]) -> None:
        self.rows = list(pasts)

    def join(self, past: SequenceCaches) -> None:
        self.rows.append(past)

    def leave(self, row: int) -> None:
        del self.rows[row]

    def grow(self) -> None:
        self.rows[0] = [copy_with_capacity(layer.state(), layer.offset) for layer in self.rows[0]]

    def step(self, model: Model, tokens: mx.array) -> mx.array:
        offsets = mx.array([row[0].offset for row in self.rows])
        layers = [rows[0].make_batch(rows, offsets) for rows in zip(*self.rows, strict=True)]
        return model(tokens[:, None], layers)[:, -1]

    def arrays(self) -> list[mx.array]:
        return [array for row in self.rows for layer in row for array in layer.state()]


class UnbatchedLayout(PerSequenceLayout):
    def step(self, model: Model, tokens: mx.array) -> mx.array:
        each = mx.split(tokens[:, None], len(self.rows))
        return mx.concatenate(
            [model(token, row)[:, -1] for token, row in zip(each, self.rows, strict=True)]
        )


class CopiedCache:
    """A cache whose buffers the attention kernel cannot write to."""

    in_place_caches: Sequence[InPlaceCache] = ()
    offset: mx.array

    @property
    def positions(self) -> mx.array:
        """See `models.kv.AttentionCache`."""
        return self.offset


class SliceWrittenCache(CopiedCache):
    """One layer. keys, values: [slots, H, capacity, D], the first len(lengths) slots in use.
    lengths: shared by all layers, without the position of the step."""

    def __init__(self, slots: int, capacity: int, like: mx.array) -> None:
        _, heads, _, dim = like.shape
        self.keys = mx.zeros((slots, heads, capacity, dim), like.dtype)
        self.values = mx.zeros_like(self.keys)
        self.offset = mx.array(0)
        self.lengths: Sequence[int] = ()
        self.mask = mx.array(0)

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
        self.write(keys, values)
        rows, longest = len(self.lengths), max(self.lengths) + 1
        arrays = (array[:rows, :, :longest] for array in (self.keys, self.values))
        return scaled_dot_product_attention(
            queries, *arrays, scale=scale, mask=self.mask, sinks=sinks, softcap=softcap
        )

    def write(self, keys: mx.array, values: mx.array) -> None:
        for row, at in enumerate(self.lengths):
            self.keys[row : row + 1, :, at : at + 1] = keys[row : row + 1]
            self.values[row : row + 1, :, at : at + 1] = values[row : row + 1]


class ScatterWrittenCache(SliceWrittenCache):
    def write(self, keys: mx.array, values: mx.array) -> None:
        rows = mx.arange(len(self.lengths))
        self.keys[rows, :, self.offset] = keys[:, :, 0]
        self.values[rows, :, self.offset] = values[:, :, 0]


class PaddedLayout:
    """kind: the cache class, which sets how positions are written."""

    def __init__(self, pasts: Sequence[SequenceCaches], kind: type[SliceWrittenCache]) -> None:
        capacity = max(past[0].state()[0].shape[2] for past in pasts)
        self.layers = [kind(len(pasts), capacity, layer.state()[0]) for layer in pasts[0]]
        self.lengths: list[int] = []
        for past in pasts:
            self.join(past)

    def join(self, past: SequenceCaches) -> None:
        row, length = len(self.lengths), past[0].offset
        for layer, cache in zip(self.layers, past, strict=True):
            keys, values = cache.state()
            layer.keys[row : row + 1, :, :length] = keys[:, :, :length]
            layer.values[row : row + 1, :, :length] = values[:, :, :length]
        self.lengths.append(length)

    def leave(self, row: int) -> None:
        # the last row moves to the free slot, so that used slots are contiguous
        last = len(self.lengths) - 1
        length = self.lengths[last]
        moved = [mx.contiguous(array[last, :, :length]) for array in self.arrays()]
        # evaluate now: a write to a buffer with pending reads copies all of it
        mx.eval(moved)
        for array, part in zip(self.arrays(), moved, strict=True):
            array[row, :, :length] = part
        self.lengths[row] = self.lengths[last]
        del self.lengths[last]

    def grow(self) -> None:
        for layer in self.layers:
            layer.keys, layer.values = (
                mx.concatenate([array, mx.zeros_like(array[:, :, :STEP])], axis=2)
                for array in (layer.keys, layer.values)
            )

    def step(self, model: Model, tokens: mx.array) -> mx.array:
        offset = mx.array(self.lengths)
        mask = mx.arange(max(self.lengths) + 1) <= offset[:, None, None, None]
        for layer in self.layers:
            layer.offset, layer.mask, layer.lengths = offset, mask, tuple(self.lengths)
        hidden = model(tokens[:, None], self.layers)[:, -1]
        self.lengths = [length + 1 for length in self.lengths]
        return hidden

    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in (layer.keys, layer.values)]


class SlabLayout:
    """One slot more than rows at the start, so that a row can join. A slot that was left is used
    again first."""

    def __init__(self, pasts: Sequence[SequenceCaches]) -> None:
        capacity = max(past[0].state()[0].shape[2] for past in pasts)
        self.layers = [create_slab(layer) for layer in pasts[0]]
        self.slots, self.capacity = len(pasts) + 1, capacity
        for layer in self.layers:
            layer.grow(self.slots, capacity)
        self.rows: dict[int, SequenceCaches] = {}  # by slot
        self.lengths: dict[int, int] = {}
        for past in pasts:
            self.join(past)

    def join(self, past: SequenceCaches) -> None:
        slot = next(slot for slot in range(self.slots) if slot not in self.rows)
        for layer, cache in zip(self.layers, past, strict=True):
            layer.join(slot, cache, clear_to=self.capacity)
        self.rows[slot], self.lengths[slot] = past, past[0].offset

    def leave(self, row: int) -> None:
        slot = sorted(self.rows)[row]
        place = SlabRow(key=slot, slot=slot, offset=self.lengths.pop(slot))
        caches = self.rows.pop(slot)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.copy_out(place, cache)
        mx.eval([cache.state() for cache in caches])

    def grow(self) -> None:
        self.capacity += STEP
        for layer in self.layers:
            layer.grow(self.slots, self.capacity)

    def step(self, model: Model, tokens: mx.array) -> mx.array:
        slots = sorted(self.rows)
        step = SlabStep([SlabRow(key=s, slot=s, offset=self.lengths[s]) for s in slots])
        rows = zip(*(self.rows[slot] for slot in slots), strict=True)
        layers = [
            layer.make_batch(step, caches) for layer, caches in zip(self.layers, rows, strict=True)
        ]
        hidden = model(tokens[:, None], layers)[:, -1]
        self.lengths = {slot: length + 1 for slot, length in self.lengths.items()}
        return hidden

    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.state()]


class PagedCache(CopiedCache):
    """One layer. keys, values: [pages, H, PAGE, D]. table: [B, maximum pages of a row]. page, slot:
    [B], the place of the step's positions."""

    def __init__(self, count: int, like: mx.array) -> None:
        _, heads, _, dim = like.shape
        self.keys = mx.zeros((count, heads, PAGE, dim), like.dtype)
        self.values = mx.zeros_like(self.keys)
        self.offset = self.table = self.page = self.slot = self.mask = mx.array(0)

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
        self.keys[self.page, :, self.slot] = keys[:, :, 0]
        self.values[self.page, :, self.slot] = values[:, :, 0]
        arrays = (self._gather(array) for array in (self.keys, self.values))
        return scaled_dot_product_attention(
            queries, *arrays, scale=scale, mask=self.mask, sinks=sinks, softcap=softcap
        )

    def _gather(self, pool: mx.array) -> mx.array:
        pages = pool[self.table].transpose(0, 2, 1, 3, 4)
        rows, heads, _, _, dim = pages.shape
        return pages.reshape(rows, heads, -1, dim)


class PagedLayout:
    def __init__(self, pasts: Sequence[SequenceCaches]) -> None:
        # pages for one more row and for growth
        count = (len(pasts) + 1) * -(-(pasts[0][0].offset + 2 * STEP) // PAGE)
        self.layers = [PagedCache(count, layer.state()[0]) for layer in pasts[0]]
        self.free = list(range(count))
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        for past in pasts:
            self.join(past)

    def join(self, past: SequenceCaches) -> None:
        length = past[0].offset
        pages = [self.free.pop() for _ in range(-(-length // PAGE))]
        where = mx.array(pages)
        for layer, cache in zip(self.layers, past, strict=True):
            keys, values = cache.state()
            layer.keys[where] = _split_pages(keys[..., :length, :])
            layer.values[where] = _split_pages(values[..., :length, :])
        self.tables.append(pages)
        self.lengths.append(length)

    def leave(self, row: int) -> None:
        self.free += self.tables.pop(row)
        del self.lengths[row]

    def grow(self) -> None:
        self.tables[0] += [self.free.pop() for _ in range(STEP // PAGE)]

    def step(self, model: Model, tokens: mx.array) -> mx.array:
        for table, length in zip(self.tables, self.lengths, strict=True):
            if length == len(table) * PAGE:
                table.append(self.free.pop())
        most = -(-(max(self.lengths) + 1) // PAGE)
        table = mx.array([(pages + [0] * most)[:most] for pages in self.tables])
        offset = mx.array(self.lengths)
        mask = mx.arange(most * PAGE) <= offset[:, None, None, None]
        page = mx.take_along_axis(table, (offset // PAGE)[:, None], axis=1)[:, 0]
        for layer in self.layers:
            layer.offset, layer.table, layer.mask = offset, table, mask
            layer.page, layer.slot = page, offset % PAGE
        hidden = model(tokens[:, None], self.layers)[:, -1]
        self.lengths = [length + 1 for length in self.lengths]
        return hidden

    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in (layer.keys, layer.values)]


def copy_with_capacity(state: Sequence[mx.array], length: int) -> KVCache:
    """A new cache with the first `length` positions and capacity for STEP more."""
    cache = KVCache()
    cache.reserve(length + STEP)
    cache.update(*(array[..., :length, :] for array in state))
    return cache


def _split_pages(array: mx.array) -> mx.array:
    """[1, H, L, D] -> [pages, H, PAGE, D], the last page filled up with zeros."""
    _, heads, length, dim = array.shape
    padded = mx.pad(array[0], [(0, 0), (0, -length % PAGE), (0, 0)])
    return padded.reshape(heads, -1, PAGE, dim).transpose(1, 0, 2, 3)
