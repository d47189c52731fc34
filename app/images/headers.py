"""Reads the header of an image file: its format, its size as displayed, and the cost of decoding
it.

Knows: the headers of PNG (W3C PNG, 3rd edition), JPEG (ITU-T T.81), WebP (RFC 9649) and GIF
(GIF89a), the orientation tag of EXIF, the first bytes of other formats, the limits of images.
Must not know: pixels, requests.

The bytes come from clients. Nothing is decompressed, each marker is read once, and all reads are
bounds-checked, so the time is linear in the size of the file.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from app.core.images import ImageFormat

MAX_BYTES = 20_000_000
MAX_SIDE = 16384
MAX_PIXELS = 64_000_000

# Each scan of a progressive JPEG visits all pixels, in about 5 ns each. Typical files have 10
# scans.
MAX_SCANNED_PIXELS = 1_000_000_000

# The largest number of segments, chunks or tags of one file. Typical files have fewer than 100.
# Each IDAT of a PNG has at least 8 KiB.
_MAX_PARTS = 10_000

SUPPORTED = "PNG, JPEG, WebP or GIF"

_FORMAT_NAMES: dict[ImageFormat, str] = {"png": "PNG", "jpeg": "JPEG", "webp": "WebP", "gif": "GIF"}

# The EXIF orientations that swap the width and the height (TIFF tag 274, values 5 to 8).
_ORIENTATION_TAG, _ROTATED = 0x0112, range(5, 9)

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

# the brands of ISO media files (ISO/IEC 23008-12, AV1 Image File Format)
_ISO_BRANDS = {
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"hevc": "HEIC",
    b"heim": "HEIC",
    b"heis": "HEIC",
    b"mif1": "HEIF",
    b"msf1": "HEIF",
    b"avif": "AVIF",
    b"avis": "AVIF",
}

# the first bytes of other formats
_OTHER_FORMATS = (
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"%PDF-", "PDF"),
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"\0\0\1\0", "ICO"),
    (b"8BPS", "Photoshop"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\x8aMNG", "MNG"),
    (b"\x1aE\xdf\xa3", "WebM video"),
    (b"PK\3\4", "ZIP"),
    (b"\x1f\x8b", "gzip"),
    (b"gimp xcf", "XCF"),
    (b"\x76\x2f\x31\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"qoif", "QOI"),
)
# text formats, which may begin with white space and a byte order mark
_SVG = re.compile(rb"<svg[\s>]|<!DOCTYPE\s+svg", re.IGNORECASE)
_HTML = re.compile(rb"<(!DOCTYPE\s+html|html|head|body)[\s>]", re.IGNORECASE)
_TEXT_START = b"\xef\xbb\xbf \t\r\n"
_SNIFFED_BYTES = 1024

# JPEG markers: start of frame (baseline, extended and progressive Huffman), other frames, scans
_SUPPORTED_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_OTHER_FRAMES = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_START_OF_SCAN, _END_OF_IMAGE, _APP1 = 0xDA, 0xD9, 0xE1
# markers without a length: TEM and start of image; the restart markers are not even searched for
_STANDALONE_MARKERS = frozenset({0x01, 0xD8})
# In coded data, 0xFF is followed by 0. A marker may be preceded by any number of 0xFF.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


# GIF blocks
_GIF_FRAME, _GIF_EXTENSION, _GIF_TRAILER = 0x2C, 0x21, 0x3B


class HeaderError(Exception):
    """An image that cannot be used. The message is a clause about the image, with a remedy:
    "HEIC images are not supported: send PNG, JPEG, WebP or GIF"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """width, height: in pixels, after the rotation that the EXIF orientation requests.
    orientation: the value of the EXIF tag, from 1 to 8. scans: an upper bound of the number of
    passes over all pixels while decoding; 1 for all formats but JPEG."""

    format: ImageFormat
    width: int
    height: int
    orientation: int = 1
    scans: int = 1


def read_header(data: bytes) -> Header:
    """Reads the header of an encoded image and checks the limits. Raises HeaderError for a format
    that is not supported, for an invalid header, and for an image that exceeds a limit."""
    if len(data) > MAX_BYTES:
        raise HeaderError(
            f"the image has {len(data):,} bytes, but the maximum is {MAX_BYTES:,}: "
            "scale it down or compress it more"
        )
    found = _detect_format(data)
    try:
        header = _READERS[found](data)
    except (struct.error, IndexError) as error:
        raise _truncated(found) from error
    _check_limits(header)
    return header


def describe_format(image_format: ImageFormat) -> str:
    """Returns the usual spelling of a format: "WebP"."""
    return _FORMAT_NAMES[image_format]


def _detect_format(data: bytes) -> ImageFormat:
    if data.startswith(_PNG_SIGNATURE):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if not data:
        raise HeaderError(f"the image is empty: send {SUPPORTED}")
    kind = _name_other_format(data)
    if kind is None:
        raise HeaderError(f"the data is not an image in a known format: send {SUPPORTED}")
    what = "is" if kind.endswith(("text", "video")) else "images are"
    raise HeaderError(f"{kind} {what} not supported: send {SUPPORTED}")


def _name_other_format(data: bytes) -> str | None:
    """Returns the name of a format that is not supported, or None."""
    if data[4:8] == b"ftyp":
        brands = [data[8:12], *(data[at : at + 4] for at in range(16, 64, 4))]
        return next((_ISO_BRANDS[brand] for brand in brands if brand in _ISO_BRANDS), "MP4 video")
    if data[:4] == b"RIFF":
        return "AVI video" if data[8:12] == b"AVI " else None
    for start, name in _OTHER_FORMATS:
        if data.startswith(start):
            return name
    start = data[:_SNIFFED_BYTES].lstrip(_TEXT_START)
    if start.startswith(b"<"):
        return "SVG" if _SVG.search(start) else "HTML" if _HTML.search(start) else "XML text"
    return None


def _check_limits(header: Header) -> None:
    size = f"{header.width} × {header.height} pixels"
    if header.width == 0 or header.height == 0:
        raise HeaderError(f"the image has no pixels ({size}): send another image")
    if max(header.width, header.height) > MAX_SIDE:
        raise HeaderError(
            f"the image is {size}, but the maximum is {MAX_SIDE} per side: scale it down"
        )
    if header.width * header.height > MAX_PIXELS:
        raise HeaderError(
            f"the image is {size}, but the maximum is {MAX_PIXELS // 10**6} million: scale it down"
        )
    if header.width * header.height * header.scans > MAX_SCANNED_PIXELS:
        raise HeaderError(
            f"the image is {size} in {header.scans} scans, which would take too long to decode: "
            "save it as a non-progressive JPEG"
        )


def _truncated(image_format: ImageFormat) -> HeaderError:
    return HeaderError(
        f"the {describe_format(image_format)} image is truncated: send the complete file"
    )


def _invalid(image_format: ImageFormat) -> HeaderError:
    name = describe_format(image_format)
    return HeaderError(f"the {name} image has an invalid header: send {SUPPORTED}")


def _orient(
    image_format: ImageFormat, width: int, height: int, orientation: int, scans: int = 1
) -> Header:
    if orientation in _ROTATED:
        width, height = height, width
    return Header(
        format=image_format, width=width, height=height, orientation=orientation, scans=scans
    )


def _read_png(data: bytes) -> Header:
    length, kind, width, height = struct.unpack_from(">I4sII", data, len(_PNG_SIGNATURE))
    if kind != b"IHDR" or length != 13:
        raise _invalid("png")
    orientation = 1
    for kind, start, end in _iter_png_chunks(data):
        if kind == b"eXIf":
            orientation = _read_orientation(data[start:end])
    return _orient("png", width, height, orientation)


def _iter_png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields the type and the range of the data of each chunk, up to the last one in the file."""
    at = len(_PNG_SIGNATURE)
    for _ in range(_MAX_PARTS):
        if at + 8 > len(data):
            return
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, at + 8, min(at + 8 + length, len(data))
        if kind == b"IEND":
            return
        at += 12 + length
    raise HeaderError("the PNG image has too many chunks: save it again with a different program")


def _read_jpeg(data: bytes) -> Header:
    """Walks the segments, as decoders do, to the end of the image. A file may continue after it,
    for example with a preview or a video."""
    size: tuple[int, int] | None = None
    orientation: int | None = None
    scans, at = 0, 2
    for _ in range(_MAX_PARTS):
        found = _JPEG_MARKER.search(data, at)
        if found is None:
            break
        marker, at = data[found.end() - 1], found.end()
        if marker == _END_OF_IMAGE:
            break
        if marker in _STANDALONE_MARKERS:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        if marker in _OTHER_FRAMES:
            raise HeaderError(
                "lossless and arithmetic-coded JPEG images are not supported: "
                "save it as a baseline JPEG"
            )
        if marker in _SUPPORTED_FRAMES and size is None:
            height, width = struct.unpack_from(">HH", data, at + 3)
            size = width, height
        elif marker == _APP1 and orientation is None and data[at + 2 : at + 8] == b"Exif\0\0":
            orientation = _read_orientation(data[at + 8 : at + length])
        elif marker == _START_OF_SCAN:
            if size is None:
                raise _invalid("jpeg")
            scans += 1
        at += length
    else:
        raise HeaderError("the JPEG image has too many segments: save it with a different program")
    if size is None or scans == 0:
        raise _truncated("jpeg")
    return _orient("jpeg", *size, orientation or 1, scans)


def _read_webp(data: bytes) -> Header:
    kind = data[12:16]
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise _truncated("webp") if len(data) < 30 else _invalid("webp")
        width, height = struct.unpack_from("<HH", data, 26)
        return _orient("webp", width & 0x3FFF, height & 0x3FFF, 1)
    if kind == b"VP8L":
        if data[20] != 0x2F:
            raise _invalid("webp")
        (bits,) = struct.unpack_from("<I", data, 21)
        return _orient("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 1)
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        if len(data) < 30:
            raise _truncated("webp")
        return _orient("webp", width, height, _find_webp_orientation(data))
    raise _truncated("webp") if len(data) < 30 else _invalid("webp")


def _find_webp_orientation(data: bytes) -> int:
    at = 12
    for _ in range(_MAX_PARTS):
        if at + 8 > len(data):
            return 1
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"EXIF":
            exif = data[at + 8 : at + 8 + length]
            return _read_orientation(exif.removeprefix(b"Exif\0\0"))
        at += 8 + length + length % 2
    raise HeaderError("the WebP image has too many chunks: save it again with a different program")


def _read_gif(data: bytes) -> Header:
    """Reads the size of the screen, which the first frame extends if it is larger, as in Pillow."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at, in_extension = 13 + _count_gif_colors(flags), False
    for _ in range(_MAX_PARTS):
        block = data[at]
        if in_extension:  # a part of an extension, preceded by its length; 0 ends the extension
            in_extension, at = block != 0, at + 1 + block
        elif block == _GIF_EXTENSION:
            in_extension, at = True, at + 2
        elif block == _GIF_FRAME:
            left, top, columns, rows = struct.unpack_from("<4H", data, at + 1)
            return _orient("gif", max(width, left + columns), max(height, top + rows), 1)
        elif block == _GIF_TRAILER:
            raise _invalid("gif")
        else:
            at += 1
    raise HeaderError("the GIF image has too many blocks: save it again with a different program")


def _count_gif_colors(flags: int) -> int:
    """Returns the number of bytes of a color table."""
    return 3 * (2 << (flags & 7)) if flags & 0x80 else 0


def _read_orientation(exif: bytes) -> int:
    """Returns the orientation in the first directory of a TIFF structure; 1 if there is none or the
    structure is invalid."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * min(count, _MAX_PARTS), 12):
            tag, kind = struct.unpack_from(f"{order}HH", exif, entry)
            if tag == _ORIENTATION_TAG:
                value = struct.unpack_from(
                    f"{order}I" if kind == 4 else f"{order}H", exif, entry + 8
                )[0]
                return value if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1


_READERS = {"png": _read_png, "jpeg": _read_jpeg, "webp": _read_webp, "gif": _read_gif}
