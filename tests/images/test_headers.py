"""The headers of image files: sizes, orientations, formats and limits."""

import contextlib
import struct
import time
import zlib

import pytest

from app.images.headers import HeaderError, read_header
from tests.images.samples import encode, make_exif, make_gradient

PNG = encode(make_gradient(40, 24))
JPEG = encode(make_gradient(40, 24), "JPEG")


def make_png(
    width: int, height: int, chunks: bytes = b"", data: bytes = zlib.compress(bytes(100))
) -> bytes:
    """Returns a PNG of one bit per pixel with the header of this size. data: compressed rows."""
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = make_chunk(b"IDAT", data)
    return PNG[:8] + make_chunk(b"IHDR", head) + chunks + rows + make_chunk(b"IEND", b"")


def make_chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def make_gif(
    width: int, height: int, frame: tuple[int, int, int, int], blocks: bytes = b""
) -> bytes:
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", width, height, 0, 0, 0)
        + blocks
        + b","
        + struct.pack("<4HB", *frame, 0)
    )


@pytest.mark.parametrize(
    ("image_format", "options"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": make_exif(1)}),
        ("GIF", {}),
    ],
)
def test_the_size_is_in_the_header(image_format: str, options: dict[str, object]):
    header = read_header(encode(make_gradient(41, 23), image_format, **options))
    assert (header.format, header.width, header.height) == (image_format.lower(), 41, 23)
    assert header.orientation == 1


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_is_that_after_the_rotation(image_format: str, orientation: int):
    data = encode(make_gradient(41, 23), image_format, exif=make_exif(orientation))
    header = read_header(data)
    assert header.orientation == orientation
    assert (header.width, header.height) == ((41, 23) if orientation < 5 else (23, 41))


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_invalid_orientation_has_no_effect(value: int):
    assert read_header(encode(make_gradient(9, 9), "JPEG", exif=make_exif(value))).orientation == 1


def test_damaged_exif_data_has_no_effect():
    data = encode(make_gradient(41, 23), "JPEG", exif=make_exif(6))
    header = read_header(data.replace(b"MM\0*", b"MM\0\0").replace(b"II*\0", b"II\0\0"))
    assert (header.width, header.height, header.orientation) == (41, 23, 1)


def test_the_scans_of_a_progressive_jpeg_are_counted():
    assert read_header(JPEG).scans == 1
    data = encode(make_gradient(64, 64), "JPEG", progressive=True)
    scans = read_header(data).scans
    assert scans > 5
    start = data.rfind(b"\xff\xda")
    assert read_header(data[:-2] + data[start:-2] * 20 + b"\xff\xd9").scans == scans + 20


def test_data_after_the_end_of_a_jpeg_does_not_count():
    assert read_header(JPEG + b"\xff\xda" * 1000).scans == 1


def test_a_hidden_end_of_the_image_does_not_hide_scans():
    comment = b"\xff\xfe" + struct.pack(">H", 4) + b"\xff\xd9"
    start = JPEG.rfind(b"\xff\xda")
    data = JPEG[:-2] + comment + JPEG[start:-2] + b"\xff\xd9"
    assert read_header(data).scans == 2


@pytest.mark.parametrize(
    ("frame", "size"),
    [((0, 0, 9, 8), (10, 8)), ((5, 5, 20, 20), (25, 25)), ((0, 0, 10, 8), (10, 8))],
)
def test_the_first_frame_of_a_gif_may_extend_the_screen(
    frame: tuple[int, int, int, int], size: tuple[int, int]
):
    header = read_header(make_gif(10, 8, frame, b"!\xfe\x03abc\x02de\x00"))
    assert (header.width, header.height) == size


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC images"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", "HEIF images"),
        (b"\0\0\0\x18ftypavif\0\0\0\0avifmif1", "AVIF images"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isomavc1", "MP4 video"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'>", "SVG images"),
        (b"\xef\xbb\xbf\n<?xml version='1.0'?>\n<svg >", "SVG images"),
        (b"<!DOCTYPE html><html>", "HTML images"),
        (b"<?xml version='1.0'?><a/>", "XML text"),
        (b"II*\0abcd", "TIFF images"),
        (b"MM\0*abcd", "TIFF images"),
        (b"BM\0\0\0\0", "BMP images"),
        (b"%PDF-1.7", "PDF images"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "PostScript images"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL images"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000 images"),
        (b"\0\0\1\0\1\0", "ICO images"),
        (b"RIFF\0\0\0\0AVI LIST", "AVI video"),
    ],
)
def test_another_format_is_named_with_what_to_send_instead(data: bytes, kind: str):
    with pytest.raises(HeaderError, match=f"^{kind} .* not supported: send PNG, JPEG, WebP or GIF"):
        read_header(data)


@pytest.mark.parametrize("data", [b"", b"\0", b"hello", b"RIFF\0\0\0\0WAVE", b"\x89PNG\n"])
def test_unknown_data_is_rejected(data: bytes):
    with pytest.raises(HeaderError, match="send PNG, JPEG, WebP or GIF"):
        read_header(data)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_header_that_is_cut_off_at_any_byte_is_an_error(image_format: str):
    data = encode(make_gradient(40, 24), image_format)
    short = {"PNG": 20, "JPEG": 160, "WEBP": 20, "GIF": 9}[image_format]
    for end in range(short):
        with pytest.raises(HeaderError):
            read_header(data[:end])


def test_a_truncated_file_is_called_truncated():
    with pytest.raises(HeaderError, match="the PNG image is truncated: send the complete file"):
        read_header(PNG[:20])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make_png(20000, 10), "20000 × 10 pixels, but the maximum is 16384 per side"),
        (make_png(13000, 13000), "the maximum is 64 million"),
        (make_png(0, 10), "has no pixels"),
        (make_png(10, 2**31), "16384 per side"),
        (bytes(20_000_001), "20,000,001 bytes, but the maximum is 20,000,000"),
        (make_png(8, 8, make_chunk(b"tEXt", b"") * 10_001), "too many chunks"),
        (JPEG[:2] + b"\xff\xfe\0\2" * 10_001 + JPEG[2:], "too many segments"),
        (make_gif(10, 8, (0, 0, 9, 9), b"!\xfe" + b"\1a" * 10_001), "too many blocks"),
        (JPEG.replace(b"\xff\xc0", b"\xff\xc3"), "lossless and arithmetic-coded JPEG"),
        (JPEG[:2] + JPEG[JPEG.rfind(b"\xff\xda") :], "invalid header"),
    ],
)
def test_a_file_that_exceeds_a_limit_is_rejected(data: bytes, message: str):
    with pytest.raises(HeaderError, match=message):
        read_header(data)


def test_many_scans_of_many_pixels_are_rejected():
    data = encode(make_gradient(2000, 2000), "JPEG", progressive=True)
    start = data.rfind(b"\xff\xda")
    hostile = data[:-2] + data[start:-2] * 300 + b"\xff\xd9"
    assert len(hostile) < 3_000_000
    with pytest.raises(HeaderError, match="scans, which would take too long"):
        read_header(hostile)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8\xff" + b"\xff" * 10_000_000,
        b"\xff\xd8\xff\xc0\0\x11\x08\0\x10\0\x10" + bytes(10_000_000),
        PNG[:33] + bytes(10_000_000),
        make_gif(10, 8, (0, 0, 9, 9))[:13] + bytes(10_000_000),
        b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\x08\0\0\0\x09\0\0\x09\0\0" + bytes(10_000_000),
    ],
)
def test_hostile_data_takes_little_time(data: bytes):
    start = time.process_time()
    with contextlib.suppress(HeaderError):
        read_header(data)
    assert time.process_time() - start < 1
