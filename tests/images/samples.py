"""Images for the tests: small files in all formats, and their encodings."""

import io
from typing import Any

from PIL import Image as PillowImage

from app.core.images import Image, ImageDetail
from app.images.input import read_image

Pixels = PillowImage.Image


def make_gradient(width: int, height: int) -> Pixels:
    """Returns an RGB image whose three channels differ, so that a mistake in an axis or a channel
    is detected."""
    across = PillowImage.linear_gradient("L").rotate(90).resize((width, height))
    down = PillowImage.linear_gradient("L").resize((width, height))
    circles = PillowImage.radial_gradient("L").resize((width, height))
    return PillowImage.merge("RGB", (across, down, circles))


def encode(image: Pixels, image_format: str = "PNG", **options: Any) -> bytes:
    """Returns the encoded image. options: those of Pillow's encoder."""
    out = io.BytesIO()
    image.save(out, image_format, **options)
    return out.getvalue()


def make_exif(orientation: int) -> PillowImage.Exif:
    exif = PillowImage.Exif()
    exif[274] = orientation
    return exif


def make_image(width: int, height: int, detail: ImageDetail = "auto") -> Image:
    """Returns an image with a header but no pixels, for tests that decode nothing."""
    return Image(
        data=b"", format="png", width=width, height=height, digest=bytes(32), detail=detail
    )


def read(data: bytes, param: str = "messages.0.content.0") -> Image:
    return read_image(data, param=param)
