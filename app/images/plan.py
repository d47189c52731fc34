"""The plan of an image: the pixels that a vision tower receives, and the text of the image tokens.

Knows: sizes in pixels, resampling filters, the digest that identifies the rows of an image.
Must not know: codecs, pixels, model families, token IDs.

A plan depends only on the size of the image, the requested detail and the files of the model.
Therefore the tokens of a prompt can be counted before any image is decoded.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Literal, Protocol

from app.core.distributions import get_version
from app.core.images import Image

Filter = Literal["bilinear", "bicubic", "lanczos"]

# The default for the server's token limit per image. A larger image is scaled down.
DEFAULT_MAX_TOKENS = 4096

# The approximate size of an image with the detail "low", for families with variable sizes.
LOW_DETAIL_SIDE = 512
LOW_DETAIL_PIXELS = LOW_DETAIL_SIDE**2

# increases when the pixels of a plan change, so that no cached rows of other pixels are used
_RULES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """One resampling of all pixels, in 8 bits per channel, with Pillow's filters."""

    width: int
    height: int
    filter: Filter


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One input image of a vision tower. resizes: applied in this order to the decoded image; at
    least one. crop: the part of the result, as (left, top, right, bottom) in pixels; None for all
    of it."""

    resizes: tuple[Resize, ...]
    crop: tuple[int, int, int, int] | None = None

    @property
    def width(self) -> int:
        return self.resizes[-1].width if self.crop is None else self.crop[2] - self.crop[0]

    @property
    def height(self) -> int:
        return self.resizes[-1].height if self.crop is None else self.crop[3] - self.crop[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """The input of the vision tower and the prompt for one image.

    tiles: in the order in which the tower receives them. grid: the rows and columns of image
    tokens, num_tokens in total; for an image in several tiles, the number of tiles and the tokens
    of each, or (1, num_tokens) if these differ. text: replaces the template's mark
    (`ImageProcessor.mark`). token: the text of the image token, of which `text` contains
    num_tokens. Other tokens of `text`, such as line breaks, are ordinary tokens. version: see
    `ImageProcessor`.
    """

    tiles: tuple[Tile, ...]
    grid: tuple[int, int]
    text: str
    token: str
    num_tokens: int
    version: str

    def key(self, image: Image) -> bytes:
        """Returns 32 bytes that identify the rows of the image: a digest of the encoded file, the
        tiles and the version of the preprocessing."""
        tiles = [
            ([(one.width, one.height, one.filter) for one in tile.resizes], tile.crop)
            for tile in self.tiles
        ]
        geometry = json.dumps([self.version, tiles], separators=(",", ":"))
        return hashlib.sha256(image.digest + geometry.encode()).digest()


class ImageProcessor(Protocol):
    """The preprocessing of a model family, as its files configure it. mark: the text that the chat
    template writes for an image. version: changes when the same plan gives different pixels."""

    @property
    def mark(self) -> str: ...

    @property
    def version(self) -> str: ...

    def plan(self, image: Image) -> ImagePlan:
        """Returns the plan of an image. Uses only its size and detail. Raises AppError(INVALID) for
        a shape that the family does not support."""
        ...


def make_version(family: str) -> str:
    """Returns the version of a family's preprocessing. The pixels are Pillow's, so its version is a
    part. It is read from the metadata of the package, which is not imported."""
    return f"{family} {_RULES} pillow {get_version('pillow')}"


def limit_grid(rows: int, columns: int, max_tokens: int) -> tuple[int, int]:
    """Shortens the longer side of the grid of an extremely wide or tall image, whose shorter side
    cannot get shorter, so that it has at most `max_tokens` tokens."""
    if rows <= columns:
        return rows, min(columns, max(1, max_tokens // rows))
    return min(rows, max(1, max_tokens // columns)), columns
