"""Images, audio and files, in every dialect: images become part of their message, at their
position. Attachments that the server cannot read are rejected in a new question, and replaced with
text in tool results and in earlier turns."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from app.core.images import Image, RemoteImage
from app.core.requests import Conversation, Message
from tests.api.asgi import Reply, send_request
from tests.api.test_unknown_fields import MODEL, OLLAMA, TOOL
from tests.fakes import FakeGenerate
from tests.image_files import encode_png, make_data_url, make_png
from tests.rows import rows

PNG, URL = encode_png(), make_data_url()
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}}
FILE = {"type": "file", "file": {"filename": "a.pdf", "file_data": URL}}
INPUT_IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}
INPUT_FILE = {"type": "input_file", "filename": "a.pdf", "file_data": URL}
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": PNG}
PICTURE = {"type": "image", "source": SOURCE, "cache_control": {"type": "ephemeral"}}
PDF = {"type": "document", "source": {**SOURCE, "media_type": "application/pdf"}, "title": "a.pdf"}
FILE_ID = {"type": "document", "source": {"type": "file", "file_id": "f_1"}}

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT, OLLAMA_CHAT = "/v1/messages/count_tokens", "/api/chat"
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
USED = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}],
}
FUNCTION_CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}


def user(*content: Any) -> Any:
    return {"role": "user", "content": list(content) if content else "hi"}


def tool_result(*content: Any) -> Any:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": list(content)}


def chat(*messages: Any) -> tuple[str, Any]:
    return CHAT, {**MODEL, "messages": messages, "tools": [TOOL]}


def responses(*items: Any) -> tuple[str, Any]:
    tools = [{"type": "function", **FUNCTION}]
    return RESPONSES, {**MODEL, "input": items, "tools": tools}


def messages(*turns: Any, path: str = MESSAGES) -> tuple[str, Any]:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    limit = {"max_tokens": 9} if path == MESSAGES else {}
    return path, {**MODEL, **limit, "messages": turns, "tools": tools}


def ollama(*turns: Any) -> tuple[str, Any]:
    return OLLAMA_CHAT, {**OLLAMA, "messages": turns, "tools": [TOOL], "stream": False}


ANSWER = {"role": "assistant", "content": "A cat."}
OLLAMA_CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}

OLLAMA_USER = {"role": "user", "content": "hi"}
OLLAMA_IMAGES = {"content": "see", "images": [PNG]}
RESULT = {"role": "tool", "tool_call_id": "1"}
OUTPUT = {"type": "function_call_output", "call_id": "1"}

# requests whose attachment is not part of a new question, with its kind
EARLIER: list[tuple[tuple[str, Any], str]] = [
    (chat(user(IMAGE), ANSWER, user()), "image"),
    (chat(user(AUDIO), ANSWER, user()), "audio"),
    (chat(user(FILE), ANSWER, user()), "file"),
    (chat(user(IMAGE), user()), "image"),
    (chat(user(), CALLED, {**RESULT, "content": [IMAGE]}), "image"),
    (chat(user(), CALLED, {**RESULT, "content": "see"}, user(FILE)), "file"),
    (responses(user(INPUT_IMAGE), ANSWER, user()), "image"),
    (responses(user(INPUT_FILE), ANSWER, user()), "file"),
    (responses(user(INPUT_AUDIO), ANSWER, user()), "audio"),
    (responses(user(), FUNCTION_CALL, {**OUTPUT, "output": [INPUT_IMAGE]}), "image"),
    (responses(user(), FUNCTION_CALL, {**OUTPUT, "output": [INPUT_FILE]}), "file"),
    (ollama({"role": "user", **OLLAMA_IMAGES}, ANSWER, OLLAMA_USER), "image"),
    (
        ollama(OLLAMA_USER, OLLAMA_CALLED, {"role": "tool", "tool_name": "f", **OLLAMA_IMAGES}),
        "image",
    ),
]
EARLIER += [
    (messages(*turns, path=path), kind)
    for path in (MESSAGES, COUNT)
    for turns, kind in (
        ((user(PICTURE), ANSWER, user()), "image"),
        ((user(PDF), ANSWER, user()), "file"),
        ((user(FILE_ID), ANSWER, user()), "file"),
        ((user(), USED, user(tool_result(PICTURE))), "image"),
        ((user(), USED, user(tool_result(PDF))), "file"),
        ((user(), USED, user(tool_result(), PDF)), "file"),
        ((user(), USED, user(tool_result()), user(PDF)), "file"),
    )
]

QUESTIONS: list[tuple[tuple[str, Any], bool]] = [
    (chat(user(IMAGE)), True),
    (chat(user(), ANSWER, user(FILE)), False),
    (
        chat(
            user(),
            CALLED,
            {"role": "tool", "tool_call_id": "1", "content": "4"},
            ANSWER,
            user(AUDIO),
        ),
        False,
    ),
    (responses(user(INPUT_IMAGE)), True),
    (responses(user(), ANSWER, user(INPUT_FILE)), False),
    (messages(user(PICTURE)), True),
    (messages(user(), ANSWER, user(PDF)), False),
    (messages(user(PICTURE), path=COUNT), True),
    (ollama({"role": "user", "content": "see", "images": [PNG]}), True),
]

# requests with the image URL in each place where one is allowed
PLACES_IN_QUESTIONS: list[tuple[str, Any]] = [
    chat(user({"type": "image_url", "image_url": {"url": URL}})),
    chat(user({"type": "image_url", "image_url": URL})),
    responses(user({"type": "input_image", "image_url": URL})),
    messages(user({"type": "image", "source": {**SOURCE, "data": PNG}})),
    messages(user({"type": "image", "source": {"type": "url", "url": URL}})),
    ollama({"role": "user", "images": [PNG]}),
    ollama({"role": "user", "images": [URL]}),
    ("/api/generate", {**OLLAMA, "images": [URL], "stream": False}),
]
OTHER_PLACES: list[tuple[str, Any]] = [
    chat(user({"type": "image_url", "image_url": URL}), ANSWER, user()),
    chat(
        user(), {"role": "assistant", "content": [{"type": "image_url", "image_url": URL}]}, user()
    ),
    chat(user(), CALLED, {**RESULT, "content": [{"type": "image_url", "image_url": URL}]}),
    responses(
        user(), FUNCTION_CALL, {**OUTPUT, "output": [{"type": "input_image", "image_url": URL}]}
    ),
    responses(
        user(),
        {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": ""},
        {
            "type": "custom_tool_call_output",
            "call_id": "1",
            "output": [{"type": "input_image", "image_url": URL}],
        },
    ),
    messages(
        user(),
        USED,
        user(tool_result({"type": "image", "source": {"type": "url", "url": URL}})),
    ),
    messages(
        user(tool_result({"type": "image", "source": {"type": "url", "url": URL}})),
    ),
    ollama(OLLAMA_USER, OLLAMA_CALLED, {"role": "tool", "tool_name": "f", "images": [URL]}),
]


def break_image(request: tuple[str, Any]) -> tuple[str, Any]:
    path, body = request
    return path, json.loads(json.dumps(body).replace(PNG, "eA=="))


def send(request: tuple[str, Any]) -> tuple[Reply, FakeGenerate]:
    generate = FakeGenerate()
    path, body = request
    return send_request(generate, "POST", path, body), generate


def get_messages(generate: FakeGenerate) -> Sequence[Message]:
    [request] = [*generate.opened, *generate.tokenized_chats]
    assert isinstance(request.prompt, Conversation)
    return request.prompt.messages


@rows("request_", [*PLACES_IN_QUESTIONS, *OTHER_PLACES])
def test_an_image_is_a_part_of_its_message(request_: tuple[str, Any]):
    reply, generate = send(request_)
    assert reply.status == 200, reply.body
    [placed] = [placed for message in get_messages(generate) for placed in message.images]
    assert isinstance(placed.image, Image)
    assert (placed.image.data, placed.image.format) == (make_png(), "png")
    assert (placed.image.width, placed.image.height) == (3, 2)
    assert placed.required is (request_ in PLACES_IN_QUESTIONS)


@rows("request_", PLACES_IN_QUESTIONS)
def test_an_image_of_a_question_that_cannot_be_read_is_refused(request_: tuple[str, Any]):
    reply, generate = send(break_image(request_))
    assert reply.status == 400
    error = reply.json["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "send PNG, JPEG, WebP or GIF" in message
    assert "content.0: " in message or "images.0: " in message
    assert generate.opened == []


@rows("request_", OTHER_PLACES)
def test_a_text_replaces_another_image_that_cannot_be_read(request_: tuple[str, Any]):
    reply, generate = send(break_image(request_))
    assert reply.status == 200, reply.body
    reason = "omitted: the data is not an image in a known format"
    assert reason in reply.headers["x-mlxrunner-notice"]
    found = get_messages(generate)
    assert [message.images for message in found] == [()] * len(found)
    assert any(f"[image {reason}" in (message.content or "") for message in found)


@pytest.mark.parametrize(
    "request_",
    [
        responses(user({"type": "input_image", "file_id": "file_1"})),
        messages(user({"type": "image", "source": {"type": "file", "file_id": "file_1"}})),
    ],
)
def test_the_id_of_an_uploaded_file_is_refused_by_name(request_: tuple[str, Any]):
    reply, _ = send(request_)
    assert reply.status == 400
    assert "file" in reply.json["error"]["message"]
    assert "is not supported: send the image itself" in reply.json["error"]["message"]


def test_an_address_is_left_to_the_serving_layer():
    url = "https://example.com/cat.png"
    _, generate = send(chat(user({"type": "image_url", "image_url": url})))
    [placed] = get_messages(generate)[0].images
    assert placed.image == RemoteImage(url=url, param="messages.0.content.0")
    assert placed.required


def test_images_keep_their_places_between_the_texts_of_a_message():
    first, second = {"type": "text", "text": "one"}, {"type": "text", "text": "two"}
    _, generate = send(chat(user(first, second, IMAGE, first, IMAGE)))
    [message] = get_messages(generate)
    assert message.content == "one\ntwoone"
    assert [placed.offset for placed in message.images] == [7, 10]


def test_the_images_of_ollama_come_before_the_text():
    _, generate = send(ollama({"role": "user", "content": "see", "images": [PNG, PNG]}))
    [message] = get_messages(generate)
    assert message.content == "see"
    assert [placed.offset for placed in message.images] == [0, 0]


@pytest.mark.parametrize(
    ("detail", "expected"),
    [("low", "low"), ("high", "high"), ("original", "high"), ("auto", "auto"), (None, "auto")],
)
def test_the_detail_of_an_image_is_kept(detail: str | None, expected: str):
    for request in (
        chat(user({"type": "image_url", "image_url": {"url": URL, "detail": detail}})),
        responses(user({**INPUT_IMAGE, "detail": detail})),
    ):
        _, generate = send(request)
        assert [placed.image.detail for placed in get_messages(generate)[0].images] == [expected]


@rows(("request_", "kind"), EARLIER)
def test_a_text_replaces_audio_and_files_that_are_no_new_question(
    request_: tuple[str, Any], kind: str
):
    reply, generate = send(request_)
    assert reply.status == 200, reply.body
    found = get_messages(generate)
    if kind == "image":
        assert [not placed.required for message in found for placed in message.images] == [True]
        return
    subject = "audio is" if kind == "audio" else f"{kind}s are"
    notice = f"{subject} omitted: this model reads text only"
    assert notice in reply.headers["x-mlxrunner-notice"]
    placeholder = f"[{kind} omitted: this model reads text only]"
    assert placeholder in "".join(message.content or "" for message in found)


@rows(("request_", "has_image"), QUESTIONS)
def test_a_new_question_with_audio_or_a_file_is_refused(request_: tuple[str, Any], has_image: bool):
    """The serving layer decides on images: see tests/serving/test_image_input.py."""
    reply, generate = send(request_)
    if has_image:
        assert [placed.required for one in get_messages(generate) for placed in one.images] == [
            True
        ]
        return
    assert reply.status == 400
    assert [*generate.opened, *generate.tokenized_chats] == []


def test_a_refused_question_does_not_end_the_conversation():
    """The client keeps the refused turn, and sends it with the next question."""
    assert send(chat(user(FILE)))[0].status == 400
    assert send(chat(user(FILE), user()))[0].status == 200


def test_a_title_of_a_document_is_kept():
    _, generate = send(messages(user(PDF), ANSWER, user()))
    prompt = generate.opened[0].prompt
    assert isinstance(prompt, Conversation)
    assert prompt.messages[0].content == "a.pdf\n[file omitted: this model reads text only]"
