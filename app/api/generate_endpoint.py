"""The lifecycle of a generate request in the HTTP layer.

Knows: body parsing, opening of requests, event streaming, cancellation. Must not know: any dialect,
how expensive generation is.

The whole lifecycle runs inside one `async with` block. Exiting the block cancels the request,
whether after an error, a complete response or a client disconnect.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, assert_never

from starlette.types import Receive, Scope, Send

from app.api.fields import invalid_request
from app.core.errors import AppError, ErrorKind
from app.core.events import Event, ModelLoading, OutputEvent, PrefillProgress, TextDelta
from app.core.ports import Generate, ModelCard, Models, ResolvedModel
from app.core.requests import GenerateRequest
from app.core.settings import Settings
from app.http.auth import get_caller, is_admin
from app.http.body import Body, RequestBodies
from app.http.responses import JsonObject
from app.http.streaming import (
    KEEP_ALIVE_COMMENT,
    KeepAlive,
    ResponseStream,
    cancel_on_disconnect,
    encode_sse_comment,
    make_event_stream_headers,
    make_json_lines_headers,
    send_json,
)

log = logging.getLogger(__name__)

# The number of seconds between progress comments. Prefill can take minutes and report hundreds of
# chunks.
PROGRESS_INTERVAL = 1.0

# The maximum number of seconds before a stream begins. Before that, an error can still set the
# status code.
_MAX_FIRST_BYTE = 5.0

# The estimated size of an event, and of a token with log probabilities, in bytes.
_EVENT_BYTES, _LOGPROB_BYTES = 32, 512

# The Retry-After value in seconds if loading the model exceeds `load_wait`.
_LOADING_RETRY_AFTER = 10

Result = TypeVar("Result")

Progress = PrefillProgress | ModelLoading

# the media type of JSON lines in Ollama's API
NDJSON = "application/x-ndjson"


class StreamEnds(Protocol):
    """The keep-alive and error frames of a stream."""

    @property
    def keep_alive(self) -> bytes:
        """The next keep-alive frame, which is sent while the stream is idle; b"" for none."""
        ...

    def fail(self, error: AppError) -> bytes:
        """Returns the last frames of a stream that fails."""
        ...


class StreamEncoder(StreamEnds, Protocol):
    """Encodes a streamed response in a dialect. There is one encoder per response. Events must be
    fed in order."""

    def progress(self, event: Progress) -> bytes:
        """Returns zero or more complete frames that report progress. Called for each
        `ModelLoading`, and for a `PrefillProgress` at most every PROGRESS_INTERVAL."""
        ...

    def feed(self, event: OutputEvent) -> bytes:
        """Returns zero or more complete frames."""
        ...

    def end(self) -> bytes:
        """Returns the last frames, after every choice has finished."""
        ...


@dataclass(frozen=True, slots=True)
class EventStream:
    """A response format with server-sent events. all_progress: whether each chunk of a prefill is
    reported, instead of one per PROGRESS_INTERVAL."""

    encoder: StreamEncoder
    all_progress: bool = False


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A response format with one JSON object per line."""

    encoder: StreamEncoder
    media_type: str = "application/jsonl"


class CommentedStream:
    """Progress and keep-alive frames sent as SSE comments, which clients skip."""

    keep_alive = KEEP_ALIVE_COMMENT

    def progress(self, event: Progress) -> bytes:
        match event:
            case PrefillProgress(computed_tokens=done, total_tokens=total):
                return encode_sse_comment(f"prefill {done}/{total}")
            case ModelLoading(progress=progress, queued=queued):
                state = "waiting to load" if queued else f"loading {progress} %"
                return encode_sse_comment(state)


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A response format with one JSON object, built from the same events that a stream would send.

    collect: builds the body. It is called on a worker thread, because a response may contain a
    million log probabilities. on_complete: called on the event loop with the body before it is
    sent.
    """

    collect: Callable[[Sequence[OutputEvent]], JsonObject]
    on_complete: Callable[[JsonObject], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A parsed request body: the request and the format of its response."""

    request: GenerateRequest
    reply: EventStream | JsonLines | JsonBody


# A parsed body whose request depends on the tokens of its prompt.
UnfinishedRequest = Callable[[ResolvedModel], Awaitable[ParsedRequest]]


async def resolve_requested(models: Models, name: str | None) -> ResolvedModel:
    """Returns the model that a request names. A server with one model needs no name, as in
    llama.cpp. Raises AppError(INVALID) if there are several, and the errors of `Models.resolve`."""
    if name is None and len(models.list_model_states()) > 1:
        raise invalid_request(
            "model", "model is missing: this server has several models, see GET /v1/models"
        )
    return await models.resolve(name)


async def read_request(
    body: Body, models: Models, parse: Callable[[bytearray, ModelCard], Result]
) -> tuple[ResolvedModel, Result]:
    """Returns the model that a body names, and the parsed body. Raises the errors of
    `resolve_requested` and of `parse`."""
    return await body.read(
        partial(resolve_requested, models), lambda data, model: parse(data, model.card)
    )


class GenerateEndpoint:
    """An ASGI application for one POST route that generates output.

    parse: builds the request from the bytes of the body, the caller's name and the model, or
    returns a function that builds it. It raises AppError for an invalid request.

    An AppError raised before the first byte of the response determines the HTTP status code. A
    later AppError is written to the stream.
    """

    def __init__(
        self,
        parse: Callable[[bytearray, str, ModelCard], ParsedRequest | UnfinishedRequest],
        generate: Generate,
        models: Models,
        settings: Settings,
        bodies: RequestBodies,
    ) -> None:
        self._parse = parse
        self._models = models
        self._bodies = bodies
        self._responder = GenerateResponder(generate, settings, bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._bodies.receive_json(scope, receive) as body:

            async def exchange(send: Send) -> None:
                model, parsed = await read_request(
                    body, self._models, lambda data, card: self._parse(data, body.caller, card)
                )
                if not isinstance(parsed, ParsedRequest):
                    parsed = await parsed(model)
                await self._responder.respond(model, parsed, scope, send)

            await cancel_on_disconnect(receive, send, exchange)


class GenerateResponder:
    """Opens parsed requests and sends their responses."""

    def __init__(self, generate: Generate, settings: Settings, bodies: RequestBodies) -> None:
        self._generate = generate
        self._bodies = bodies
        self._ping = settings.ping
        self._first_byte = min(settings.ping, _MAX_FIRST_BYTE)
        self._load_wait = settings.load_wait

    async def respond(
        self, model: ResolvedModel, parsed: ParsedRequest, scope: Scope, send: Send
    ) -> None:
        """Runs a request and sends its events. Raises AppError before the first byte."""
        reply = parsed.reply
        request = replace(parsed.request, caller=get_caller(scope), admin=is_admin(scope))
        async with self._generate.open(request, model) as events:
            match reply:
                case JsonBody():
                    batches = _iter_content_events(events, self._load_wait)
                    collected = [event async for batch in batches for event in batch]
                case EventStream(encoder, all_progress):
                    response = ResponseStream(
                        send, make_event_stream_headers(), self._make_keep_alive(encoder)
                    )
                    interval = -math.inf if all_progress else PROGRESS_INTERVAL
                    frames = _encode_events(events, encoder, interval)
                    await _send_frames(frames, encoder, response, self._first_byte)
                    return
                case JsonLines(encoder, media_type):
                    # without a keep-alive frame, the client cannot receive progress either
                    has_progress = bool(encoder.keep_alive)
                    keep_alive = self._make_keep_alive(encoder) if has_progress else None
                    headers = make_json_lines_headers(media_type)
                    response = ResponseStream(send, headers, keep_alive)
                    first_byte = self._first_byte if has_progress else None
                    async with AsyncExitStack() as stack:
                        if not has_progress:
                            events = await stack.enter_async_context(
                                aclosing(_iter_content_events(events, self._load_wait))
                            )
                        frames = _encode_events(events, encoder, PROGRESS_INTERVAL)
                        await _send_frames(frames, encoder, response, first_byte)
                    return
                case _:
                    assert_never(reply)
        content = await self._bodies.workers.run(
            partial(reply.collect, collected), size=_estimate_size(collected)
        )
        if reply.on_complete is not None:
            reply.on_complete(content)
        await send_json(content, scope, send)

    async def respond_lines(
        self, lines: AsyncGenerator[bytes, None], encoder: StreamEnds, send: Send
    ) -> None:
        """Sends JSON lines that are not model output. Raises AppError before the first byte."""
        keep_alive = self._make_keep_alive(encoder)
        response = ResponseStream(send, make_json_lines_headers(NDJSON), keep_alive)
        await _send_frames(lines, encoder, response, self._first_byte)

    def _make_keep_alive(self, encoder: StreamEnds) -> KeepAlive:
        return KeepAlive(self._ping, lambda: encoder.keep_alive)


def _estimate_size(events: Sequence[OutputEvent]) -> int:
    """Estimates the size in bytes of a response with these events."""
    tokens = sum(len(event.logprobs) for event in events if isinstance(event, TextDelta))
    return _EVENT_BYTES * len(events) + _LOGPROB_BYTES * tokens


async def _encode_events(
    events: AsyncIterator[Sequence[Event]], encoder: StreamEncoder, progress_interval: float
) -> AsyncGenerator[bytes, None]:
    """Encodes the events of a response, with progress frames at least `progress_interval` seconds
    apart. The frames of a batch are sent with one write."""
    now = asyncio.get_running_loop().time
    prefill_at = -math.inf
    async for batch in events:
        frames: list[bytes] = []
        for event in batch:
            if not isinstance(event, PrefillProgress | ModelLoading):
                frames.append(encoder.feed(event))
            elif isinstance(event, ModelLoading):
                frames.append(encoder.progress(event))
            elif now() - prefill_at >= progress_interval:
                prefill_at = now()
                frames.append(encoder.progress(event))
        if written := b"".join(frames):
            yield written
    if frame := encoder.end():
        yield frame


async def _iter_content_events(
    events: AsyncIterator[Sequence[Event]], load_wait: float
) -> AsyncGenerator[Sequence[OutputEvent], None]:
    """Yields the events of the response without progress events, for clients that cannot receive
    progress. Raises AppError(LOADING) if the model is not loaded within `load_wait` seconds.
    Loading continues, so the client may retry."""
    now = asyncio.get_running_loop().time
    began = now()
    async for batch in events:
        content: list[OutputEvent] = []
        for event in batch:
            if not isinstance(event, PrefillProgress | ModelLoading):
                content.append(event)
            elif isinstance(event, ModelLoading) and now() - began >= load_wait:
                message = f"the model is loading ({event.progress} %): retry, or use stream: true"
                raise AppError(ErrorKind.LOADING, message, retry_after=_LOADING_RETRY_AFTER)
        if content:
            yield content


async def _send_frames(
    body: AsyncGenerator[bytes, None],
    encoder: StreamEnds,
    response: ResponseStream,
    first_byte: float | None,
) -> None:
    """Sends the frames of a response. It begins with the first frame, so that an earlier error can
    still set the status code. A later error is encoded as the last frames. first_byte: the number
    of seconds after which a keep-alive frame is sent as the first frame; None disables this."""
    async with aclosing(body):
        first = asyncio.ensure_future(anext(body))
        try:
            await asyncio.wait({first}, timeout=first_byte)
            if first.done():
                first.result()
            async with response:
                if not first.done():
                    await response.write(encoder.keep_alive)
                pending: Awaitable[bytes] = first
                failed = False
                while not failed:
                    try:
                        frames = await pending
                    except StopAsyncIteration:
                        break
                    except AppError as error:
                        frames, failed = encoder.fail(error), True
                    except Exception:
                        log.exception("a response stream failed")
                        error = AppError(ErrorKind.ENGINE, "internal error: see the server's log")
                        frames, failed = encoder.fail(error), True
                    await response.write(frames)
                    pending = anext(body)
                await response.end()
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
