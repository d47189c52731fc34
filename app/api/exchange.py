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

from app.api.body import MOST_VALUES, Body, RequestBodies
from app.api.wire import (
    JsonObject,
    caller_of,
    comment_frame,
    is_admin,
    send_event_stream,
    send_json,
    send_lines,
    while_connected,
)
from app.core.errors import AppError, Kind
from app.core.events import Event, Loading, Progress, Spoken, TextDelta
from app.core.ports import Generate
from app.core.requests import GenerateRequest
from app.core.settings import Settings

log = logging.getLogger(__name__)

# Prefill can take minutes and report hundreds of chunks; a person wants to see that it moves.
PROGRESS_EVERY = 1.0

# What an event, and a token with its log-probabilities, take in a reply.
_EVENT_BYTES, _LOGPROB_BYTES = 32, 512

# Seconds that a client is told to leave a model that takes longer to load than it waits.
_LOADING_AGAIN = 10


class Frames(Protocol):
    """How a dialect writes an answer that is streamed. One per answer, fed in order."""

    def feed(self, event: Spoken) -> bytes:
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

    frames: Frames


@dataclass(frozen=True, slots=True)
class JsonLines:
    """One JSON object per line."""

    frames: Frames


@dataclass(frozen=True, slots=True)
class WholeBody:
    """One JSON object when all is said: a fold over the events that a stream would have shown.

    collect: called on a thread, since an answer may have a million log-probabilities. keep: called
    on the event loop with what is about to be sent."""

    collect: Callable[[Sequence[Spoken]], JsonObject]
    keep: Callable[[JsonObject], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A body that has been understood: what is wanted, and in which form."""

    request: GenerateRequest
    reply: EventStream | JsonLines | WholeBody


class GenerateEndpoint:
    """An ASGI application: one POST route that generates. `parse` makes an Ask of parsed JSON and
    the caller's name, or raises AppError. most_values: JSON values that a body may have.

    AppErrors before the first byte of the answer are raised, so that they become a status; later
    ones are written into the stream.
    """

    def __init__(
        self,
        parse: Callable[[object, str], Ask],
        generate: Generate,
        settings: Settings,
        bodies: RequestBodies,
        *,
        most_values: int = MOST_VALUES,
    ) -> None:
        self._parse = parse
        self._generate = generate
        self._bodies = bodies
        self._most_values = most_values
        self._ping = settings.ping
        self._load_wait = settings.load_wait

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._bodies.receive_json(scope, receive, self._most_values) as body:

            async def exchange(send: Send) -> None:
                await self._answer(await self._understand(body), scope, send)

            await while_connected(receive, send, exchange)

    async def _understand(self, body: Body) -> Ask:
        """Nothing of the parsed body is left when this returns, but what the Ask holds."""
        return await body.read(
            self._generate.look_for, lambda content, _: self._parse(content, body.caller)
        )

    async def _answer(self, ask: Ask, scope: Scope, send: Send) -> None:
        reply = ask.reply
        request = replace(ask.request, caller=caller_of(scope), admin=is_admin(scope))
        async with self._generate.open(request) as events:
            match reply:
                case WholeBody():
                    said = [event async for event in _said(events, self._load_wait)]
                case EventStream(frames):
                    async with _Listener(events) as listener:
                        body = _speak(listener, frames, self._ping)
                        await _stream(body, frames, scope, send, send_event_stream)
                    return
                case JsonLines(frames):
                    async with aclosing(_said(events, self._load_wait)) as said:
                        await _stream(_list(said, frames), frames, scope, send, send_lines)
                    return
                case _:
                    assert_never(reply)
        content = await self._bodies.workers.run(partial(reply.collect, said), size=_size(said))
        if reply.keep is not None:
            reply.keep(content)
        await send_json(content, scope, send)


def _size(said: Sequence[Spoken]) -> int:
    """About how many bytes an answer of these events has."""
    tokens = sum(len(event.logprobs) for event in said if isinstance(event, TextDelta))
    return _EVENT_BYTES * len(said) + _LOGPROB_BYTES * tokens


class _Quiet(Enum):
    """Nothing was said: yet, or ever again."""

    STILL = auto()
    END = auto()


class _Listener:
    """Takes events one at a time. Waiting has a time limit which does not cancel the wait itself:
    cancelling `anext` would end the answer. The task of the wait never outlives the listener."""

    def __init__(self, events: AsyncIterator[Event]) -> None:
        self._events = events
        self._wait: asyncio.Task[Event | _Quiet] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._wait is not None:
            self._wait.cancel()
            await asyncio.gather(self._wait, return_exceptions=True)

    async def next(self, seconds: float) -> "Event | _Quiet":
        """What happens within that time. Raises what the iterator raises."""
        if self._wait is None:
            self._wait = asyncio.create_task(self._following())
        done, _ = await asyncio.wait({self._wait}, timeout=seconds)
        if not done:
            return _Quiet.STILL
        wait, self._wait = self._wait, None
        return wait.result()

    async def _following(self) -> "Event | _Quiet":
        return await anext(self._events, _Quiet.END)


async def _speak(
    listener: _Listener, frames: Frames, keep_alive: float
) -> AsyncGenerator[bytes, None]:
    """Server-sent events, with comments for progress and for silence."""
    now = asyncio.get_running_loop().time
    spoke_at = now()
    progress_at = -math.inf
    while True:
        event = await listener.next(max(0.0, spoke_at + keep_alive - now()))
        match event:
            case _Quiet.STILL:
                frame = comment_frame("keep-alive")
            case _Quiet.END:
                frame = frames.end()
            case Progress(done=done, total=total) if now() - progress_at >= PROGRESS_EVERY:
                frame = comment_frame(f"prefill {done}/{total}")
                progress_at = now()
            case Progress():
                frame = b""
            case Loading(progress=progress, waits=waits):
                frame = comment_frame("waiting to load" if waits else f"loading {progress} %")
            case _:
                frame = frames.feed(event)
        if frame:
            yield frame
            spoke_at = now()
        if event is _Quiet.END:
            return


async def _said(events: AsyncIterator[Event], patience: float) -> AsyncGenerator[Spoken, None]:
    """What an answer is made of, for a client to whom nothing can be told before. Raises
    AppError(LOADING) if its model is not there within `patience` seconds: it may ask again, and
    the load goes on."""
    now = asyncio.get_running_loop().time
    began = now()
    async for event in events:
        if isinstance(event, Loading):
            if now() - began >= patience:
                message = f"the model is loading ({event.progress} %): retry, or use stream: true"
                raise AppError(Kind.LOADING, message, retry_after=_LOADING_AGAIN)
        elif not isinstance(event, Progress):
            yield event


async def _list(events: AsyncIterator[Spoken], frames: Frames) -> AsyncGenerator[bytes, None]:
    """JSON lines. There is no comment in JSON, so that nothing can be told before an answer is."""
    async for event in events:
        if frame := frames.feed(event):
            yield frame
    if frame := frames.end():
        yield frame


async def _stream(
    body: AsyncGenerator[bytes, None],
    frames: Frames,
    scope: Scope,
    send: Send,
    send_frames: Callable[[AsyncIterator[bytes], Scope, Send], Awaitable[None]],
) -> None:
    """Headers go out with the first frame, so that what fails before it still has a status."""
    # `aclosing` twice: closing an outer generator does not wait for the inner one's end.
    async with aclosing(body):
        first = await anext(body)
        async with aclosing(_to_the_end(first, body, frames)) as unbroken:
            await send_frames(unbroken, scope, send)


async def _to_the_end(
    first: bytes, rest: AsyncIterator[bytes], frames: Frames
) -> AsyncGenerator[bytes, None]:
    """A stream whose status has been sent: what fails now becomes its last frames."""
    yield first
    try:
        async for frame in rest:
            yield frame
    except AppError as error:
        yield frames.fail(error)
    except Exception:
        log.exception("a response stream failed")
        yield frames.fail(AppError(Kind.ENGINE, "internal error: see the server's log"))
