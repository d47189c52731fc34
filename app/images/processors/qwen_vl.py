"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: one tile, whose sides are multiples of a factor.

Knows: the rules of transformers' Qwen2VLImageProcessor, which all of these models use.
Must not know: the tower, the template.
"""

import math
from dataclasses import dataclass

from app.core.errors import AppError, ErrorKind
from app.core.images import Image
from app.images.plan import (
    LOW_DETAIL_PIXELS,
    Filter,
    ImagePlan,
    Resize,
    Tile,
    limit_grid,
    make_version,
)
from app.images.processor_settings import ProcessorSettings

# the largest ratio of the sides (transformers' smart_resize)
MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True)
class _Limits:
    """The limits of the resized area in pixels, if the files of a model have none."""

    low: int
    high: int


_LIMITS_2, _LIMITS_3 = _Limits(56 * 56, 28 * 28 * 1280), _Limits(65536, 16777216)


class QwenVlProcessor:
    """See `ImageProcessor`."""

    def __init__(self, settings: ProcessorSettings, max_tokens: int) -> None:
        is_2 = settings.model_type.startswith("qwen2")
        limits = _LIMITS_2 if is_2 else _LIMITS_3
        patch = settings.read_int(
            "patch_size", settings.read_model_int("vision_config.patch_size", 14 if is_2 else 16)
        )
        merge = settings.read_int(
            "merge_size", settings.read_model_int("vision_config.spatial_merge_size", 2)
        )
        # both are areas, despite their names; the older names come first, as in transformers
        self._low = settings.read_int(
            "min_pixels", settings.read_int("size.shortest_edge", limits.low)
        )
        self._high = settings.read_int(
            "max_pixels", settings.read_int("size.longest_edge", limits.high)
        )
        self._factor = patch * merge
        self._filter: Filter = settings.read_filter("bicubic")
        self._max_tokens = max_tokens
        self.mark = settings.read_token("image_token", "<|image_pad|>")
        self.version = make_version("qwen-vl")

    def plan(self, image: Image) -> ImagePlan:
        """See `ImageProcessor`. Raises AppError(INVALID) if one side is more than 200 times as long
        as the other."""
        factor = self._factor
        high = min(self._high, self._max_tokens * factor**2)
        if image.detail == "low":
            high = min(high, LOW_DETAIL_PIXELS)
        _check_shape(image)
        height, width = smart_resize(image.height, image.width, factor, min(self._low, high), high)
        rows, columns = limit_grid(height // factor, width // factor, self._max_tokens)
        resize = Resize(width=columns * factor, height=rows * factor, filter=self._filter)
        return ImagePlan(
            tiles=(Tile(resizes=(resize,)),),
            grid=(rows, columns),
            text=self.mark * (rows * columns),
            token=self.mark,
            num_tokens=rows * columns,
            version=self.version,
        )


def _check_shape(image: Image) -> None:
    if max(image.height, image.width) > MAX_ASPECT_RATIO * min(image.height, image.width):
        raise AppError(
            ErrorKind.INVALID,
            f"{image.param}: the image is {image.width} × {image.height} pixels, but no side may "
            f"be more than {MAX_ASPECT_RATIO} times as long as the other for this model: crop it",
            param=image.param,
        )


def smart_resize(
    height: int, width: int, factor: int, low: int, high: int, *, at_least_one: bool = False
) -> tuple[int, int]:
    """Returns the height and the width in pixels after the resize: multiples of `factor`, about the
    same shape, and, if possible, an area between `low` and `high`. Halves are rounded to even, as
    Python's `round` does (transformers' smart_resize). at_least_one: whether a side that rounds to
    0 counts as `factor` pixels in the comparison with the limits, as in LFM2-VL."""
    least = factor if at_least_one else 0
    rows = max(least, round(height / factor) * factor)
    columns = max(least, round(width / factor) * factor)
    if rows * columns > high:
        beta = math.sqrt(height * width / high)
        rows = max(factor, math.floor(height / beta / factor) * factor)
        columns = max(factor, math.floor(width / beta / factor) * factor)
    elif rows * columns < low:
        beta = math.sqrt(low / (height * width))
        rows = math.ceil(height * beta / factor) * factor
        columns = math.ceil(width * beta / factor) * factor
    return rows, columns
