"""Gemma 3: one tile of a fixed size, whatever the shape of the image.

Knows: the rules of transformers' Gemma3ImageProcessor and Gemma3Processor, without pan and scan,
which published files disable. Must not know: the tower, the template.
"""

import math

from app.core.images import Image
from app.images.plan import ImagePlan, Resize, Tile, make_version
from app.images.processor_settings import ProcessorSettings


class Gemma3Processor:
    """See `ImageProcessor`. The size is fixed, so neither the detail nor the limit of tokens has an
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
