"""The lifecycle of a generate request in the HTTP layer.

Knows: reading and parsing a body, opening the request, sending events, cancellation. Must not know:
any dialect, the cost of generation.

The whole lifecycle runs inside one `async with` block. Leaving the block cancels the request,
whether after an error, a complete response or a client disconnect.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, assert_never

from starlette.types import Receive, Scope, Send

from app.core.errors import AppError, ErrorKind
from app.core.events import Event, ModelLoading, OutputEvent, PrefillProgress, TextDelta
from app.core.ports import Generate, ModelCard, Models, ResolvedModel
from app.core.requests import GenerateRequest
from app.core.settings import Settings
from app.http.body import MAX_VALUES, Body, RequestBodies
from app.http.responses import (
    KEEP_ALIVE_COMMENT,
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

# Seconds between progress comments. Prefill can take minutes and report hundreds of chunks.
PROGRESS_INTERVAL = 1.0

# Estimated bytes of an event, and of a token with log-probabilities, in a response.
_EVENT_BYTES, _LOGPROB_BYTES = 32, 512

# Seconds after which a client should retry when loading the model exceeds `load_wait`.
_LOADING_RETRY_AFTER = 10


class StreamEncoder(Protocol):
    """Encodes a streamed response in a dialect. One per response, fed in order."""

    def feed(self, event: OutputEvent) -> bytes:
        """Returns zero or more complete frames."""
        ...

    def end(self) -> bytes:
        """Returns the last frames, after every choice has finished."""
        ...

    def fail(self, error: AppError) -> bytes:
        """Returns the last frames of a stream that fails."""
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
    """One JSON object, collected from the same events that a stream would send.

    collect: builds the body; called on a thread, because a response may have a million
    log-probabilities. on_complete: called on the event loop with the body before it is sent.
    """

    collect: Callable[[Sequence[OutputEvent]], JsonObject]
    on_complete: Callable[[JsonObject], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A parsed request body: the request and the format of its response."""

    request: GenerateRequest
    reply: EventStream | JsonLines | JsonBody


class GenerateEndpoint:
    """An ASGI application for one POST route that generates.

    parse: builds the request from the parsed JSON, the caller's name and the model; raises
    AppError. max_values: largest number of JSON values in a body.

    AppErrors before the first byte of the response are raised and become an HTTP status; later ones
    are written into the stream.
    """

    def __init__(
        self,
        parse: Callable[[object, str, ModelCard], ParsedRequest],
        generate: Generate,
        models: Models,
        settings: Settings,
        bodies: RequestBodies,
        *,
        max_values: int = MAX_VALUES,
    ) -> None:
        self._parse = parse
        self._generate = generate
        self._models = models
        self._bodies = bodies
        self._max_values = max_values
        self._ping = settings.ping
        self._load_wait = settings.load_wait

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._bodies.receive_json(scope, receive, self._max_values) as body:

            async def exchange(send: Send) -> None:
                model, parsed = await self._parse_body(body)
                await self._respond(model, parsed, scope, send)

            await cancel_on_disconnect(receive, send, exchange)

    async def _parse_body(self, body: Body) -> tuple[ResolvedModel, ParsedRequest]:
        """Parses the body. Frees the parsed JSON except for what the request refers to."""
        return await body.read(
            self._models.resolve,
            lambda content, model: (model, self._parse(content, body.caller, model.card)),
        )

    async def _respond(
        self, model: ResolvedModel, parsed: ParsedRequest, scope: Scope, send: Send
    ) -> None:
        reply = parsed.reply
        request = replace(parsed.request, caller=get_caller(scope), admin=is_admin(scope))
        async with self._generate.open(request, model) as events:
            match reply:
                case JsonBody():
                    said = [event async for event in _iter_content_events(events, self._load_wait)]
                case EventStream(encoder):
                    await _send_stream(
                        _encode_event_stream(events, encoder),
                        encoder,
                        lambda frames: send_event_stream(frames, scope, send, self._ping),
                        self._ping,
                    )
                    return
                case JsonLines(encoder):
                    async with aclosing(_iter_content_events(events, self._load_wait)) as content:
                        await _send_stream(
                            _encode_json_lines(content, encoder),
                            encoder,
                            lambda frames: send_json_lines(frames, scope, send),
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
    """Estimates the bytes of a response with these events."""
    tokens = sum(len(event.logprobs) for event in events if isinstance(event, TextDelta))
    return _EVENT_BYTES * len(events) + _LOGPROB_BYTES * tokens


async def _encode_event_stream(
    events: AsyncIterator[Event], encoder: StreamEncoder
) -> AsyncGenerator[bytes, None]:
    """Encodes server-sent events, with comments that report progress."""
    now = asyncio.get_running_loop().time
    progress_at = -math.inf
    async for event in events:
        match event:
            case PrefillProgress(computed_tokens=done, total_tokens=total):
                if now() - progress_at >= PROGRESS_INTERVAL:
                    yield encode_sse_comment(f"prefill {done}/{total}")
                    progress_at = now()
            case ModelLoading(progress=progress, queued=queued):
                state = "waiting to load" if queued else f"loading {progress} %"
                yield encode_sse_comment(state)
            case _:
                if frame := encoder.feed(event):
                    yield frame
    if frame := encoder.end():
        yield frame


async def _iter_content_events(
    events: AsyncIterator[Event], load_wait: float
) -> AsyncGenerator[OutputEvent, None]:
    """Yields the events of the response without progress events, for clients that cannot receive
    progress. Raises AppError(LOADING) if the model has not loaded within `load_wait` seconds; the
    client may retry, and loading continues."""
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
    """Encodes JSON lines, without progress reports: JSON has no comments."""
    async for event in events:
        if frame := encoder.feed(event):
            yield frame
    if frame := encoder.end():
        yield frame


async def _send_stream(
    body: AsyncGenerator[bytes, None],
    encoder: StreamEncoder,
    send_frames: Callable[[AsyncIterator[bytes]], Awaitable[None]],
    keep_alive: float | None = None,
) -> None:
    """Sends a stream. Headers are sent with the first frame, so that an earlier error still sets
    the status. keep_alive: seconds after which a comment is sent as the first frame; None sends
    none."""
    # `aclosing` twice: closing an outer generator does not wait until the inner one has ended.
    async with aclosing(body):
        first = asyncio.ensure_future(anext(body))
        try:
            await asyncio.wait({first}, timeout=keep_alive)
            if first.done():
                first.result()
            async with aclosing(_append_error_frames(first, body, encoder)) as frames:
                await send_frames(frames)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)


async def _append_error_frames(
    first: asyncio.Future[bytes], rest: AsyncIterator[bytes], encoder: StreamEncoder
) -> AsyncGenerator[bytes, None]:
    """Yields the frames of a stream whose status is sent; an error becomes its last frames."""
    if not first.done():
        yield KEEP_ALIVE_COMMENT
    try:
        yield await first
        async for frame in rest:
            yield frame
    except AppError as error:
        yield encoder.fail(error)
    except Exception:
        log.exception("a response stream failed")
        yield encoder.fail(AppError(ErrorKind.ENGINE, "internal error: see the server's log"))
