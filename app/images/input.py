"""Turns the image of a request into an `Image`: base64, data URLs and the header of the file.

Knows: base64, data URLs (RFC 2397), the errors of images.
Must not know: dialects, models, pixels.

Every dialect reads its images here, so that no route has different limits.
"""

import base64
import binascii
import hashlib

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.images import Image, ImageDetail
from app.images.headers import MAX_BYTES, SUPPORTED, HeaderError, read_header

# base64 takes four characters for three bytes; white space is not counted
_MAX_BASE64_CHARS = (MAX_BYTES + 2) // 3 * 4
_WHITE_SPACE = str.maketrans("", "", " \t\r\n\f")

# the number of characters of a URL in a message
_SHOWN_CHARS = 40

_EXPECTED_URL = "send a data URL, such as data:image/png;base64,…"


def read_image(data: bytes, *, param: str, detail: ImageDetail = "auto") -> Image:
    """Reads the header of an encoded image. Raises AppError(INVALID) for an image that cannot be
    used: the message has the path, the reason and a remedy. param: the path of the request field.
    """
    try:
        header = read_header(data)
    except HeaderError as error:
        raise invalid_image(param, str(error)) from error
    return Image(
        data=data,
        format=header.format,
        width=header.width,
        height=header.height,
        digest=hashlib.sha256(data).digest(),
        detail=detail,
        param=param,
    )


def decode_data_url(url: str, param: str) -> bytes:
    """Returns the bytes of a data URL. Its media type must be an image type, but the bytes
    determine the format. Raises AppError(INVALID)."""
    if url[:5].lower() != "data:":
        raise _not_a_data_url(url, param)
    head, comma, payload = url[5:].partition(",")
    if not comma:
        raise invalid_image(param, f"the data URL has no comma: {_EXPECTED_URL}")
    media_type, *parameters = (one.strip().lower() for one in head.split(";"))
    if media_type not in ("", "application/octet-stream") and not media_type.startswith("image/"):
        shown = mark_client_text(repr(media_type[:_SHOWN_CHARS]))
        raise invalid_image(param, f"the media type {shown} is not an image type: send {SUPPORTED}")
    if "base64" not in parameters:
        raise invalid_image(param, f"the data URL is not in base64: {_EXPECTED_URL}")
    return decode_base64(payload, param)


def decode_base64(text: str, param: str) -> bytes:
    """Returns the bytes of an image in base64, with or without a data URL's prefix. White space is
    ignored, and padding may be missing. Raises AppError(INVALID)."""
    if text[:5].lower() == "data:":
        return decode_data_url(text, param)
    if len(text) > _MAX_BASE64_CHARS:
        text = text.translate(_WHITE_SPACE)
        if len(text) > _MAX_BASE64_CHARS:
            raise invalid_image(
                param,
                f"the image has about {len(text) * 3 // 4:,} bytes, but the maximum is "
                f"{MAX_BYTES:,}: scale it down or compress it more",
            )
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # white space or missing padding; non-ASCII characters
        stripped = text.translate(_WHITE_SPACE).rstrip("=")
    try:
        return base64.b64decode(stripped + "=" * (-len(stripped) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        reason = (
            "the base64 uses the URL-safe alphabet (- and _): use the standard alphabet"
            if "-" in stripped or "_" in stripped
            else "the image is not valid base64: encode the bytes of the file"
        )
        raise invalid_image(param, reason) from error


def invalid_image(param: str, reason: str) -> AppError:
    """Returns the error for an image that cannot be used. reason: see `HeaderError`."""
    return AppError(ErrorKind.INVALID, f"{param}: {reason}", param=param)


def _not_a_data_url(url: str, param: str) -> AppError:
    if url[:8].lower() == "https://" or url[:7].lower() == "http://":
        return invalid_image(param, f"this server does not fetch images: {_EXPECTED_URL}")
    if url[:5].lower() == "file:":
        return invalid_image(param, f"this server does not read local files: {_EXPECTED_URL}")
    shown = mark_client_text(repr(url[:_SHOWN_CHARS]))
    return invalid_image(param, f"{shown} is not a data URL: {_EXPECTED_URL}")
