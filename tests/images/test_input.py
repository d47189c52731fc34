"""Base64, data URLs and the checks of the images of a request."""

import base64
import hashlib

import pytest

from app.core.errors import AppError, ErrorKind
from app.images.headers import MAX_BYTES
from app.images.input import decode_base64, decode_data_url, read_image
from tests.images.samples import encode, make_exif, make_gradient

PNG = encode(make_gradient(40, 24))
TEXT = base64.b64encode(PNG).decode()
PARAM = "messages.2.content.1"


def test_an_image_has_its_size_format_digest_and_path():
    image = read_image(
        encode(make_gradient(40, 24), "JPEG", exif=make_exif(6)), param=PARAM, detail="low"
    )
    assert (image.width, image.height, image.format) == (24, 40, "jpeg")
    assert image.digest == hashlib.sha256(image.data).digest()
    assert (image.param, image.detail) == (PARAM, "low")


def test_an_image_that_cannot_be_used_is_an_error_with_path_reason_and_remedy():
    with pytest.raises(AppError) as caught:
        read_image(b"%PDF-1.7", param=PARAM)
    assert caught.value.kind is ErrorKind.INVALID
    assert caught.value.param == PARAM
    assert caught.value.message == (
        f"{PARAM}: PDF images are not supported: send PNG, JPEG, WebP or GIF"
    )


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:IMAGE/PNG;BASE64,{TEXT}",
        f"data:image/jpeg;charset=utf-8;base64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"data:application/octet-stream;base64,{TEXT}",
        f"data:image/png; base64,{TEXT}",
        f"data:image/png;base64,{TEXT.rstrip('=')}",
        f"data:image/png;base64,{TEXT[:40]}\r\n {TEXT[40:]}\n",
    ],
)
def test_a_data_url_has_the_bytes(url: str):
    assert decode_data_url(url, PARAM) == PNG


def test_base64_may_have_the_prefix_of_a_data_url():
    assert decode_base64(TEXT, PARAM) == PNG
    assert decode_base64(f"data:image/png;base64,{TEXT}", PARAM) == PNG


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/a.png", "this server does not fetch images: send a data URL"),
        ("HTTP://example.com/a.png", "this server does not fetch images"),
        ("file:///etc/passwd", "does not read local files"),
        ("/etc/passwd", "'/etc/passwd' is not a data URL"),
        ("C:\\a.png", "is not a data URL"),
        ("", "'' is not a data URL"),
        ("ftp://example.com/a.png", "is not a data URL"),
        ("data:image/png;base64", "has no comma"),
        ("data:image/png,%89PNG", "is not in base64"),
        (f"data:text/html;base64,{TEXT}", "the media type 'text/html' is not an image type"),
        (f"data:application/pdf;base64,{TEXT}", "send PNG, JPEG, WebP or GIF"),
        ("data:image/png;base64,a", "not valid base64"),
        ("data:image/png;base64,!!!!", "not valid base64"),
        ("data:image/png;base64,äöü=", "not valid base64"),
        ("data:image/png;base64,ab=c", "not valid base64"),
        ("data:image/png;base64,ab-_", "use the standard alphabet"),
    ],
)
def test_an_invalid_url_is_an_error_with_the_path(url: str, message: str):
    with pytest.raises(AppError) as caught:
        decode_data_url(url, PARAM)
    assert message in caught.value.message
    assert caught.value.message.startswith(f"{PARAM}: ")
    assert (caught.value.param, caught.value.kind) == (PARAM, ErrorKind.INVALID)


def test_the_url_of_a_client_is_not_in_logs():
    with pytest.raises(AppError) as caught:
        decode_data_url("pictures/secret.png", PARAM)
    assert "secret" in caught.value.message
    assert "secret" not in caught.value.redact()


def test_too_long_base64_is_not_decoded():
    with pytest.raises(AppError, match="but the maximum is 20,000,000: scale it down"):
        decode_base64("A" * (MAX_BYTES // 3 * 4 + 8), PARAM)
    spaced = " " * (MAX_BYTES * 2) + TEXT
    assert decode_base64(spaced, PARAM) == PNG
