"""LFM2-VL: one tile, or square tiles and a thumbnail for large images.

Knows: the rules of transformers' Lfm2VlImageProcessor and Lfm2VlProcessor.
Must not know: the tower, the template.

transformers resizes with torchvision only, whose pixels may differ from Pillow's by one level.
"""

import math

from app.core.images import Image
from app.images.plan import Filter, ImagePlan, Resize, Tile, limit_grid, make_version
from app.images.processor_settings import ProcessorSettings
from app.images.processors.qwen_vl import smart_resize

_START, _END, _THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


class Lfm2VlProcessor:
    """See `ImageProcessor`. The detail "low" sends only one tile."""

    def __init__(self, settings: ProcessorSettings, max_tokens: int) -> None:
        patch = settings.read_int(
            "encoder_patch_size", settings.read_model_int("vision_config.patch_size", 16)
        )
        self._factor = patch * settings.read_int(
            "downsample_factor", settings.read_model_int("downsample_factor", 2)
        )
        self._patch = patch
        self._side = settings.read_int("tile_size", 512)
        self._min_tokens = settings.read_int("min_image_tokens", 64)
        self._max_tokens = min(settings.read_int("max_image_tokens", 256), max_tokens)
        self._tolerance = settings.read_float("max_pixels_tolerance", 2.0)
        self._min_tiles = settings.read_int("min_tiles", 2)
        self._tokens_per_tile = (self._side // self._factor) ** 2
        # the thumbnail counts, too
        allowed = (max_tokens - self._max_tokens) // self._tokens_per_tile
        self._max_tiles = min(settings.read_int("max_tiles", 10), allowed)
        self._splits = settings.read_bool("do_image_splitting", True)
        self._has_thumbnail = settings.read_bool("use_thumbnail", True)
        self._filter: Filter = settings.read_filter("bilinear")
        self.mark = settings.read_token("image_token", "<image>")
        self.version = make_version("lfm2-vl")

    def plan(self, image: Image) -> ImagePlan:
        """See `ImageProcessor`."""
        factor = self._factor
        high = self._max_tokens * factor**2
        height, width = smart_resize(
            image.height,
            image.width,
            factor,
            min(self._min_tokens * factor**2, high),
            high,
            at_least_one=True,
        )
        rows, columns = limit_grid(height // factor, width // factor, self._max_tokens)
        small = Resize(width=columns * factor, height=rows * factor, filter=self._filter)
        tokens = self.mark * (rows * columns)
        grid = self._choose_grid(image)
        if grid == (1, 1):
            return ImagePlan(
                tiles=(Tile(resizes=(small,)),),
                grid=(rows, columns),
                text=f"{_START}{tokens}{_END}",
                token=self.mark,
                num_tokens=rows * columns,
                version=self.version,
            )
        return self._make_split_plan(grid, small, rows * columns)

    def _make_split_plan(
        self, grid: tuple[int, int], thumbnail: Resize, thumbnail_tokens: int
    ) -> ImagePlan:
        (rows, columns), side = grid, self._side
        whole = Resize(width=columns * side, height=rows * side, filter=self._filter)
        tiles: list[Tile] = []
        text = ""
        for row in range(rows):
            for column in range(columns):
                corner = side * column, side * row
                crop = (*corner, corner[0] + side, corner[1] + side)
                tiles.append(Tile(resizes=(whole,), crop=crop))
                text += f"<|img_row_{row + 1}_col_{column + 1}|>"
                text += self.mark * self._tokens_per_tile
        num_tokens = len(tiles) * self._tokens_per_tile
        if self._has_thumbnail:
            tiles.append(Tile(resizes=(thumbnail,)))
            text += _THUMBNAIL + self.mark * thumbnail_tokens
            num_tokens += thumbnail_tokens
        return ImagePlan(
            tiles=tuple(tiles),
            grid=(1, num_tokens),
            text=f"{_START}{text}{_END}",
            token=self.mark,
            num_tokens=num_tokens,
            version=self.version,
        )

    def _choose_grid(self, image: Image) -> tuple[int, int]:
        """Returns the rows and columns of tiles: (1, 1) for an image that is not large, and
        otherwise those whose shape is nearest to the image's."""
        area = math.prod(
            max(self._patch, round(side / self._factor) * self._factor)
            for side in (image.height, image.width)
        )
        largest = self._max_tokens * self._factor**2 * self._tolerance
        if not self._splits or image.detail == "low" or area <= largest:
            return 1, 1
        counts = range(1, self._max_tiles + 1)
        grids = [
            (rows, columns)
            for columns in counts
            for rows in counts
            if self._min_tiles <= rows * columns <= self._max_tiles
        ]
        best, nearest = (1, 1), math.inf
        for rows, columns in sorted(grids, key=math.prod):
            difference = abs(image.width / image.height - columns / rows)
            half = 0.5 * self._side**2 * rows * columns
            if difference < nearest or (
                difference == nearest and image.width * image.height > half
            ):
                best, nearest = (rows, columns), difference
        return best
