"""Gemma 3: one tile of a fixed size, whatever the shape of the image. Gemma 4: one tile of about
the same shape as the image, with a token budget.

Knows: the rules of transformers' Gemma3ImageProcessor and Gemma3Processor, without pan and scan,
which published files disable, and of Gemma4ImageProcessor and Gemma4UnifiedImageProcessor.
Must not know: the tower, the template.

For Gemma 4, transformers fills the patches up to the budget with zeros, which the tower ignores. A
plan has only the pixels of the image.
"""

import math

from app.core.images import Image
from app.images.plan import Filter, ImagePlan, Resize, Tile, make_version
from app.images.processor_settings import ProcessorSettings

# the numbers of tokens that the model was trained with; the one for the detail "low", which is
# about 512 × 512 pixels
_BUDGETS = (70, 140, 280, 560, 1120)
_LOW_BUDGET = 140


class Gemma3Processor:
    """See `ImageProcessor`. The size is fixed, so neither the detail nor the token limit has an
    effect."""

    def __init__(self, settings: ProcessorSettings, max_tokens: int) -> None:
        side = settings.read_model_int("vision_config.image_size", 896)
        self._resize = Resize(
            width=settings.read_int("size.width", side),
            height=settings.read_int("size.height", side),
            filter=settings.read_filter("bilinear"),
        )
        self._num_tokens = settings.read_model_int("mm_tokens_per_image", 256)
        self._token = settings.read_token("image_token", "<image_soft_token>")
        self._end = settings.read_token("eoi_token", "<end_of_image>")
        self.mark = settings.read_token("boi_token", "<start_of_image>")
        self.version = make_version("gemma3")

    def plan(self, image: Image) -> ImagePlan:
        """See `ImageProcessor`."""
        side = math.isqrt(self._num_tokens)
        return ImagePlan(
            tiles=(Tile(resizes=(self._resize,)),),
            grid=(side, side) if side**2 == self._num_tokens else (1, self._num_tokens),
            text=f"\n\n{self.mark}{self._token * self._num_tokens}{self._end}\n\n",
            token=self._token,
            num_tokens=self._num_tokens,
            version=self.version,
        )


class Gemma4Processor:
    """See `ImageProcessor`. The token limit selects the next lower budget that the model was
    trained with, but at least the lowest."""

    def __init__(self, settings: ProcessorSettings, max_tokens: int) -> None:
        patch = settings.read_int(
            "patch_size", settings.read_model_int("vision_config.patch_size", 16)
        )
        pool = settings.read_int(
            "pooling_kernel_size", settings.read_model_int("vision_config.pooling_kernel_size", 3)
        )
        self._unit = patch * pool
        self._budget = settings.read_int("max_soft_tokens", 280)
        if self._budget > max_tokens:
            self._budget = max((one for one in _BUDGETS if one <= max_tokens), default=_BUDGETS[0])
        self._filter: Filter = settings.read_filter("bicubic")
        self._start = settings.read_token("boi_token", "<|image>")
        self._end = settings.read_token("eoi_token", "<image|>")
        self.mark = settings.read_token("image_token", "<|image|>")
        self.version = make_version("gemma4")

    def plan(self, image: Image) -> ImagePlan:
        """See `ImageProcessor`."""
        budget = min(self._budget, _LOW_BUDGET) if image.detail == "low" else self._budget
        rows, columns = _fit(image.height, image.width, self._unit, budget)
        resize = Resize(width=columns * self._unit, height=rows * self._unit, filter=self._filter)
        return ImagePlan(
            tiles=(Tile(resizes=(resize,)),),
            grid=(rows, columns),
            text=f"{self._start}{self.mark * (rows * columns)}{self._end}",
            token=self.mark,
            num_tokens=rows * columns,
            version=self.version,
        )


def _fit(height: int, width: int, unit: int, budget: int) -> tuple[int, int]:
    """Returns the rows and columns of squares of `unit` pixels: as many as possible, up to
    `budget`, with about the shape of the image. Smaller images are enlarged."""
    factor = math.sqrt(budget * unit**2 / (height * width))
    rows, columns = math.floor(factor * height / unit), math.floor(factor * width / unit)
    if rows == 0:
        return 1, min(width // height, budget)
    if columns == 0:
        return min(height // width, budget), 1
    return rows, columns
