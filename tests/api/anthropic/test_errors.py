"""Errors in Anthropic's format."""

import pytest

from app.api.anthropic.errors import ERROR_TYPES
from app.core.errors import AppError, ContextExcess, ErrorKind
from app.http.responses import ERROR_FORMATS
from tests.api.anthropic.requests import body, events, send
from tests.api.asgi import Reply, send_request
from tests.fakes import FakeGenerate, text
from tests.rows import rows
from tests.test_openapi import schema_validator


def send_failing_request(error: AppError, **fields: object) -> Reply:
    return send_request(FakeGenerate(open_error=error), "POST", "/v1/messages", body(**fields))


@rows("stream", [True, False])
@rows("kind", ErrorKind)
def test_each_kind_has_its_status_and_type(kind: ErrorKind, stream: bool):
    reply = send_failing_request(AppError(kind, "what", param="where", code="word"), stream=stream)
    assert reply.status == ERROR_TYPES[kind].status
    schema_validator("AnthropicError").validate(reply.json)
    assert reply.json["error"]["details"]["error_code"] == "word"
    assert reply.json["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    waits = kind in (ErrorKind.LOADING, ErrorKind.STOPPING, ErrorKind.BUSY, ErrorKind.OVERLOADED)
    assert ("retry-after" in reply.headers) == waits


@rows("kind", ErrorKind)
def test_an_error_without_its_own_code_has_the_code_of_the_error_table(kind: ErrorKind):
    code = send_failing_request(AppError(kind, "what")).json["error"]["details"]["error_code"]
    assert code == (ERROR_FORMATS[kind].code or "invalid_request")


def test_a_full_queue_is_a_rate_limit():
    reply = send_failing_request(AppError(ErrorKind.BUSY, "busy", retry_after=7))
    assert (reply.status, reply.json["error"]["type"]) == (429, "rate_limit_error")
    assert reply.headers["retry-after"] == "7"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("top_k must be 1", "top_k: must be 1"),
        ("top_k: no", "top_k: no"),
        ("top_k_2 is no", "top_k: top_k_2 is no"),
        ("no", "top_k: no"),
    ],
)
def test_a_message_begins_with_the_path_of_the_field(message: str, expected: str):
    reply = send_failing_request(AppError(ErrorKind.INVALID, message, param="top_k"))
    assert reply.json["error"]["message"] == expected


def test_the_messages_that_make_claude_code_compact():
    too_long = ContextExcess(prompt_tokens=5000, context_length=4096)
    reply = send_failing_request(
        AppError(ErrorKind.CONTEXT_LENGTH, "x", param="messages", excess=too_long)
    )
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert reply.json["error"]["message"] == "prompt is too long: 5000 tokens > 4095 maximum"
    little = ContextExcess(prompt_tokens=4090, context_length=4096, output_tokens=32000)
    reply = send_failing_request(AppError(ErrorKind.CONTEXT_LENGTH, "x", excess=little))
    assert reply.json["error"]["message"] == (
        "input length and `max_tokens` exceed context limit: 4090 + 32000 > 4096, decrease input "
        "length or `max_tokens` and try again"
    )
    reply = send_failing_request(AppError(ErrorKind.CONTEXT_LENGTH, "far too long"))
    assert reply.json["error"]["message"] == "prompt is too long: far too long"


def test_an_unknown_model_names_the_variables_of_claude_code():
    reply = send_request(
        FakeGenerate(), "POST", "/v1/messages", body() | {"model": "claude-sonnet-5"}
    )
    assert (reply.status, reply.json["error"]["type"]) == (404, "not_found_error")
    assert reply.json["error"]["message"].startswith("model: ")
    assert "ANTHROPIC_DEFAULT_HAIKU_MODEL" in reply.json["error"]["message"]


def test_errors_of_the_server_have_the_format_too():
    """Routes, methods, bodies and keys; other dialects keep theirs."""
    generate = FakeGenerate()
    version = {"anthropic-version": "2023-06-01"}
    for method, path, headers, status, kind in (
        ("GET", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("GET", "/v1/files", version, 404, "not_found_error"),
        ("GET", "/v1/messages", {}, 405, "invalid_request_error"),
        ("POST", "/v1/messages", {"content-type": "text/plain"}, 415, "invalid_request_error"),
        ("POST", "/v1/messages", {"host": "evil.example"}, 403, "permission_error"),
    ):
        reply = send_request(generate, method, path, b"{", headers)
        assert (reply.status, reply.json["error"]["type"]) == (status, kind)
        schema_validator("AnthropicError").validate(reply.json)
    assert send_request(generate, "POST", "/v1/messages", b"{").json["type"] == "error"
    assert "type" not in send_request(generate, "GET", "/v1/files").json
    large = send_request(generate, "POST", "/v1/messages", b" " * 3000, max_body=2000)
    assert (large.status, large.json["error"]["type"]) == (413, "request_too_large")


def test_an_error_after_the_first_byte_is_the_last_event():
    script = [text("Hel"), AppError(ErrorKind.OVERLOADED, "no memory")]
    reply, _ = send(body(stream=True), script)
    assert reply.status == 200
    *_, before, last = events(reply)
    assert before["type"] == "content_block_delta"
    schema_validator("AnthropicError").validate(last)
    assert last["error"]["type"] == "overloaded_error"
    assert last["request_id"] == reply.headers["request-id"]


def test_an_error_before_the_first_byte_has_a_status():
    reply, _ = send(body(stream=True), [AppError(ErrorKind.ENGINE, "the engine failed")])
    assert (reply.status, reply.json["error"]["type"]) == (500, "api_error")
