"""The images of a request: as a client sent them, in a prompt, and as pixels for a vision tower.

Knows: encoded bytes, sizes, positions of a prompt, the token IDs that stand in for image rows.
Must not know: codecs, dialects, model families, tensors.

An image row is a position of the prompt whose input is a row of the vision tower's output instead
of a token's embedding. In `Job.prompt_token_ids` it has a negative ID, derived from the image. So
everything that compares token IDs, such as the prefix cache, treats two images as equal exactly if
their rows are.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import Struct

ImageFormat = Literal["png", "jpeg", "webp", "gif"]

# low: at most about 512 × 512 pixels · high, auto: the limits of the model
ImageDetail = Literal["auto", "low", "high"]

_KEY_BITS = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that a client sent. data: the encoded file. width, height: in pixels, from the
    header of the file, after the rotation that its EXIF orientation requests. digest: SHA-256 of
    the data. param: the path of the request field."""

    data: bytes
    format: ImageFormat
    width: int
    height: int
    digest: bytes
    detail: ImageDetail = "auto"
    param: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteImage:
    """An image that a client sent as an address. param: the path of the request field."""

    url: str
    detail: ImageDetail = "auto"
    param: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image in a message. offset: the number of characters of `Message.content` before it.
    required: whether the request fails if the model cannot get the image. Otherwise, text replaces
    the image."""

    offset: int
    image: Image | RemoteImage
    required: bool = False


# The parts of a message: texts, and images whose offset is 0.
ContentPart = str | PlacedImage


def join_parts(
    parts: Iterable[ContentPart], separator: str = "\n"
) -> tuple[str, tuple[PlacedImage, ...]]:
    """Joins the parts of a message. Returns its text and its images. Texts are separated from each
    other, but not from an image."""
    texts: list[str] = []
    images: list[PlacedImage] = []
    length = 0
    after_text = False
    for part in parts:
        if isinstance(part, PlacedImage):
            images.append(replace(part, offset=length))
            after_text = False
            continue
        text = separator + part if after_text else part
        texts.append(text)
        length += len(text)
        after_text = True
    return "".join(texts), tuple(images)


def split_parts(content: str | None, images: Iterable[PlacedImage]) -> Iterator[ContentPart]:
    """Yields the parts of a message in order. No text is empty."""
    text, start = content or "", 0
    for placed in images:
        if placed.offset > start:
            yield text[start : placed.offset]
        start = placed.offset
        yield replace(placed, offset=0)
    if start < len(text):
        yield text[start:]


class ImageSpan(Struct, frozen=True, kw_only=True, array_like=True):
    """The positions [start, start + length) of a prompt, which belong to an image.

    key: 32 bytes that identify the rows: a digest of the encoded file, the geometry and the version
    of the preprocessing. grid: the rows and columns of image tokens. Within the span, the positions
    with a negative token ID are image rows, in row-major order of the grid; the others, such as
    line breaks between rows, are ordinary tokens. The span does not include the marks before and
    after the image.
    """

    key: bytes
    start: int
    length: int
    grid: tuple[int, int]

    @property
    def end(self) -> int:
        return self.start + self.length


class Pixels(Struct, frozen=True, kw_only=True, array_like=True):
    """Resized RGB pixels, one byte per channel, in the order [height, width, 3]."""

    height: int
    width: int
    data: bytes


class ImagePixels(Struct, frozen=True, kw_only=True, array_like=True):
    """The input of the vision tower for one image. key: see `ImageSpan`. tiles: one or more parts
    of the image, in the order that the model family defines."""

    key: bytes
    tiles: tuple[Pixels, ...]


def make_row_id(key: bytes, row: int) -> int:
    """Returns the token ID of an image row, which is negative and fits in 64 bits. It depends on
    the row, so that two images never share the beginning of their rows."""
    digest = hashlib.sha256(key + row.to_bytes(4, "little")).digest()
    return -1 - (int.from_bytes(digest[:8], "little") >> (64 - _KEY_BITS))


def is_row_id(token_id: int) -> bool:
    """Returns whether a token ID belongs to an image row."""
    return token_id < 0
