"""Replies, frames of streams, and clients that disconnect.

Knows starlette, sse_starlette, orjson, status codes and the error envelope which every reply that
is no dialect's own uses. Must not know: any dialect's requests or answers, or what is generated.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, cast

import orjson
from sse_starlette import EventSourceResponse
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.core.errors import AppError, ErrorKind
from app.core.request_context import REQUEST_CONTEXT

JsonObject = dict[str, Any]


class ClientDisconnected(Exception):
    """The client hung up before its request was whole: there is nobody to answer."""


# Requests


def peek_model(body: object) -> str:
    """The model that a body which nobody has understood yet seems to ask for."""
    model = cast(JsonObject, body).get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else ""


def get_caller(scope: Scope) -> str:
    """Who asks, by the name of the key; "" where there are none."""
    return scope.get("state", {}).get("caller", "")


def is_admin(scope: Scope) -> bool:
    """Whether the caller may manage models: with an admin's key, or where there are no keys."""
    return scope.get("state", {}).get("admin", False)


# Replies


# Items of a long array that are written at once.
_ITEMS_PER_PIECE = 512


class ErrorFormat(NamedTuple):
    """How a kind of mistake is told over HTTP."""

    status: int
    type: str
    code: str | None = None


ERROR_FORMATS: Mapping[ErrorKind, ErrorFormat] = {
    ErrorKind.INVALID: ErrorFormat(400, "invalid_request_error"),
    ErrorKind.CONTEXT_LENGTH: ErrorFormat(400, "invalid_request_error", "context_length_exceeded"),
    ErrorKind.NOT_FOUND: ErrorFormat(404, "invalid_request_error", "not_found"),
    ErrorKind.MODEL_NOT_FOUND: ErrorFormat(404, "invalid_request_error", "model_not_found"),
    ErrorKind.METHOD_NOT_ALLOWED: ErrorFormat(405, "invalid_request_error", "method_not_supported"),
    ErrorKind.UNSUPPORTED_MEDIA_TYPE: ErrorFormat(
        415, "invalid_request_error", "unsupported_media_type"
    ),
    ErrorKind.TOO_LARGE: ErrorFormat(413, "invalid_request_error", "request_too_large"),
    ErrorKind.UNAUTHORIZED: ErrorFormat(401, "invalid_request_error", "invalid_api_key"),
    ErrorKind.FORBIDDEN: ErrorFormat(403, "invalid_request_error", "forbidden"),
    ErrorKind.REQUEST_TIMEOUT: ErrorFormat(408, "invalid_request_error", "request_timeout"),
    ErrorKind.DEADLINE: ErrorFormat(504, "api_error", "deadline_exceeded"),
    ErrorKind.LOADING: ErrorFormat(503, "api_error", "model_loading"),
    ErrorKind.STOPPING: ErrorFormat(503, "api_error", "server_stopping"),
    ErrorKind.OVERLOADED: ErrorFormat(503, "api_error", "server_overloaded"),
    # OpenAI's words for "too much at the moment"; vLLM answers 503, which means "not at all"
    ErrorKind.BUSY: ErrorFormat(429, "rate_limit_error", "server_busy"),
    ErrorKind.ENGINE: ErrorFormat(500, "api_error", "engine_error"),
    ErrorKind.MODEL_FILES: ErrorFormat(500, "api_error", "bad_model_files"),
}


# What trying again helps against. The SDKs obey the Retry-After that these are told with.
RETRYABLE = frozenset({ErrorKind.LOADING, ErrorKind.STOPPING, ErrorKind.BUSY, ErrorKind.OVERLOADED})


def render_error(error: AppError) -> JsonObject:
    """OpenAI's error object, which all four kinds of client we know can read."""
    manner = ERROR_FORMATS[error.kind]
    return {
        "error": {
            "message": error.message,
            "type": manner.type,
            "param": error.param,
            "code": error.code or manner.code,
        }
    }


def encode_long_array(items: list[Any]) -> list[Any] | orjson.Fragment:
    """A JSON array for a reply. A long one is written piece by piece: orjson holds the interpreter
    while it writes, and the log-probabilities of a long prompt are ten megabytes. Work for a
    thread."""
    if len(items) <= _ITEMS_PER_PIECE:
        return items
    pieces = (
        orjson.dumps(items[at : at + _ITEMS_PER_PIECE])[1:-1]
        for at in range(0, len(items), _ITEMS_PER_PIECE)
    )
    return orjson.Fragment(b"[" + b",".join(pieces) + b"]")


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        orjson.dumps(content), status_code=status, headers=headers, media_type="application/json"
    )


def error_response(
    error: AppError, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The envelope with the status of its kind, or with another one. The request that is being
    answered, if any, remembers the error for its access log line."""
    if (visit := REQUEST_CONTEXT.get()) is not None:
        visit.error, visit.reason = error.code or error.kind.value, error.redact()
    wait = error.retry_after
    if wait is None and error.kind in RETRYABLE:
        wait = 1  # what a client that polls us would wait anyway
    told = {} if wait is None else {"Retry-After": str(wait)}
    if error.kind is ErrorKind.DEADLINE:
        # OpenAI's SDKs repeat whatever is 500 or more, and it would take as long again
        told["x-should-retry"] = "false"
    return json_response(
        render_error(error), status or ERROR_FORMATS[error.kind].status, {**told, **(headers or {})}
    )


# Frames


_UNICODE_LINE_ENDS = (
    ("\x85".encode(), b"\\u0085"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


def encode_sse_event(payload: object) -> bytes:
    """A server-sent event. LF, not CRLF: vLLM's own benchmark client splits at two line feeds."""
    return b"data: " + _escape_line_ends(orjson.dumps(payload)) + b"\n\n"


def encode_sse_comment(text: str) -> bytes:
    """A line that keeps a stream alive and that every client of server-sent events skips."""
    return b": " + text.encode() + b"\n\n"


def encode_json_line(payload: object) -> bytes:
    return _escape_line_ends(orjson.dumps(payload)) + b"\n"


def _escape_line_ends(json: bytes) -> bytes:
    """Three characters that JSON need not escape end a line for clients that cut text with Python's
    `str.splitlines`, as httpx does; found by `python -m tests.chaos`."""
    for character, escaped in _UNICODE_LINE_ENDS:
        json = json.replace(character, escaped)
    return json


# Sending, inside `cancel_on_disconnect`


async def send_json(content: object, scope: Scope, send: Send) -> None:
    await json_response(content)(scope, _never_receive, send)


async def send_event_stream(frames: AsyncIterator[bytes], scope: Scope, send: Send) -> None:
    # Keep-alives are ours (they know about progress) and frames come ready, so neither the
    # library's ping nor its CRLF come into it. Nor does it end streams when the server is told to
    # stop, as it would half a second later, without a last frame: app/http/uvicorn_server.py does that.
    response = EventSourceResponse(frames, ping=0, shutdown_grace_period=math.inf)
    await response(scope, _never_receive, send)


async def send_json_lines(frames: AsyncIterator[bytes], scope: Scope, send: Send) -> None:
    response = StreamingResponse(frames, media_type="application/jsonl")
    await response(scope, _never_receive, send)


async def _never_receive() -> Message:
    """Streaming responses listen for a disconnect of their own accord. Two listeners on one
    `receive` would take each other's messages, and `cancel_on_disconnect` is the one."""
    return await asyncio.get_running_loop().create_future()


# Clients


async def cancel_on_disconnect(
    receive: Receive, send: Send, handler: Callable[[Send], Awaitable[None]]
) -> None:
    """Runs the exchange, and cancels it when the client hangs up, wherever it stands just then.

    To be called once the body was read. The exchange is awaited in any case, so that whatever it
    opened is closed when this returns. A disconnect that follows a complete response (servers
    report one) cancels nothing.
    """
    complete = False

    async def tracking_send(message: Message) -> None:
        nonlocal complete
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            complete = True
        await send(message)

    async def listen_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work = asyncio.ensure_future(handler(tracking_send))
    watch = asyncio.create_task(listen_for_disconnect())
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if complete:
            await asyncio.wait({work})
    finally:
        work.cancel()
        watch.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)
    if not work.cancelled():
        work.result()
