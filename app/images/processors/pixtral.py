"""Pixtral, Mistral 3 and Ministral 3: one tile with a limit on its longest side.

Knows: the rules of transformers' PixtralImageProcessor and PixtralProcessor.
Must not know: the tower, the template.
"""

import math

from app.core.images import Image
from app.images.plan import (
    LOW_DETAIL_SIDE,
    Filter,
    ImagePlan,
    Resize,
    Tile,
    limit_grid,
    make_version,
)
from app.images.processor_settings import ProcessorSettings

_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


class PixtralProcessor:
    """See `ImageProcessor`. Each row of image tokens ends with a break, which is an ordinary
    token."""

    def __init__(self, settings: ProcessorSettings, max_tokens: int) -> None:
        is_pixtral = settings.model_type != "mistral3"
        patch = settings.read_model_int("vision_config.patch_size", 16 if is_pixtral else 14)
        merge = settings.read_model_int("spatial_merge_size", 1 if is_pixtral else 2)
        self._unit = patch * merge
        self._longest = settings.read_int("size.longest_edge", 1024 if is_pixtral else 1540)
        self._filter: Filter = settings.read_filter("bicubic")
        self._max_tokens = max_tokens
        self.mark = settings.read_token("image_token", "[IMG]")
        self.version = make_version("pixtral")

    def plan(self, image: Image) -> ImagePlan:
        """See `ImageProcessor`."""
        rows, columns = self._compute_grid(image)
        resize = Resize(width=columns * self._unit, height=rows * self._unit, filter=self._filter)
        row = self.mark * columns
        return ImagePlan(
            tiles=(Tile(resizes=(resize,)),),
            grid=(rows, columns),
            text=(row + _BREAK) * (rows - 1) + row + _END,
            token=self.mark,
            num_tokens=rows * columns,
            version=self.version,
        )

    def _compute_grid(self, image: Image) -> tuple[int, int]:
        longest = self._longest
        if image.detail == "low":
            longest = min(longest, LOW_DETAIL_SIDE)
        rows, columns = _fit(image.height, image.width, self._unit, longest)
        while rows * columns > self._max_tokens and longest > self._unit:
            longest = (longest - 1) // self._unit * self._unit
            rows, columns = _fit(image.height, image.width, self._unit, longest)
        return limit_grid(rows, columns, self._max_tokens)


def _fit(height: int, width: int, unit: int, longest: int) -> tuple[int, int]:
    """Returns the rows and columns of squares of `unit` pixels that cover the image, after it was
    scaled down to a longest side of `longest` pixels."""
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return max(1, (height - 1) // unit + 1), max(1, (width - 1) // unit + 1)
