"""Streamed responses: server-sent events, JSON lines, keep-alive comments, client disconnects.

Knows: starlette, sse_starlette, orjson, the framing of both formats. Must not know: the requests
and responses of dialects, generation.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import orjson
from sse_starlette import EventSourceResponse
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.http.responses import json_response

# the names and values of headers, as in an ASGI message
Headers = Sequence[tuple[bytes, bytes]]


class ClientDisconnected(Exception):
    """Raised if the client disconnects before its request is complete; no response is possible."""


# Frames


_UNICODE_LINE_ENDS = (
    ("\x85".encode(), b"\\u0085"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


def encode_sse_event(payload: object, name: str = "") -> bytes:
    """Encodes a server-sent event. Lines end with LF rather than CRLF, because vLLM's benchmark
    client splits events at two line feeds. name: the name of the event; "" for none."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _escape_line_ends(orjson.dumps(payload)) + b"\n\n"


def encode_sse_comment(text: str) -> bytes:
    """Encodes a comment, which keeps a stream alive. Every SSE client skips it."""
    return b": " + text.encode() + b"\n\n"


KEEP_ALIVE_COMMENT = encode_sse_comment("keep-alive")


def encode_json_line(payload: object) -> bytes:
    return _escape_line_ends(orjson.dumps(payload)) + b"\n"


def _escape_line_ends(json: bytes) -> bytes:
    """Escapes three characters that JSON allows unescaped. Clients that use Python's
    `str.splitlines`, such as httpx, treat them as line breaks. The chaos tests found this bug
    (`python -m tests.chaos`)."""
    for character, escaped in _UNICODE_LINE_ENDS:
        json = json.replace(character, escaped)
    return json


# Sending, inside `cancel_on_disconnect`


async def send_json(content: object, scope: Scope, send: Send) -> None:
    await json_response(content)(scope, _never_receive, send)


def _make_comment() -> bytes:
    return KEEP_ALIVE_COMMENT


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Keep-alive settings of a stream. seconds: the idle time before a keep-alive. make_frame:
    returns the frame to send."""

    seconds: float
    make_frame: Callable[[], bytes] = _make_comment


def make_event_stream_headers() -> Headers:
    """Returns the headers of an event stream. They are the only part of sse_starlette that is used.
    For each chunk, its response starts a timeout and looks up the async library in use, which takes
    longer than everything else that is done for a token. Its three tasks per response are not
    needed: `ResponseStream` sends keep-alives, `cancel_on_disconnect` handles disconnects, and
    app/http/uvicorn_server.py ends streams at shutdown with a final frame, which the library would
    not send."""
    response = EventSourceResponse(iter(()))  # pyright: ignore[reportUnknownMemberType]  # a bare dict
    return response.raw_headers


def make_json_lines_headers(media_type: str = "application/jsonl") -> Headers:
    # without the second header, nginx buffers lines until its buffer is full
    headers = {"X-Accel-Buffering": "no"}
    return StreamingResponse(iter(()), media_type=media_type, headers=headers).raw_headers


class ResponseStream:
    """Sends a response in pieces, and a keep-alive frame when it has been idle for some seconds.
    There is one timer per response, and messages do not restart it. When the timer fires, it checks
    the time of the last message.

    The response begins when the context is entered. `write` may be called until `end`. headers: the
    headers of the response. keep_alive: None for no keep-alive frames.
    """

    def __init__(self, send: Send, headers: Headers, keep_alive: KeepAlive | None) -> None:
        self._send = send
        self._headers = headers
        self._keep_alive = keep_alive
        self._loop = asyncio.get_running_loop()
        self._is_sending = False  # whether a message is being sent, other than a keep-alive
        self._sent_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._sending_keep_alive: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._sent_at = self._loop.time()
        if self._keep_alive is not None:
            check = partial(self._check, self._keep_alive)
            self._timer = self._loop.call_later(self._keep_alive.seconds, check)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cancel_timer()
        if self._sending_keep_alive is not None:
            self._sending_keep_alive.cancel()
            await asyncio.gather(self._sending_keep_alive, return_exceptions=True)

    async def write(self, frames: bytes) -> None:
        """Sends one or more frames with one message."""
        if self._sending_keep_alive is not None:  # frames must not be interleaved
            await asyncio.wait({self._sending_keep_alive})
        self._is_sending = True
        try:
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})
        finally:
            self._is_sending = False
        self._sent_at = self._loop.time()

    async def end(self) -> None:
        """Ends a complete response."""
        self._cancel_timer()
        if self._sending_keep_alive is not None:
            await asyncio.wait({self._sending_keep_alive})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _check(self, keep_alive: KeepAlive) -> None:
        due_at = self._sent_at + keep_alive.seconds
        if self._is_sending or self._sending_keep_alive is not None:
            # the client does not read, so a keep-alive would not reach it
            due_at = self._loop.time() + keep_alive.seconds
        elif due_at <= self._loop.time():
            due_at = self._loop.time() + keep_alive.seconds
            sending = asyncio.create_task(self._send_keep_alive(keep_alive))
            # the main sender handles a disconnected client
            sending.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._sending_keep_alive = sending
        self._timer = self._loop.call_at(due_at, partial(self._check, keep_alive))

    async def _send_keep_alive(self, keep_alive: KeepAlive) -> None:
        try:
            if self._timer is not None:  # otherwise the response has ended
                frame = keep_alive.make_frame()
                await self._send({"type": "http.response.body", "body": frame, "more_body": True})
                self._sent_at = self._loop.time()
        finally:
            self._sending_keep_alive = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def send_event_stream(
    frames: AsyncIterator[bytes], send: Send, keep_alive: KeepAlive
) -> None:
    """Sends server-sent events. Each item of `frames` may contain several frames."""
    async with ResponseStream(send, make_event_stream_headers(), keep_alive) as response:
        async for written in frames:
            await response.write(written)
        await response.end()


async def _never_receive() -> Message:
    """A `receive` function that never returns. Streaming responses normally listen for a disconnect
    themselves. `cancel_on_disconnect` already listens, and two listeners on one `receive` would
    take each other's messages."""
    return await asyncio.get_running_loop().create_future()


async def cancel_on_disconnect(
    receive: Receive, send: Send, handler: Callable[[Send], Awaitable[None]]
) -> None:
    """Runs `handler` and cancels it when the client disconnects.

    Call this function after the body was read. The handler is always awaited, so that all its
    resources are closed when the function returns. A disconnect after a complete response, which
    servers also report, has no effect.
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
