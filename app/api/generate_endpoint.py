"""The life of one generating request on the side of HTTP.

Read the body, parse it, open the request, send what comes, leave. All of it stands in one
`async with`, and leaving that is what cancels: an error, a finished answer and a client that hung
up take the same way out. Must not know: any dialect, or what it costs to generate.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Protocol, Self, assert_never

from starlette.types import Receive, Scope, Send

from app.core.errors import AppError, ErrorKind
from app.core.events import Event, ModelLoading, OutputEvent, PrefillProgress, TextDelta
from app.core.ports import Generate
from app.core.requests import GenerateRequest
from app.core.settings import Settings
from app.http.body import MAX_VALUES, Body, RequestBodies
from app.http.responses import (
    JsonObject,
    cancel_on_disconnect,
    encode_sse_comment,
    get_caller,
    is_admin,
    send_event_stream,
    send_json,
    send_json_lines,
)

log = logging.getLogger(__name__)

# Prefill can take minutes and report hundreds of chunks; a person wants to see that it moves.
PROGRESS_INTERVAL = 1.0

# What an event, and a token with its log-probabilities, take in a reply.
_EVENT_BYTES, _LOGPROB_BYTES = 32, 512

# Seconds that a client is told to leave a model that takes longer to load than it waits.
_LOADING_RETRY_AFTER = 10


class StreamEncoder(Protocol):
    """How a dialect writes an answer that is streamed. One per answer, fed in order."""

    def feed(self, event: OutputEvent) -> bytes:
        """Whole frames, none or several."""
        ...

    def end(self) -> bytes:
        """The last frames, when every choice has finished."""
        ...

    def fail(self, error: AppError) -> bytes:
        """The last frames of a stream that breaks off."""
        ...


@dataclass(frozen=True, slots=True)
class EventStream:
    """Server-sent events."""

    encoder: StreamEncoder


@dataclass(frozen=True, slots=True)
class JsonLines:
    """One JSON object per line."""

    encoder: StreamEncoder


@dataclass(frozen=True, slots=True)
class JsonBody:
    """One JSON object when all is said: a fold over the events that a stream would have shown.

    collect: called on a thread, since an answer may have a million log-probabilities. on_complete:
    called on the event loop with what is about to be sent."""

    collect: Callable[[Sequence[OutputEvent]], JsonObject]
    on_complete: Callable[[JsonObject], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A body that has been understood: what is wanted, and in which form."""

    request: GenerateRequest
    reply: EventStream | JsonLines | JsonBody


class GenerateEndpoint:
    """An ASGI application: one POST route that generates. `parse` makes an Ask of parsed JSON and
    the caller's name, or raises AppError. max_values: JSON values that a body may have.

    AppErrors before the first byte of the answer are raised, so that they become a status; later
    ones are written into the stream.
    """

    def __init__(
        self,
        parse: Callable[[object, str], ParsedRequest],
        generate: Generate,
        settings: Settings,
        bodies: RequestBodies,
        *,
        max_values: int = MAX_VALUES,
    ) -> None:
        self._parse = parse
        self._generate = generate
        self._bodies = bodies
        self._max_values = max_values
        self._ping = settings.ping
        self._load_wait = settings.load_wait

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._bodies.receive_json(scope, receive, self._max_values) as body:

            async def exchange(send: Send) -> None:
                await self._respond(await self._parse_body(body), scope, send)

            await cancel_on_disconnect(receive, send, exchange)

    async def _parse_body(self, body: Body) -> ParsedRequest:
        """Nothing of the parsed body is left when this returns, but what the Ask holds."""
        return await body.read(
            self._generate.discover, lambda content, _: self._parse(content, body.caller)
        )

    async def _respond(self, parsed: ParsedRequest, scope: Scope, send: Send) -> None:
        reply = parsed.reply
        request = replace(parsed.request, caller=get_caller(scope), admin=is_admin(scope))
        async with self._generate.open(request) as events:
            match reply:
                case JsonBody():
                    said = [event async for event in _iter_content_events(events, self._load_wait)]
                case EventStream(frames):
                    async with _EventReader(events) as listener:
                        body = _encode_event_stream(listener, frames, self._ping)
                        await _send_stream(body, frames, scope, send, send_event_stream)
                    return
                case JsonLines(frames):
                    async with aclosing(_iter_content_events(events, self._load_wait)) as said:
                        await _send_stream(
                            _encode_json_lines(said, frames), frames, scope, send, send_json_lines
                        )
                    return
                case _:
                    assert_never(reply)
        content = await self._bodies.workers.run(
            partial(reply.collect, said), size=_estimate_size(said)
        )
        if reply.on_complete is not None:
            reply.on_complete(content)
        await send_json(content, scope, send)


def _estimate_size(events: Sequence[OutputEvent]) -> int:
    """About how many bytes an answer of these events has."""
    tokens = sum(len(event.logprobs) for event in events if isinstance(event, TextDelta))
    return _EVENT_BYTES * len(events) + _LOGPROB_BYTES * tokens


class _NoEvent(Enum):
    """Nothing was said: yet, or ever again."""

    TIMEOUT = auto()
    END = auto()


class _EventReader:
    """Takes events one at a time. Waiting has a time limit which does not cancel the wait itself:
    cancelling `anext` would end the answer. The task of the wait never outlives the listener."""

    def __init__(self, events: AsyncIterator[Event]) -> None:
        self._events = events
        self._pending: asyncio.Task[Event | _NoEvent] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)

    async def next(self, seconds: float) -> "Event | _NoEvent":
        """What happens within that time. Raises what the iterator raises."""
        if self._pending is None:
            self._pending = asyncio.create_task(self._next_event())
        done, _ = await asyncio.wait({self._pending}, timeout=seconds)
        if not done:
            return _NoEvent.TIMEOUT
        wait, self._pending = self._pending, None
        return wait.result()

    async def _next_event(self) -> "Event | _NoEvent":
        return await anext(self._events, _NoEvent.END)


async def _encode_event_stream(
    reader: _EventReader, encoder: StreamEncoder, keep_alive: float
) -> AsyncGenerator[bytes, None]:
    """Server-sent events, with comments for progress and for silence."""
    now = asyncio.get_running_loop().time
    spoke_at = now()
    progress_at = -math.inf
    while True:
        event = await reader.next(max(0.0, spoke_at + keep_alive - now()))
        match event:
            case _NoEvent.TIMEOUT:
                frame = encode_sse_comment("keep-alive")
            case _NoEvent.END:
                frame = encoder.end()
            case PrefillProgress(computed_tokens=done, total_tokens=total) if (
                now() - progress_at >= PROGRESS_INTERVAL
            ):
                frame = encode_sse_comment(f"prefill {done}/{total}")
                progress_at = now()
            case PrefillProgress():
                frame = b""
            case ModelLoading(progress=progress, queued=waits):
                frame = encode_sse_comment("waiting to load" if waits else f"loading {progress} %")
            case _:
                frame = encoder.feed(event)
        if frame:
            yield frame
            spoke_at = now()
        if event is _NoEvent.END:
            return


async def _iter_content_events(
    events: AsyncIterator[Event], load_wait: float
) -> AsyncGenerator[OutputEvent, None]:
    """What an answer is made of, for a client to whom nothing can be told before. Raises
    AppError(LOADING) if its model is not there within `load_wait` seconds: it may ask again, and
    the load goes on."""
    now = asyncio.get_running_loop().time
    began = now()
    async for event in events:
        if isinstance(event, ModelLoading):
            if now() - began >= load_wait:
                message = f"the model is loading ({event.progress} %): retry, or use stream: true"
                raise AppError(ErrorKind.LOADING, message, retry_after=_LOADING_RETRY_AFTER)
        elif not isinstance(event, PrefillProgress):
            yield event


async def _encode_json_lines(
    events: AsyncIterator[OutputEvent], encoder: StreamEncoder
) -> AsyncGenerator[bytes, None]:
    """JSON lines. There is no comment in JSON, so that nothing can be told before an answer is."""
    async for event in events:
        if frame := encoder.feed(event):
            yield frame
    if frame := encoder.end():
        yield frame


async def _send_stream(
    body: AsyncGenerator[bytes, None],
    encoder: StreamEncoder,
    scope: Scope,
    send: Send,
    send_frames: Callable[[AsyncIterator[bytes], Scope, Send], Awaitable[None]],
) -> None:
    """Headers go out with the first frame, so that what fails before it still has a status."""
    # `aclosing` twice: closing an outer generator does not wait for the inner one's end.
    async with aclosing(body):
        first = await anext(body)
        async with aclosing(_append_error_frames(first, body, encoder)) as unbroken:
            await send_frames(unbroken, scope, send)


async def _append_error_frames(
    first: bytes, rest: AsyncIterator[bytes], encoder: StreamEncoder
) -> AsyncGenerator[bytes, None]:
    """A stream whose status has been sent: what fails now becomes its last frames."""
    yield first
    try:
        async for frame in rest:
            yield frame
    except AppError as error:
        yield encoder.fail(error)
    except Exception:
        log.exception("a response stream failed")
        yield encoder.fail(AppError(ErrorKind.ENGINE, "internal error: see the server's log"))
