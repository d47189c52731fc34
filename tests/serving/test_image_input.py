"""The rule for images that a model cannot process: an error in the new question, and elsewhere text
with a notice."""

import asyncio

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.images import Image, PlacedImage, RemoteImage
from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.requests import Conversation, GenerateRequest, Message
from app.serving.image_input import (
    MAX_IMAGES,
    fetch_images,
    get_image,
    limit_images,
    reject_all_images,
)
from tests.image_files import make_image


def place(offset: int = 0, *, required: bool = False) -> PlacedImage:
    return PlacedImage(
        offset=offset, image=make_image(param="messages.0.content.0"), required=required
    )


def request_with(*messages: Message) -> GenerateRequest:
    return GenerateRequest(model="m", prompt=Conversation(messages=messages))


def get_messages(request: GenerateRequest) -> tuple[Message, ...]:
    assert isinstance(request.prompt, Conversation)
    return request.prompt.messages


def test_a_text_replaces_an_image_for_a_model_that_reads_text_only():
    context = RequestContext(id="1")
    token = REQUEST_CONTEXT.set(context)
    try:
        request = request_with(
            Message(role="user", content="ab", images=(place(1), place(2))),
            Message(role="tool", content="", images=(place(),)),
            Message(role="assistant", content=None),
        )
        messages = get_messages(reject_all_images(request, "text/model", ["vision/model"]))
    finally:
        REQUEST_CONTEXT.reset(token)
    omitted = "[image omitted: this model reads text only]"
    assert [message.content for message in messages] == [
        f"a\n{omitted}\nb\n{omitted}",
        omitted,
        None,
    ]
    assert [message.images for message in messages] == [()] * 3
    assert context.notices == ["images are omitted: this model reads text only"]


@pytest.mark.parametrize(
    ("models", "instead"),
    [
        ([], "a model with vision"),
        (["a/b", "c"], "one of these models: a/b, c"),
        (list("abcdefg"), "one of these models: a, b, c, d, e, …"),
    ],
)
def test_an_image_of_the_question_is_refused_with_the_models_that_see(
    models: list[str], instead: str
):
    request = request_with(Message(role="user", content="", images=(place(required=True),)))
    with pytest.raises(AppError) as caught:
        reject_all_images(request, "text/model", models)
    assert caught.value.param == "messages.0.content.0"
    assert caught.value.message == (
        "messages.0.content.0: this model reads text only (text/model): remove the image, or use "
        + instead
    )


def test_the_oldest_images_are_omitted_from_a_request_with_too_many():
    turns = [Message(role="user", content="", images=(place(),)) for _ in range(MAX_IMAGES + 2)]
    messages = get_messages(limit_images(request_with(*turns)))
    assert [len(message.images) for message in messages] == [0, 0] + [1] * MAX_IMAGES
    assert f"at most {MAX_IMAGES} images" in (messages[0].content or "")
    request = request_with(*turns[2:])
    assert limit_images(request) is request


def test_a_question_with_too_many_images_is_refused():
    images = tuple(place(required=True) for _ in range(MAX_IMAGES + 1))
    with pytest.raises(AppError, match="at most 100 images: send fewer"):
        limit_images(request_with(Message(role="user", content="", images=images)))


def test_addresses_are_fetched_or_omitted():
    url = "https://images.example.org/a.png"

    async def fetch(image: RemoteImage) -> Image:
        if image.url != url:
            raise AppError(ErrorKind.INVALID, f"{image.param}: not allowed", param=image.param)
        return make_image(7, param=image.param)

    def turn(address: str, *, required: bool = False) -> Message:
        image = RemoteImage(url=address, param="messages.0.content.0")
        return Message(
            role="user",
            content="x",
            images=(PlacedImage(offset=0, image=image, required=required),),
        )

    request = request_with(turn(url), turn("http://other"), turn(url))
    first, second, third = get_messages(asyncio.run(fetch_images(request, fetch)))
    assert first.images == third.images
    assert get_image(first.images[0]).width == 7
    assert (second.content, second.images) == ("[image omitted: not allowed]\nx", ())
    with pytest.raises(AppError, match="not allowed"):
        asyncio.run(fetch_images(request_with(turn("http://other", required=True)), fetch))


def test_requests_without_a_conversation_have_no_images():
    assert GenerateRequest(model="m", prompt="a").images == []
