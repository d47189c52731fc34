"""SmolVLM, SmolVLM2 and Idefics 3: square tiles row by row, and then the whole image in one tile.

Knows: the rules of transformers' SmolVLMImageProcessor and SmolVLMProcessor.
Must not know: the tower, the template.

The image is resized three times in a row: to the longest side, to multiples of the tile, and to one
tile.
"""

import math

from app.core.images import Image
from app.images.plan import Filter, ImagePlan, Resize, Tile, make_version
from app.images.processor_settings import ProcessorSettings

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"

# the longest side of any image in transformers
_MAX_LONGEST = 4096


class SmolVlmProcessor:
    """See `ImageProcessor`. The detail "low" sends only the whole image."""

    def __init__(self, settings: ProcessorSettings, max_tokens: int) -> None:
        is_smol = settings.model_type == "smolvlm"
        side = settings.read_model_int("vision_config.image_size", 512 if is_smol else 364)
        patch = settings.read_model_int("vision_config.patch_size", 16 if is_smol else 14)
        scale = settings.read_model_int("scale_factor", 4 if is_smol else 2)
        self._tokens_per_tile = (side // patch) ** 2 // scale**2
        self._side = settings.read_int("max_image_size.longest_edge", side)
        self._longest = min(settings.read_int("size.longest_edge", 4 * side), _MAX_LONGEST)
        self._splits = settings.read_bool("do_image_splitting", True)
        self._filter: Filter = settings.read_filter("lanczos")
        self._max_tokens = max_tokens
        self._around = settings.read_token("fake_image_token", _AROUND)
        self._whole = settings.read_token("global_image_token", _WHOLE)
        self.mark = settings.read_token("image_token", "<image>")
        self.version = make_version("smolvlm")

    def plan(self, image: Image) -> ImagePlan:
        """See `ImageProcessor`."""
        side = self._side
        first, second = self._compute_resizes(image, self._longest)
        longest = self._longest
        while self._count_tokens(second) > self._max_tokens and longest > side:
            longest = (longest - 1) // side * side
            first, second = self._compute_resizes(image, longest)
        whole = Resize(width=side, height=side, filter=self._filter)
        rows, columns = second.height // side, second.width // side
        if not self._splits or image.detail == "low":
            return self._make_plan((Tile(resizes=(first, whole)),), 0, 0)
        if rows * columns == 1:
            return self._make_plan((Tile(resizes=(first, second)),), 0, 0)
        parts = [
            Tile(
                resizes=(first, second),
                crop=(side * column, side * row, side * (column + 1), side * (row + 1)),
            )
            for row in range(rows)
            for column in range(columns)
        ]
        return self._make_plan((*parts, Tile(resizes=(first, second, whole))), rows, columns)

    def _make_plan(self, tiles: tuple[Tile, ...], rows: int, columns: int) -> ImagePlan:
        tokens = self.mark * self._tokens_per_tile
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{self._around}<row_{row}_col_{column}>{tokens}"
            text += "\n"
        text += "\n" if rows else ""
        return ImagePlan(
            tiles=tiles,
            grid=(len(tiles), self._tokens_per_tile),
            text=f"{text}{self._around}{self._whole}{tokens}{self._around}",
            token=self.mark,
            num_tokens=len(tiles) * self._tokens_per_tile,
            version=self.version,
        )

    def _count_tokens(self, resized: Resize) -> int:
        parts = resized.height // self._side * (resized.width // self._side)
        return (parts if parts == 1 else parts + 1) * self._tokens_per_tile

    def _compute_resizes(self, image: Image, longest: int) -> tuple[Resize, Resize]:
        """Returns the resize to the longest side, and the one to multiples of the tile."""
        height, width = _scale_to(image.height, image.width, longest)
        first = Resize(width=width, height=height, filter=self._filter)
        height, width = _round_up(height, width, self._side)
        return first, Resize(width=width, height=height, filter=self._filter)


def _scale_to(height: int, width: int, longest: int) -> tuple[int, int]:
    """Returns the height and width with this longest side. The other one is even."""
    ratio = width / height
    if width >= height:
        scaled = int(longest / ratio)
        return max(1, scaled + scaled % 2), longest
    scaled = int(longest * ratio)
    return longest, max(1, scaled + scaled % 2)


def _round_up(height: int, width: int, side: int) -> tuple[int, int]:
    """Returns multiples of `side` for both sides. The shorter one is computed from the rounded
    longer one."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return max(height, side), max(width, side)
