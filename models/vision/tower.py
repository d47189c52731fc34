"""Vision towers: they compute the rows of a prompt that an image takes, from its pixels.

Knows: tiles of pixels, patches, blocks, steps of bounded size. Must not know: model families,
codecs, resizing, prompts, the engine.

A tower computes one tile at a time, and a tile in chunks of patches, so that a step and its memory
are bounded. The chunks depend only on the size of the tile. So the features of an image do not
depend on other images, or on the number of steps between which other work is done.

The patches of a tile are in block order: the patches that become one image row, a square of
`merge_size` by `merge_size` patches, follow each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from models.attention_pieces import device_of_shape
from models.attention_route import AttentionShape, workspace_bytes
from models.sdpa import scaled_dot_product_attention
from models.vision.layers import Rotation
from models.vision.pixels import PixelTable, Size, make_patches

# The largest number of patches that one step computes. On a CPU, a step of usual towers takes up to
# 0.18 s of one core, and smaller steps take no more time in total. On a GPU, each step waits for
# the device, so there are fewer.
_CPU_CHUNK, _GPU_CHUNK = 256, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFeatures:
    """The output of a tower for one image. rows: [T, hidden], the inputs of the text model at the
    image rows. deepstack: [T, hidden] each, which the text model adds to the hidden states at the
    image rows after its first layers."""

    rows: mx.array
    deepstack: tuple[mx.array, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The patches of a tile. height, width: their numbers. y, x: [P] int32, the position of each
    patch, in the order of the tower."""

    height: int
    width: int
    y: mx.array
    x: mx.array


class Block(Protocol):
    """A block of a tower, split into two parts where all keys and values are needed."""

    def project(
        self, x: mx.array, rotation: Rotation | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Returns queries, keys and values [1, heads, L, D] of hidden states [L, hidden]."""
        ...

    def complete(self, x: mx.array, attended: mx.array) -> mx.array:
        """Returns the output [L, hidden] of the block. x: its input. attended: [1, heads, L, D]."""
        ...


class VisionTower(nn.Module):
    """The base class of towers.

    channels_last: the order of the values of a patch, see `make_patches`. patch_size: the side of a
    patch in pixels. merge_size: see the module. heads, kv_heads, head_dim, scale: those of
    attention. inner_size: the largest width of an intermediate result for a patch. tile_size: the
    side of all tiles in pixels, or None if they may have any size.
    """

    channels_last: ClassVar[bool] = False

    def __init__(
        self,
        pixels: PixelTable,
        *,
        patch_size: int,
        merge_size: int,
        hidden_size: int,
        inner_size: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        tile_size: int | None = None,
    ) -> None:
        super().__init__()
        self._pixels = pixels
        self.patch_size, self.merge_size, self.tile_size = patch_size, merge_size, tile_size
        self.hidden_size, self.inner_size = hidden_size, inner_size
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head_dim = head_dim or hidden_size // heads
        self.scale = self.head_dim**-0.5

    # -- for callers

    def begin(self, tiles: Sequence[mx.array]) -> "Encoding":
        """Begins to compute an image. tiles: its parts, each [height, width, 3] uint8, whose sides
        are multiples of patch_size * merge_size, or equal tile_size. Evaluates nothing."""
        return Encoding(self, tiles)

    def encode(self, tiles: Sequence[mx.array]) -> ImageFeatures:
        """Computes an image in one go."""
        encoding = self.begin(tiles)
        while encoding.num_done < encoding.num_steps:
            encoding.run_step()
        return encoding.finish()

    def count_rows(self, sizes: Sequence[Size]) -> int:
        """Returns the number of image rows of an image with tiles of these sizes."""
        return sum(rows * cols for rows, cols in map(self._count_patches, sizes)) // (
            self.merge_size**2
        )

    def estimate_pixel_bytes(self, rows: int) -> int:
        """Returns the size of the tiles of an image with this number of image rows."""
        if self.tile_size is None:
            return 3 * rows * (self.patch_size * self.merge_size) ** 2
        rows_of_tile = self.count_rows([(self.tile_size, self.tile_size)])
        return 3 * self.tile_size**2 * -(-rows // rows_of_tile)

    def estimate_bytes(self, sizes: Sequence[Size]) -> int:
        """Returns an upper bound on the memory that an image with tiles of these sizes needs, from
        the tiles to the features, besides the weights."""
        tiles = [rows * cols for rows, cols in map(self._count_patches, sizes)]
        itemsize = 4
        group = self.merge_size**2
        # an image row is at most as wide as its patches
        features = self.count_rows(sizes) * self.feature_size * itemsize
        return features + max(self._tile_bytes(count, group, itemsize) for count in tiles)

    # -- for families

    @property
    def feature_size(self) -> int:
        """The number of values of the features per image row."""
        raise NotImplementedError

    @property
    def stack(self) -> Sequence[Block]:
        """The blocks in their order."""
        raise NotImplementedError

    def order(self, grid: tuple[int, int]) -> mx.array | None:
        """Returns the order [P / merge_size²] in which blocks compute the groups of patches of a
        tile, or None for the usual one."""
        del grid

    def rotation(self, grid: Grid) -> Rotation | None:
        """Returns the rotation of queries and keys of each patch, or None."""
        del grid

    def embed(self, patches: mx.array, grid: Grid, part: slice) -> mx.array:
        """Returns the input [L, hidden] of the first block. patches: [L, 3 * patch_size²] float32,
        those of the range `part` of the grid."""
        raise NotImplementedError

    def windows(self, block: int, grid: Grid) -> Sequence[int] | None:
        """Returns the ends of the ranges of patches that attend to each other in a block, or None
        if all do."""
        del block, grid

    def merge(self, x: mx.array) -> mx.array:
        """Returns image rows [L / merge_size², hidden of the text model] of the output [L, hidden]
        of the last block."""
        raise NotImplementedError

    def merge_deepstack(self, block: int, x: mx.array) -> mx.array | None:
        """Returns the DeepStack rows of the output [L, hidden] of a block, or None."""
        del block, x

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Converts checkpoint names and layouts to ours. weights: those of the vision modules,
        without the prefix `model.`. Drops tensors that are known to be redundant."""
        raise NotImplementedError

    # -- of this class

    def _count_patches(self, size: Size) -> tuple[int, int]:
        height, width = size
        if self.tile_size is not None:
            if size != (self.tile_size, self.tile_size):
                wanted = f"{self.tile_size} x {self.tile_size}"
                raise ValueError(f"a tile of {width} x {height} pixels does not have {wanted}")
            # a remainder is cut off, as by a convolution (SmolVLM: 384 pixels, patches of 14)
            height = width = self.tile_size // self.patch_size * self.patch_size
        side = self.patch_size * self.merge_size
        if height < 1 or width < 1 or height % side or width % side:
            raise ValueError(f"a tile of {width} x {height} pixels is not made of {side} x {side}")
        return height // self.patch_size, width // self.patch_size

    def _tile_bytes(self, count: int, group: int, itemsize: int) -> int:
        chunk = min(count, _chunk_length())
        width = self.heads * self.head_dim
        # pixels, their indices, values and patches, and patches in a different order
        patch = 3 * self.patch_size**2
        first = count * patch * (1 + 4 * itemsize)
        # hidden states in and out; queries, keys, values, and keys and values once more while their
        # chunks are joined; cosines and sines
        states = count * itemsize * (2 * self.hidden_size + 5 * width + 2 * self.head_dim)
        inner = chunk * itemsize * (3 * self.inner_size + 4 * self.hidden_size + 6 * width)
        shape = AttentionShape(
            heads=self.heads,
            kv_heads=self.kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            itemsize=itemsize,
        )
        scores = workspace_bytes(device_of_shape(shape), shape, length=chunk, total=count)
        merged = 4 * chunk * itemsize * self.hidden_size
        return max(first, states) + inner + scores + merged

    def run_tile(self, tile: mx.array) -> Iterator[ImageFeatures | None]:
        """Computes a tile. Yields None after each step, and the features after the last one."""
        height, width = self._count_patches((tile.shape[0], tile.shape[1]))
        order = self.order((height, width))
        grid = _make_grid(height, width, self.merge_size, order)
        dtype = _find_dtype(self.stack[0] if self.stack else self)
        patches = make_patches(
            self._pixels,
            tile[: height * self.patch_size, : width * self.patch_size],
            self.patch_size,
            self.merge_size,
            channels_last=self.channels_last,
        )
        if order is not None:
            patches = _take_groups(patches, order, self.merge_size**2)
        chunks = _split(height * width, self.merge_size**2)
        hidden: list[mx.array] = []
        rows: list[mx.array] = []
        for chunk in chunks:
            hidden.append(self.embed(patches[chunk], grid, chunk).astype(dtype))
            if not self.stack:
                rows.append(self.merge(hidden.pop()))
            mx.eval(hidden, rows)
            if self.stack or chunk is not chunks[-1]:
                yield None
        del patches
        rotation = self.rotation(grid)
        deepstack: list[list[mx.array]] = []
        for number, block in enumerate(self.stack):
            projected: list[tuple[mx.array, mx.array, mx.array]] = []
            for x, chunk in zip(hidden, chunks, strict=True):
                projected.append(block.project(x, _take(rotation, chunk)))
                mx.eval(projected)
                if len(chunks) > 1:
                    yield None
            keys, values = (_join([part[i] for part in projected], axis=2) for i in (1, 2))
            queries = [part[0] for part in projected]
            del projected
            mx.eval(keys, values)
            ends = self.windows(number, grid)
            merged: list[mx.array] = []
            for i, chunk in enumerate(chunks):
                seen = self._attend(queries[i], keys, values, chunk.start, ends)
                hidden[i] = block.complete(hidden[i], seen)
                more = self.merge_deepstack(number, hidden[i])
                if more is not None:
                    merged.append(more)
                if number == len(self.stack) - 1:
                    rows.append(self.merge(hidden[i]))
                mx.eval(hidden[i], merged, rows)
                last = number == len(self.stack) - 1 and chunk is chunks[-1]
                if not last:
                    yield None
            if merged:
                deepstack.append(merged)
        yield self._restore_order([rows, *deepstack], order)

    def count_steps(self, size: Size) -> int:
        """Returns the number of steps for a tile."""
        height, width = self._count_patches(size)
        chunks = len(_split(height * width, self.merge_size**2))
        return chunks + len(self.stack) * (1 if chunks == 1 else 2 * chunks)

    def _attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        start: int,
        ends: Sequence[int] | None,
    ) -> mx.array:
        """Computes attention of the queries of the patches from `start` on."""
        if ends is None:
            return scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=None)
        results: list[mx.array] = []
        low, end_of_chunk = 0, start + queries.shape[2]
        for high in ends:
            first, last = max(low, start), min(high, end_of_chunk)
            if first < last:
                results.append(
                    scaled_dot_product_attention(
                        queries[:, :, first - start : last - start],
                        keys[:, :, low:high],
                        values[:, :, low:high],
                        scale=self.scale,
                        mask=None,
                    )
                )
            low = high
        return _join(results, axis=2)

    def _restore_order(
        self, parts: Sequence[list[mx.array]], order: mx.array | None
    ) -> ImageFeatures:
        joined = [_join(part, axis=0) for part in parts]
        if order is not None:
            inverse = mx.argsort(order)
            joined = [array[inverse] for array in joined]
        mx.eval(joined)
        return ImageFeatures(rows=joined[0], deepstack=tuple(joined[1:]))


class Encoding:
    """An image on its way through a tower. num_steps: the number of steps in total. num_done: the
    number of steps that were run."""

    def __init__(self, tower: VisionTower, tiles: Sequence[mx.array]) -> None:
        self.num_steps = sum(tower.count_steps((tile.shape[0], tile.shape[1])) for tile in tiles)
        self.num_done = 0
        self._features: list[ImageFeatures] = []
        self._steps = (step for tile in tiles for step in tower.run_tile(tile))

    def run_step(self) -> None:
        """Runs the next step and evaluates it. Its work is bounded by a constant number of patches
        of one block, which attend to all patches of their tile."""
        features = next(self._steps)
        self.num_done += 1
        if features is not None:
            self._features.append(features)

    def finish(self) -> ImageFeatures:
        """Returns the features, after all steps."""
        if self.num_done < self.num_steps:
            raise ValueError(f"{self.num_steps - self.num_done} steps are left")
        if len(self._features) == 1:
            return self._features[0]
        parts = self._features
        return ImageFeatures(
            rows=mx.concatenate([part.rows for part in parts]),
            deepstack=tuple(
                mx.concatenate(list(level))
                for level in zip(*(part.deepstack for part in parts), strict=True)
            ),
        )


def _find_dtype(block: Any) -> mx.Dtype:
    """Returns the type in which a block computes: that of its vectors, which are never packed."""
    flat: Any = tree_flatten(block.parameters())
    return next(array.dtype for _, array in flat if array.ndim == 1)


def _make_grid(height: int, width: int, merge: int, order: mx.array | None) -> Grid:
    def in_blocks(array: mx.array) -> mx.array:
        blocks = mx.broadcast_to(array, (height, width)).reshape(
            height // merge, merge, width // merge, merge
        )
        flat = blocks.transpose(0, 2, 1, 3).reshape(-1)
        return flat if order is None else _take_groups(flat, order, merge**2)

    y, x = in_blocks(mx.arange(height)[:, None]), in_blocks(mx.arange(width)[None])
    mx.eval(y, x)
    return Grid(height=height, width=width, y=y, x=x)


def _take_groups(array: mx.array, order: mx.array, group: int) -> mx.array:
    """Reorders groups of patches [P, ...]."""
    return array.reshape(-1, group, *array.shape[1:])[order].reshape(array.shape)


def _chunk_length() -> int:
    return _CPU_CHUNK if mx.default_device().type == mx.DeviceType.cpu else _GPU_CHUNK


def _split(count: int, group: int) -> list[slice]:
    """Returns ranges of patches, of whole groups."""
    step = _chunk_length() // group * group
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _take(rotation: Rotation | None, part: slice) -> Rotation | None:
    return None if rotation is None else (rotation[0][part], rotation[1][part])


def _join(arrays: list[mx.array], axis: int) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=axis)
