"""Responses, stream frames and client disconnects.

Knows: starlette, sse_starlette, orjson, status codes, the error envelope of every response outside
a dialect. Must not know: any dialect's requests or responses, what is generated.
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
    """The client disconnected before its request was complete, so no response is possible."""


# Requests


def peek_model(body: object) -> str | None:
    """Returns the model that a body names, before other fields are parsed."""
    model = cast(JsonObject, body).get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else None


def get_caller(scope: Scope) -> str:
    """Returns the caller: the name of its key, or "" without keys."""
    return scope.get("state", {}).get("caller", "")


def is_admin(scope: Scope) -> bool:
    """Returns whether the caller may manage models: with an admin key, or without configured
    keys."""
    return scope.get("state", {}).get("admin", False)


# Responses


# Items of a long array that are encoded at once.
_ITEMS_PER_PIECE = 512


class ErrorFormat(NamedTuple):
    """The HTTP form of an error kind."""

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
    # OpenAI's status for a temporary overload; vLLM's 503 means that the service is unavailable
    ErrorKind.BUSY: ErrorFormat(429, "rate_limit_error", "server_busy"),
    ErrorKind.ENGINE: ErrorFormat(500, "api_error", "engine_error"),
    ErrorKind.MODEL_FILES: ErrorFormat(500, "api_error", "bad_model_files"),
}


# Errors that a retry may solve. The SDKs respect the Retry-After header sent with these.
RETRYABLE = frozenset({ErrorKind.LOADING, ErrorKind.STOPPING, ErrorKind.BUSY, ErrorKind.OVERLOADED})


def render_error(error: AppError) -> JsonObject:
    """Returns OpenAI's error object, which clients of all four known kinds can read."""
    error_format = ERROR_FORMATS[error.kind]
    return {
        "error": {
            "message": error.message,
            "type": error_format.type,
            "param": error.param,
            "code": error.code or error_format.code,
        }
    }


def encode_long_array(items: list[Any]) -> list[Any] | orjson.Fragment:
    """Encodes a JSON array for a response. A long one is encoded in pieces: orjson holds the GIL
    while it encodes, and the log-probabilities of a long prompt are ten megabytes. Call on a
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
    """Returns the error envelope with the status of its kind, or `status`. Records the error in the
    request context for the access log."""
    if (context := REQUEST_CONTEXT.get()) is not None:
        context.error, context.reason = error.code or error.kind.value, error.redact()
    wait = error.retry_after
    if wait is None and error.kind in RETRYABLE:
        wait = 1  # the interval that a polling client would use anyway
    told = {} if wait is None else {"Retry-After": str(wait)}
    if error.kind is ErrorKind.DEADLINE:
        # OpenAI's SDKs retry on 500 and above, and a retry would take as long again
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
    """Encodes a server-sent event. LF, not CRLF: vLLM's benchmark client splits at two line
    feeds."""
    return b"data: " + _escape_line_ends(orjson.dumps(payload)) + b"\n\n"


def encode_sse_comment(text: str) -> bytes:
    """Encodes a comment, which keeps a stream alive and is skipped by every SSE client."""
    return b": " + text.encode() + b"\n\n"


KEEP_ALIVE_COMMENT = encode_sse_comment("keep-alive")


def encode_json_line(payload: object) -> bytes:
    return _escape_line_ends(orjson.dumps(payload)) + b"\n"


def _escape_line_ends(json: bytes) -> bytes:
    """Escapes three characters that JSON allows unescaped but that end a line for clients that
    split text with Python's `str.splitlines`, as httpx does; found by `python -m tests.chaos`."""
    for character, escaped in _UNICODE_LINE_ENDS:
        json = json.replace(character, escaped)
    return json


# Sending, inside `cancel_on_disconnect`


async def send_json(content: object, scope: Scope, send: Send) -> None:
    await json_response(content)(scope, _never_receive, send)


async def send_event_stream(
    frames: AsyncIterator[bytes], scope: Scope, send: Send, keep_alive: float
) -> None:
    """Sends server-sent events. keep_alive: seconds of silence after which a comment is sent."""
    # Frames arrive complete, and keep-alives depend on what was sent, so the library's ping is off.
    # The library would also end streams half a second after shutdown begins, without a last frame:
    # app/http/uvicorn_server.py ends them.
    response = EventSourceResponse(frames, ping=0, shutdown_grace_period=math.inf)
    timer = _KeepAliveTimer(send, keep_alive)
    try:
        await response(scope, _never_receive, timer.send)
    finally:
        await timer.stop()


class _KeepAliveTimer:
    """Sends a comment when a response was silent for `seconds`. There is one timer per response,
    which messages do not restart: when it fires, it checks the time of the last message."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send = send
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()  # a comment must not come between two halves of a frame
        self._sent_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        async with self._lock:
            if message["type"] == "http.response.start":
                self._timer = self._loop.call_later(self._seconds, self._check)
            elif not message.get("more_body", False):
                self._cancel_timer()
            await self._send(message)
            self._sent_at = self._loop.time()

    async def stop(self) -> None:
        self._cancel_timer()
        if self._comment is not None:
            self._comment.cancel()
            await asyncio.gather(self._comment, return_exceptions=True)

    def _check(self) -> None:
        due_at = self._sent_at + self._seconds
        if self._lock.locked():  # the client does not read, so a comment would not reach it either
            due_at = self._loop.time() + self._seconds
        elif due_at <= self._loop.time():
            due_at = self._loop.time() + self._seconds
            self._comment = asyncio.create_task(self._send_comment())
            # a client that disconnected is the main sender's error
            self._comment.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._timer = self._loop.call_at(due_at, self._check)

    async def _send_comment(self) -> None:
        body = {"type": "http.response.body", "body": KEEP_ALIVE_COMMENT, "more_body": True}
        async with self._lock:
            if self._timer is not None:  # else the response ended meanwhile
                await self._send(body)
                self._sent_at = self._loop.time()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def send_json_lines(frames: AsyncIterator[bytes], scope: Scope, send: Send) -> None:
    response = StreamingResponse(frames, media_type="application/jsonl")
    await response(scope, _never_receive, send)


async def _never_receive() -> Message:
    """A `receive` that never returns. Streaming responses listen for a disconnect themselves, but
    two listeners on one `receive` would take each other's messages, and `cancel_on_disconnect`
    already listens."""
    return await asyncio.get_running_loop().create_future()


# Clients


async def cancel_on_disconnect(
    receive: Receive, send: Send, handler: Callable[[Send], Awaitable[None]]
) -> None:
    """Runs `handler` and cancels it when the client disconnects.

    Call it after the body was read. The handler is awaited in any case, so that everything it
    opened is closed when this returns. A disconnect after a complete response (servers report one)
    cancels nothing.
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
