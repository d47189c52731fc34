"""Images, audio and files for a model that reads text only: a new question is refused, and in tool
results and earlier turns a placeholder replaces them, in every dialect."""

from typing import Any

import pytest

from app.api.attachments import is_new_question
from app.core.requests import Conversation
from tests.api.asgi import Reply, send_request
from tests.api.test_unknown_fields import MODEL, OLLAMA, TOOL
from tests.fakes import FakeGenerate
from tests.rows import rows

URL = "data:image/png;base64,eA=="
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}}
FILE = {"type": "file", "file": {"filename": "a.pdf", "file_data": URL}}
INPUT_IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}
INPUT_FILE = {"type": "input_file", "filename": "a.pdf", "file_data": URL}
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "eA=="}
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
OLLAMA_IMAGES = {"content": "see", "images": ["eA=="]}
RESULT = {"role": "tool", "tool_call_id": "1"}
OUTPUT = {"type": "function_call_output", "call_id": "1"}

# requests whose attachment is no new question, with its kind
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

QUESTIONS: list[tuple[str, Any]] = [
    chat(user(IMAGE)),
    chat(user(), ANSWER, user(FILE)),
    chat(
        user(), CALLED, {"role": "tool", "tool_call_id": "1", "content": "4"}, ANSWER, user(AUDIO)
    ),
    responses(user(INPUT_IMAGE)),
    responses(user(), ANSWER, user(INPUT_FILE)),
    messages(user(PICTURE)),
    messages(user(), ANSWER, user(PDF)),
    messages(user(PICTURE), path=COUNT),
    ollama({"role": "user", "content": "see", "images": ["eA=="]}),
]


def send(request: tuple[str, Any]) -> tuple[Reply, FakeGenerate]:
    generate = FakeGenerate()
    path, body = request
    return send_request(generate, "POST", path, body), generate


@rows(("request_", "kind"), EARLIER)
def test_a_placeholder_replaces_an_attachment_that_is_not_a_new_question(
    request_: tuple[str, Any], kind: str
):
    reply, generate = send(request_)
    assert reply.status == 200, reply.body
    subject = "audio is" if kind == "audio" else f"{kind}s are"
    notice = f"{subject} omitted: this model reads text only"
    assert notice in reply.headers["x-mlxrunner-notice"]
    [request] = [*generate.opened, *generate.tokenized_chats]
    assert isinstance(request.prompt, Conversation)
    placeholder = f"[{kind} omitted: this model reads text only]"
    assert placeholder in "".join(message.content or "" for message in request.prompt.messages)


@rows("request_", QUESTIONS)
def test_a_new_question_with_an_attachment_is_refused(request_: tuple[str, Any]):
    reply, generate = send(request_)
    assert reply.status == 400
    assert [*generate.opened, *generate.tokenized_chats] == []


def test_a_refused_question_does_not_end_the_conversation():
    """The client keeps the refused turn, and sends it with the next question."""
    assert send(chat(user(IMAGE)))[0].status == 400
    assert send(chat(user(IMAGE), user()))[0].status == 200


def test_a_title_of_a_document_is_kept():
    _, generate = send(messages(user(PDF), ANSWER, user()))
    prompt = generate.opened[0].prompt
    assert isinstance(prompt, Conversation)
    assert prompt.messages[0].content == "a.pdf\n[file omitted: this model reads text only]"


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([], False),
        (["user"], True),
        (["assistant", "user"], True),
        (["user", "assistant"], False),
        (["user", "assistant", "tool"], False),
        (["user", "assistant", "tool", "user"], False),
        (["user", "assistant", "tool", "user", "assistant", "user"], True),
    ],
)
def test_a_question_is_new_unless_a_tool_result_precedes_it(roles: list[str], expected: bool):
    assert is_new_question(roles) is expected
