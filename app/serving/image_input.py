"""Which images of a request the model gets: the rule for images that it cannot process.

Knows: the messages of a request. Must not know: dialects, model families, pixels.

An image of the user's new question that the model cannot process is an error. Any other image is
replaced with text, and the response has a notice: an error would end the conversation, because the
client sends the same turns with every later request.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from app.core.errors import AppError, ErrorKind
from app.core.images import (
    ContentPart,
    Image,
    PlacedImage,
    RemoteImage,
    join_parts,
    split_parts,
)
from app.core.request_context import omit_image
from app.core.requests import Conversation, GenerateRequest, Message
from app.images.decoder import ImageDecoder
from app.images.plan import ImageProcessor

# the maximum number of images in a request
MAX_IMAGES = 100

# the maximum number of names in an error message
_MAX_NAMES = 5

Reject = Callable[[PlacedImage], AppError | None]
Fetch = Callable[[RemoteImage], Awaitable[Image]]

# returns the image that the model gets, or the reason why it gets none
_Decide = Callable[[PlacedImage], Image | RemoteImage | AppError]


def get_image(placed: PlacedImage) -> Image:
    """Returns an image that was sent, or fetched before."""
    assert isinstance(placed.image, Image), "addresses are fetched before"
    return placed.image


async def verify_images(
    request: GenerateRequest, processor: ImageProcessor, decoder: ImageDecoder
) -> GenerateRequest:
    """Decodes the images that this server has never decoded. Omits those that are broken. Raises
    AppError(INVALID) if one belongs to the user's new question, and other errors of the decoder."""
    broken: dict[bytes, AppError] = {}
    for placed in request.images:
        image = get_image(placed)
        try:
            await decoder.verify(image, processor.plan(image), caller=request.caller)
        except AppError as error:
            if error.kind is not ErrorKind.INVALID:
                raise
            broken[image.digest] = error
    if not broken:
        return request
    return omit_images(request, lambda placed: _find_error(placed, broken))


def _find_error(placed: PlacedImage, broken: Mapping[bytes, AppError]) -> AppError | None:
    image = get_image(placed)
    error = broken.get(image.digest)
    if error is None or error.param == image.param:
        return error
    message = error.marked_message.removeprefix(f"{error.param}: ")
    return AppError(error.kind, f"{image.param}: {message}", param=image.param)


def omit_images(request: GenerateRequest, reject: Reject) -> GenerateRequest:
    """Replaces images with text. reject: returns the reason why the model cannot get an image, or
    None. Raises the reason for an image that is required."""
    return _replace_images(request, lambda placed: reject(placed) or placed.image)


async def fetch_images(request: GenerateRequest, fetch: Fetch) -> GenerateRequest:
    """Fetches the images that were sent as addresses. Omits those that cannot be fetched. Raises
    AppError(INVALID) if one belongs to the user's new question."""
    remote = [one.image for one in request.images if isinstance(one.image, RemoteImage)]
    if not remote:
        return request

    async def try_fetch(image: RemoteImage) -> Image | AppError:
        try:
            return await fetch(image)
        except AppError as error:
            return error

    fetched = dict(zip(remote, await asyncio.gather(*map(try_fetch, remote)), strict=True))
    return _replace_images(
        request,
        lambda placed: placed.image if isinstance(placed.image, Image) else fetched[placed.image],
    )


def _replace_images(request: GenerateRequest, decide: _Decide) -> GenerateRequest:
    conversation = request.prompt
    if not isinstance(conversation, Conversation):
        return request
    messages = tuple(_replace_in_message(message, decide) for message in conversation.messages)
    return replace(request, prompt=replace(conversation, messages=messages))


def _replace_in_message(message: Message, decide: _Decide) -> Message:
    if not message.images:
        return message
    parts: list[ContentPart] = []
    for part in split_parts(message.content, message.images):
        found = decide(part) if isinstance(part, PlacedImage) else part
        if isinstance(part, str) or isinstance(found, str):
            parts.append(part)
        elif not isinstance(found, AppError):
            parts.append(replace(part, image=found))
        elif part.required:
            raise found
        else:
            parts.append(omit_image(found))
    content, images = join_parts(parts)
    return replace(message, content=content, images=images)


def limit_images(request: GenerateRequest) -> GenerateRequest:
    """Omits the oldest images if the request has too many. Raises AppError(INVALID) if the new
    question alone has too many."""
    excess = len(request.images) - MAX_IMAGES
    if excess <= 0:
        return request
    position = iter(range(excess))

    def reject(placed: PlacedImage) -> AppError | None:
        if next(position, None) is None:
            return None
        return _make_error(placed, f"a request may have at most {MAX_IMAGES} images: send fewer")

    return omit_images(request, reject)


def reject_all_images(
    request: GenerateRequest, model: str, models_with_vision: Sequence[str]
) -> GenerateRequest:
    """Omits all images, for a model that reads text only. models_with_vision: the names of the
    installed models that process images."""
    instead = _name_models(models_with_vision)

    def reject(placed: PlacedImage) -> AppError:
        remedy = f" ({model}): remove the image, or use {instead}" if placed.required else ""
        return _make_error(placed, f"this model reads text only{remedy}")

    return omit_images(request, reject)


def _make_error(placed: PlacedImage, message: str) -> AppError:
    param = placed.image.param
    return AppError(ErrorKind.INVALID, f"{param}: {message}", param=param)


def _name_models(names: Sequence[str]) -> str:
    if not names:
        return "a model with vision"
    more = ", …" if len(names) > _MAX_NAMES else ""
    return f"one of these models: {', '.join(names[:_MAX_NAMES])}{more}"
