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

from app.core.errors import AppError, Kind
from app.core.visit import VISIT

JsonObject = dict[str, Any]


class ClientLeft(Exception):
    """The client hung up before its request was whole: there is nobody to answer."""


# Requests


def model_named_in(body: object) -> str:
    """The model that a body which nobody has understood yet seems to ask for."""
    model = cast(JsonObject, body).get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else ""


def caller_of(scope: Scope) -> str:
    """Who asks, by the name of the key; "" where there are none."""
    return scope.get("state", {}).get("caller", "")


def is_admin(scope: Scope) -> bool:
    """Whether the caller may manage models: with an admin's key, or where there are no keys."""
    return scope.get("state", {}).get("admin", False)


# Replies


# Items of a long array that are written at once.
_PIECE = 512


class Manner(NamedTuple):
    """How a kind of mistake is told over HTTP."""

    status: int
    type: str
    code: str | None = None


MANNERS: Mapping[Kind, Manner] = {
    Kind.INVALID: Manner(400, "invalid_request_error"),
    Kind.CONTEXT_LENGTH: Manner(400, "invalid_request_error", "context_length_exceeded"),
    Kind.NOT_FOUND: Manner(404, "invalid_request_error", "not_found"),
    Kind.MODEL_NOT_FOUND: Manner(404, "invalid_request_error", "model_not_found"),
    Kind.METHOD: Manner(405, "invalid_request_error", "method_not_supported"),
    Kind.MEDIA_TYPE: Manner(415, "invalid_request_error", "unsupported_media_type"),
    Kind.TOO_LARGE: Manner(413, "invalid_request_error", "request_too_large"),
    Kind.UNAUTHORIZED: Manner(401, "invalid_request_error", "invalid_api_key"),
    Kind.FORBIDDEN: Manner(403, "invalid_request_error", "forbidden"),
    Kind.TIMEOUT: Manner(408, "invalid_request_error", "request_timeout"),
    Kind.DEADLINE: Manner(504, "api_error", "deadline_exceeded"),
    Kind.LOADING: Manner(503, "api_error", "model_loading"),
    Kind.STOPPING: Manner(503, "api_error", "server_stopping"),
    Kind.OVERLOADED: Manner(503, "api_error", "server_overloaded"),
    # OpenAI's words for "too much at the moment"; vLLM answers 503, which means "not at all"
    Kind.BUSY: Manner(429, "rate_limit_error", "server_busy"),
    Kind.ENGINE: Manner(500, "api_error", "engine_error"),
    Kind.MODEL_FILES: Manner(500, "api_error", "bad_model_files"),
}


# What trying again helps against. The SDKs obey the Retry-After that these are told with.
PASSING = frozenset({Kind.LOADING, Kind.STOPPING, Kind.BUSY, Kind.OVERLOADED})


def envelope(error: AppError) -> JsonObject:
    """OpenAI's error object, which all four kinds of client we know can read."""
    manner = MANNERS[error.kind]
    return {
        "error": {
            "message": error.message,
            "type": manner.type,
            "param": error.param,
            "code": error.code or manner.code,
        }
    }


def long_array(items: list[Any]) -> list[Any] | orjson.Fragment:
    """A JSON array for a reply. A long one is written piece by piece: orjson holds the interpreter
    while it writes, and the log-probabilities of a long prompt are ten megabytes. Work for a
    thread."""
    if len(items) <= _PIECE:
        return items
    pieces = (orjson.dumps(items[at : at + _PIECE])[1:-1] for at in range(0, len(items), _PIECE))
    return orjson.Fragment(b"[" + b",".join(pieces) + b"]")


def json_reply(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        orjson.dumps(content), status_code=status, headers=headers, media_type="application/json"
    )


def problem_reply(
    error: AppError, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The envelope with the status of its kind, or with another one. The request that is being
    answered, if any, remembers the error for its access log line."""
    if (visit := VISIT.get()) is not None:
        visit.error, visit.reason = error.code or error.kind.value, error.loggable()
    wait = error.retry_after
    if wait is None and error.kind in PASSING:
        wait = 1  # what a client that polls us would wait anyway
    told = {} if wait is None else {"Retry-After": str(wait)}
    if error.kind is Kind.DEADLINE:
        # OpenAI's SDKs repeat whatever is 500 or more, and it would take as long again
        told["x-should-retry"] = "false"
    return json_reply(
        envelope(error), status or MANNERS[error.kind].status, {**told, **(headers or {})}
    )


# Frames


_LINE_ENDS = (
    ("\x85".encode(), b"\\u0085"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


def event_frame(payload: object) -> bytes:
    """A server-sent event. LF, not CRLF: vLLM's own benchmark client splits at two line feeds."""
    return b"data: " + _on_one_line(orjson.dumps(payload)) + b"\n\n"


def comment_frame(text: str) -> bytes:
    """A line that keeps a stream alive and that every client of server-sent events skips."""
    return b": " + text.encode() + b"\n\n"


def line_frame(payload: object) -> bytes:
    return _on_one_line(orjson.dumps(payload)) + b"\n"


def _on_one_line(json: bytes) -> bytes:
    """Three characters that JSON need not escape end a line for clients that cut text with Python's
    `str.splitlines`, as httpx does; found by `python -m tests.chaos`."""
    for character, escaped in _LINE_ENDS:
        json = json.replace(character, escaped)
    return json


# Sending, inside `while_connected`


async def send_json(content: object, scope: Scope, send: Send) -> None:
    await json_reply(content)(scope, _receive_nothing, send)


async def send_event_stream(frames: AsyncIterator[bytes], scope: Scope, send: Send) -> None:
    # Keep-alives are ours (they know about progress) and frames come ready, so neither the
    # library's ping nor its CRLF come into it. Nor does it end streams when the server is told to
    # stop, as it would half a second later, without a last frame: app/door/draining.py does that.
    response = EventSourceResponse(frames, ping=0, shutdown_grace_period=math.inf)
    await response(scope, _receive_nothing, send)


async def send_lines(frames: AsyncIterator[bytes], scope: Scope, send: Send) -> None:
    response = StreamingResponse(frames, media_type="application/jsonl")
    await response(scope, _receive_nothing, send)


async def _receive_nothing() -> Message:
    """Streaming responses listen for a disconnect of their own accord. Two listeners on one
    `receive` would take each other's messages, and `while_connected` is the one."""
    return await asyncio.get_running_loop().create_future()


# Clients


async def while_connected(
    receive: Receive, send: Send, exchange: Callable[[Send], Awaitable[None]]
) -> None:
    """Runs the exchange, and cancels it when the client hangs up, wherever it stands just then.

    To be called once the body was read. The exchange is awaited in any case, so that whatever it
    opened is closed when this returns. A disconnect that follows a complete response (servers
    report one) cancels nothing.
    """
    complete = False

    async def noting_send(message: Message) -> None:
        nonlocal complete
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            complete = True
        await send(message)

    async def departure() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work = asyncio.ensure_future(exchange(noting_send))
    watch = asyncio.create_task(departure())
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
