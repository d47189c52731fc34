"""M-RoPE: rotary positions with three axes, time, height and width (Qwen2-VL, Wang et al. 2024).

Knows: the ranges of image rows in a prompt, `mrope_section` in config.json. Must not know: layers,
caches, tokens.

A text token has the same position on all axes, so its rotation is ordinary rope. An image that
begins at position p has time p, height p + row and width p + column, in the grid of its rows, and
the next token has the position p + max(rows, columns). So after an image, the position of a token
is its index plus a constant, the delta. Each frequency of a head uses one axis.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

AXES = 3


class ImageRange(NamedTuple):
    """The image rows [start, start + rows * columns) of a prompt, in row-major order."""

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns


def find_delta(images: Sequence[ImageRange], index: int) -> int:
    """Returns the position of a text token minus its index in the prompt. images: in order, and
    none of them contains the index."""
    earlier = [image for image in images if image.end <= index]
    return sum(max(image.rows, image.columns) - image.rows * image.columns for image in earlier)


def make_positions(images: Sequence[ImageRange], start: int, end: int) -> mx.array:
    """Returns the positions of the tokens [start, end) of a prompt, as [3, end - start] int32.
    images: all images of the prompt, in order. The range may begin or end within an image."""
    axes: list[list[int]] = [[], [], []]
    index, delta = 0, 0  # of the next token
    for image in images:
        _add_text(axes, range(max(index, start), min(image.start, end)), delta)
        first = image.start + delta
        for token in range(max(image.start, start), min(image.end, end)):
            row, column = divmod(token - image.start, image.columns)
            for axis, position in zip(axes, (first, first + row, first + column), strict=True):
                axis.append(position)
        index = image.end
        delta += max(image.rows, image.columns) - image.rows * image.columns
    _add_text(axes, range(max(index, start), end), delta)
    return mx.array(axes, dtype=mx.int32).reshape(AXES, end - start)


def _add_text(axes: Sequence[list[int]], indexes: range, delta: int) -> None:
    for axis in axes:
        axis.extend(index + delta for index in indexes)


def assign_axes(section: Sequence[int], frequencies: int, *, interleaved: bool) -> list[int]:
    """Returns the axis of each frequency. section: the number of frequencies of each axis, as in
    config.json. interleaved: whether the axes alternate, as in Qwen3-VL and later, and the rest is
    time; otherwise each axis has consecutive frequencies. Raises ValueError for an invalid
    section."""
    if len(section) != AXES or any(count < 0 for count in section):
        raise ValueError(f"mrope_section is {list(section)}, but needs three numbers")
    if not interleaved:
        if sum(section) != frequencies:
            raise ValueError(f"mrope_section is {list(section)}, but the sum must be {frequencies}")
        return [axis for axis, count in enumerate(section) for _ in range(count)]
    return [
        axis if axis and i < AXES * section[axis] else 0
        for i in range(frequencies)
        for axis in [i % AXES]
    ]
