"""Streamed responses: server-sent events, JSON lines, keep-alive comments, client disconnects.

Knows: starlette, sse_starlette, orjson, the framing of both formats. Must not know: the requests
and responses of dialects, generation.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import orjson
from sse_starlette import EventSourceResponse
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.http.responses import json_response


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


async def send_event_stream(
    frames: AsyncIterator[bytes], scope: Scope, send: Send, keep_alive: KeepAlive
) -> None:
    """Sends server-sent events. Each item of `frames` may contain several frames, and is sent with
    one write."""
    response = _EventStreamResponse(frames)
    timer = _KeepAliveTimer(send, keep_alive)
    try:
        await response(scope, _never_receive, timer.send)
    finally:
        await timer.stop()


class _EventStreamResponse(EventSourceResponse):
    """A response with frames that are already encoded. Replaces the library's sending, but not its
    headers. For each chunk, the library starts a timeout and looks up the async library in use,
    which takes longer than everything else that is done for a token. Its three tasks per response
    are not needed either: `_KeepAliveTimer` sends keep-alives, `cancel_on_disconnect` handles
    disconnects, and app/http/uvicorn_server.py ends streams at shutdown with a final frame, which
    the library would not send."""

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        super().__init__(frames)  # pyright: ignore[reportUnknownMemberType]  # a bare dict
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        async for frames in self._frames:
            await send({"type": "http.response.body", "body": frames, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _KeepAliveTimer:
    """Sends a frame when a response has been idle for some seconds. There is one timer per
    response, and messages do not restart it. When the timer fires, it checks the time of the last
    message."""

    def __init__(self, send: Send, keep_alive: KeepAlive) -> None:
        self._send = send
        self._seconds = keep_alive.seconds
        self._make_frame = keep_alive.make_frame
        self._loop = asyncio.get_running_loop()
        self._is_sending = False  # whether a message is being sent, other than a keep-alive
        self._sent_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._keep_alive: asyncio.Task[None] | None = None  # while it is being sent

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._timer = self._loop.call_later(self._seconds, self._check)
        elif not message.get("more_body", False):
            self._cancel_timer()
        if self._keep_alive is not None:  # frames must not be interleaved
            await asyncio.wait({self._keep_alive})
        self._is_sending = True
        try:
            await self._send(message)
        finally:
            self._is_sending = False
        self._sent_at = self._loop.time()

    async def stop(self) -> None:
        self._cancel_timer()
        if self._keep_alive is not None:
            self._keep_alive.cancel()
            await asyncio.gather(self._keep_alive, return_exceptions=True)

    def _check(self) -> None:
        due_at = self._sent_at + self._seconds
        if self._is_sending or self._keep_alive is not None:
            # the client does not read, so a keep-alive would not reach it
            due_at = self._loop.time() + self._seconds
        elif due_at <= self._loop.time():
            due_at = self._loop.time() + self._seconds
            self._keep_alive = asyncio.create_task(self._send_keep_alive())
            # the main sender handles a disconnected client
            self._keep_alive.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._timer = self._loop.call_at(due_at, self._check)

    async def _send_keep_alive(self) -> None:
        try:
            if self._timer is not None:  # otherwise the response has ended
                frame = self._make_frame()
                body = {"type": "http.response.body", "body": frame, "more_body": True}
                await self._send(body)
                self._sent_at = self._loop.time()
        finally:
            self._keep_alive = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def send_json_lines(
    frames: AsyncIterator[bytes],
    scope: Scope,
    send: Send,
    keep_alive: KeepAlive | None,
    media_type: str = "application/jsonl",
) -> None:
    """Sends JSON lines."""
    # without this header, nginx buffers lines until its buffer is full
    response = StreamingResponse(frames, media_type=media_type, headers={"X-Accel-Buffering": "no"})
    if keep_alive is None:
        await response(scope, _never_receive, send)
        return
    timer = _KeepAliveTimer(send, keep_alive)
    try:
        await response(scope, _never_receive, timer.send)
    finally:
        await timer.stop()


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
