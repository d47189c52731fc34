"""Positions with three axes. tests/models/test_image_reference.py compares them with
transformers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.mrope import ImageRange, assign_axes, find_delta, make_positions


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[ImageRange], int]:
    """Images, some of them adjacent, and the length of the prompt."""
    images: list[ImageRange] = []
    index = 0
    for _ in range(draw(st.integers(0, 4))):
        index += draw(st.integers(0, 3))
        images.append(ImageRange(index, draw(st.integers(1, 5)), draw(st.integers(1, 5))))
        index = images[-1].end
    return images, index + draw(st.integers(0, 3))


def positions(images: list[ImageRange], start: int, end: int) -> list[list[int]]:
    found: Any = make_positions(images, start, end).tolist()
    return found


def test_an_image_has_a_grid_of_positions_and_text_continues_after_its_longer_side() -> None:
    image = ImageRange(2, 2, 3)
    assert positions([image], 0, 10) == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert [find_delta([image], index) for index in (0, 1, 8, 9)] == [0, 0, -3, -3]


@given(layouts(), st.data())
def test_a_chunk_has_the_positions_of_its_part_of_the_prompt(
    layout: tuple[list[ImageRange], int], data: st.DataObject
) -> None:
    images, length = layout
    start = data.draw(st.integers(0, length))
    end = data.draw(st.integers(start, length))
    whole = positions(images, 0, length)
    assert positions(images, start, end) == [axis[start:end] for axis in whole]


@given(layouts())
def test_text_has_its_index_plus_the_delta_on_all_axes(
    layout: tuple[list[ImageRange], int],
) -> None:
    images, length = layout
    found = positions(images, 0, length)
    for index in range(length):
        if not any(image.start <= index < image.end for image in images):
            assert {axis[index] for axis in found} == {index + find_delta(images, index)}


def test_axes_of_frequencies() -> None:
    assert assign_axes([2, 1, 1], 4, interleaved=False) == [0, 0, 1, 2]
    assert assign_axes([4, 2, 2], 8, interleaved=True) == [0, 1, 2, 0, 1, 2, 0, 0]
    for section, frequencies in (([1, 1], 2), ([1, 1, 1], 4), ([-1, 2, 2], 3)):
        with pytest.raises(ValueError, match="mrope_section"):
            assign_axes(section, frequencies, interleaved=False)
