"""Images, audio and files in a conversation.

Knows: how they are sent, the text that replaces one. Must not know: dialects, which models process
images.

A new question with an attachment that the server cannot read is rejected, because the model could
not answer it. In tool results and in earlier turns, text replaces the attachment, and the response
has a notice: an error would end the conversation, because the client sends the same turns with
every later request. The serving layer applies the same rule to images that the model cannot
process.
"""

from typing import Literal

from app.api.fields import invalid_request
from app.core.errors import AppError
from app.core.images import ContentPart, Image, ImageDetail, PlacedImage, RemoteImage
from app.core.request_context import add_notice, omit_image
from app.images.input import decode_base64, decode_data_url, read_image

AttachmentKind = Literal["audio", "file"]

_KINDS = {"audio": "audio is", "file": "files are"}

# `original` is the name of the Responses API for images that are not scaled
_DETAILS: dict[str, ImageDetail] = {"low": "low", "high": "high", "original": "high"}

_REMOTE_SCHEMES = ("https:", "http:")


def read_attachment(kind: AttachmentKind, path: str, *, omit: bool) -> str:
    """Reports an attachment as omitted and returns the text that replaces it. Without `omit`,
    raises AppError(INVALID)."""
    if not omit:
        raise invalid_request(
            path, f"{path}: {_KINDS[kind]} not supported: this model reads text only"
        )
    add_notice(f"{_KINDS[kind]} omitted: this model reads text only")
    return f"[{kind} omitted: this model reads text only]"


def read_image_url(
    url: str | None, path: str, *, detail: str | None = None, omit: bool
) -> ContentPart:
    """Reads an image from a data URL. The serving layer fetches other addresses. omit: whether an
    image that cannot be read is replaced with text, which is returned, rather than rejected."""
    level = _DETAILS.get(detail or "", "auto")
    if url is not None and url[: len("https:")].lower().startswith(_REMOTE_SCHEMES):
        return _place(RemoteImage(url=url, detail=level, param=path), omit=omit)
    try:
        if url is None:
            raise invalid_request(path, f"{path}: the image is missing: send a data URL")
        return _place(read_image(decode_data_url(url, path), param=path, detail=level), omit=omit)
    except AppError as error:
        return _omit_image(error, omit=omit)


def read_image_data(data: str | None, path: str, *, omit: bool) -> ContentPart:
    """Reads an image from base64. omit: as in `read_image_url`."""
    try:
        if data is None:
            raise invalid_request(path, f"{path}: the image is missing: send its data as base64")
        image = read_image(decode_base64(data, path), param=path, detail="auto")
        return _place(image, omit=omit)
    except AppError as error:
        return _omit_image(error, omit=omit)


def refuse_image_file(path: str, field: str, *, omit: bool) -> str:
    """Handles an image that the client identifies by the ID of an uploaded file. omit: as in
    `read_image_url`."""
    message = f"{path}: {field} is not supported: send the image itself, as base64"
    return _omit_image(invalid_request(path, message), omit=omit)


def _place(image: Image | RemoteImage, *, omit: bool) -> PlacedImage:
    return PlacedImage(offset=0, image=image, required=not omit)


def _omit_image(error: AppError, *, omit: bool) -> str:
    if not omit:
        raise error
    return omit_image(error)
