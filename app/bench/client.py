"""One streamed completion, with the arrival time of each chunk.

Knows: server-sent events, the stream of OpenAI's completions and chat completions, token counts.
Must not know: prompts, load, statistics.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from app.bench.http_client import ConnectionPool, HttpExchange, RequestFailure

# the part of an error message that a report shows
_MAX_MESSAGE_CHARS = 300

# the fields of a chat delta that hold output
_OUTPUT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    """kind: `http_429`, `timeout` and so on. message: the message of the first such failure."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The measurements of one request, in seconds.

    sent: seconds of time.perf_counter. arrivals: from `sent` to each chunk that holds output.
    latency: from `sent` to the last chunk that holds a choice, as in vLLM; for a failed request,
    to the failure. prompt_tokens, cached_tokens: None if the server does not report them.
    finish_reason: None if the server sent none. error: None for a completed request.
    """

    sent: float
    arrivals: tuple[float, ...] = ()
    latency: float
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: RequestError | None = None

    @property
    def ttft(self) -> float:
        """Time to first token: to the first chunk that holds output, or to the last chunk if no
        token has a text, as with end-of-sequence tokens only."""
        return self.arrivals[0] if self.arrivals else self.latency

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between chunks, each of which may hold several tokens."""
        return tuple(after - before for before, after in pairwise(self.arrivals))

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first one. None for a single token, and if no token has
        a text."""
        if self.output_tokens < 2 or not self.arrivals:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


class EventStreamParser:
    """Splits a stream of server-sent events. comments: all comments so far."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self.comments: list[bytes] = []

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yields the data of each complete event."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b":"):
                self.comments.append(line)
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


class StreamRecorder:
    """Records a stream of completion chunks. Times are those of one clock.

    arrivals: times of the chunks that hold output. comments: times of comments, with their text.
    """

    def __init__(self) -> None:
        self._parser = EventStreamParser()
        self._usage: Mapping[str, Any] = {}
        self._finish_reason: str | None = None
        self._last_choice: float | None = None
        self._done = False
        self.arrivals: list[float] = []
        self.comments: list[tuple[float, bytes]] = []

    def feed(self, now: float, received: bytes) -> None:
        """Records the bytes that arrived at the time `now`. Raises RequestFailure for an error
        event and for a stream of another format."""
        for data in self._parser.feed(received):
            if data.strip() == b"[DONE]":
                self._done = True
                continue
            try:
                self._record_chunk(now, json.loads(data))
            except (ValueError, TypeError, AttributeError) as error:
                shown = data[:_MAX_MESSAGE_CHARS].decode("utf-8", "replace")
                raise RequestFailure("invalid_response", f"not a chunk: {shown}") from error
        if self._parser.comments:
            self.comments += ((now, comment) for comment in self._parser.comments)
            self._parser.comments.clear()

    def make_record(self, sent: float, max_tokens: int | None = None) -> RequestRecord:
        """Returns the record of a stream that has ended. sent: the time of the request. max_tokens:
        of the request, for a server that sends no usage. Raises RequestFailure for an incomplete
        stream."""
        if not self._done and self._finish_reason is None:
            raise RequestFailure("disconnected", "the stream ended before the response")
        tokens = self._usage.get("completion_tokens")
        if not tokens and self._finish_reason == "length":
            tokens = max_tokens
        if self._last_choice is None or not (tokens or self.arrivals):
            raise RequestFailure("empty", "the response has no output")
        if not tokens:
            message = "the server sends no token counts, and the output ended before max_tokens"
            raise RequestFailure("no_usage", message)
        details: Mapping[str, Any] = self._usage.get("prompt_tokens_details") or {}
        return RequestRecord(
            sent=sent,
            arrivals=tuple(arrival - sent for arrival in self.arrivals),
            latency=self._last_choice - sent,
            output_tokens=int(tokens),
            prompt_tokens=self._usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            finish_reason=self._finish_reason,
        )

    def _record_chunk(self, now: float, chunk: Mapping[str, Any]) -> None:
        if chunk.get("error"):
            raise parse_error(chunk, "stream_error")
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            self._last_choice = now
            delta: Mapping[str, Any] = choice.get("delta") or {}
            if choice.get("text") or any(delta.get(name) for name in _OUTPUT_FIELDS):
                self.arrivals.append(now)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason


def parse_error(body: object, kind: str) -> RequestFailure:
    """Returns the failure that an error body describes, in the format of OpenAI or any other."""
    error: Any = None
    if isinstance(body, dict):
        error = cast("dict[str, Any]", body).get("error")
    if isinstance(error, dict):
        fields = cast("dict[str, Any]", error)
        code, message = fields.get("code"), fields.get("message")
        if isinstance(code, str):
            kind = f"{kind} {code}"
        return RequestFailure(kind, str(message)[:_MAX_MESSAGE_CHARS])
    return RequestFailure(kind, str(cast("object", error or body))[:_MAX_MESSAGE_CHARS])


def parse_error_body(status: int, body: bytes) -> RequestFailure:
    """Returns the failure of a response with this status."""
    try:
        parsed: object = json.loads(body)
    except ValueError:
        parsed = body[:_MAX_MESSAGE_CHARS].decode("utf-8", "replace")
    return parse_error(parsed, f"http_{status}")


class StreamedRequest:
    """A streamed completion. recorder: what has arrived so far. on_read: called after each piece of
    the response."""

    def __init__(
        self,
        pool: ConnectionPool,
        path: str,
        body: Mapping[str, Any],
        on_read: Callable[[], None] | None = None,
    ) -> None:
        self._max_tokens: int | None = body.get("max_tokens")
        self._on_read = on_read
        self.exchange = HttpExchange(pool, path, json.dumps(body).encode())
        self.recorder = StreamRecorder()

    async def run(self, time_limit: float | None = None) -> RequestRecord:
        """Runs the request to its end. time_limit: in seconds. A failure is part of the record, a
        cancellation is not. Both disconnect."""
        begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(time_limit):
                await self._receive()
            return self.recorder.make_record(self.exchange.sent, self._max_tokens)
        except TimeoutError:
            failure = RequestFailure("timeout", f"no complete response within {time_limit:g} s")
        except RequestFailure as error:
            failure = error
        return RequestRecord(
            sent=self.exchange.sent,
            latency=asyncio.get_running_loop().time() - begun,
            error=RequestError(kind=failure.kind, message=failure.message),
        )

    async def _receive(self) -> None:
        rejection = b""
        async with aclosing(self.exchange.stream_body()) as pieces:
            async for now, received in pieces:
                if self.exchange.status == 200:
                    self.recorder.feed(now, received)
                else:
                    rejection += received
                if self._on_read is not None:
                    self._on_read()
        if self.exchange.status != 200:
            raise parse_error_body(self.exchange.status, rejection)


def make_stream_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the fields that request a stream with token counts."""
    return {**fields, "stream": True, "stream_options": {"include_usage": True}}
