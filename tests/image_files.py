"""Small image files for tests, without an image library."""

import base64
import struct
import zlib

from app.core.images import Image
from app.images.input import read_image


def make_png(width: int = 3, height: int = 2, color: int = 0) -> bytes:
    """Returns a PNG of one color, in grey levels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = (b"\0" + bytes([color]) * width) * height
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            chunk(b"IDAT", zlib.compress(rows)),
            chunk(b"IEND", b""),
        )
    )


def make_image(width: int = 3, height: int = 2, color: int = 0, param: str = "image") -> Image:
    return read_image(make_png(width, height, color), param=param)


def encode_png(width: int = 3, height: int = 2, color: int = 0) -> str:
    """Returns a PNG as base64."""
    return base64.b64encode(make_png(width, height, color)).decode()


def make_data_url(width: int = 3, height: int = 2, color: int = 0) -> str:
    return f"data:image/png;base64,{encode_png(width, height, color)}"
