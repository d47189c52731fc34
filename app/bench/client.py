"""One streamed completion, with the arrival time of each chunk, and the HTTP client that sends it.

Knows: HTTP/1.1 (through h11), TLS, server-sent events, the stream of OpenAI's completions and chat
completions, token counts. Must not know: prompts, load, statistics.

The client does little work per chunk, because it often shares the machine with the server. It
ignores proxies and does not follow redirects.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self, cast
from urllib.parse import urlsplit

import h11

from app.core.errors import AppError, ErrorKind

_READ_SIZE = 1 << 16
_PORTS = {"http": 80, "https": 443}

# the part of an error message that a report shows
_MAX_MESSAGE_CHARS = 300

# the fields of a chat delta that hold output
_OUTPUT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class RequestFailure(Exception):
    """A request that failed. kind: a stable name for counting failures."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """url: without the path of an endpoint. prefix: the part of the path that precedes `/v1`.
    ssl_context: None for plain HTTP. api_key: None if the server requires none."""

    url: str
    host: str
    port: int
    prefix: str = ""
    ssl_context: ssl.SSLContext | None = None
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str | None = None, *, insecure: bool = False) -> Self:
        """Parses a base URL, with or without `/v1` at its end, as OpenAI's SDKs have it. insecure:
        accept any certificate. Raises AppError(INVALID)."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in _PORTS or not parts.hostname or port == -1 or parts.query:
            message = f"{url!r} is not the URL of a server: use a form like http://127.0.0.1:8080"
            raise AppError(ErrorKind.INVALID, message)
        context = None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            if insecure:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            url=f"{parts.scheme}://{parts.netloc}{prefix}",
            host=parts.hostname,
            port=port or _PORTS[parts.scheme],
            prefix=prefix,
            ssl_context=context,
            api_key=api_key,
        )

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class HttpConnection:
    """An open connection. is_new: whether no request has been sent on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.protocol = h11.Connection(h11.CLIENT)
        self.is_new = True

    @property
    def is_reusable(self) -> bool:
        """Whether the last response is complete and the server keeps the connection open."""
        is_done = self.protocol.our_state is self.protocol.their_state is h11.DONE
        return is_done and not self.reader.at_eof() and not self.writer.is_closing()

    def close(self) -> None:
        self.writer.transport.abort()


class ConnectionPool:
    """The idle connections to a server. Each request uses one that is idle, or opens one. max_idle:
    the number of connections to keep; a pool that keeps any must be closed."""

    def __init__(self, address: ServerAddress, max_idle: int = 0) -> None:
        self.address = address
        self._max_idle = max_idle
        self._idle: list[HttpConnection] = []

    async def acquire(self) -> HttpConnection:
        """Raises RequestFailure."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                connection.protocol.start_next_cycle()
                connection.is_new = False
                return connection
            connection.close()
        try:
            reader, writer = await asyncio.open_connection(
                self.address.host, self.address.port, ssl=self.address.ssl_context
            )
        except OSError as error:
            raise RequestFailure("connection_failed", str(error)) from error
        return HttpConnection(reader, writer)

    def release(self, connection: HttpConnection) -> None:
        """Keeps the connection if it is reusable, and closes it otherwise."""
        if connection.is_reusable and len(self._idle) < self._max_idle:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class HttpExchange:
    """One request and its response.

    sent: the time of the request on the open connection, in seconds of time.perf_counter. status: 0
    until the response headers have arrived.
    """

    def __init__(
        self, pool: ConnectionPool, path: str, body: bytes | None = None, method: str = "POST"
    ) -> None:
        self._pool = pool
        self._body = body
        self._head = self._make_head(method, path)
        self.sent = 0.0
        self.status = 0

    async def stream_body(self) -> AsyncGenerator[tuple[float, bytes]]:
        """Sends the request and yields the response body in pieces with their arrival times. The
        connection is closed if the generator is closed before the end. Raises RequestFailure."""
        while True:
            connection = await self._pool.acquire()
            try:
                async for item in self._exchange(connection):
                    yield item
                return
            except RequestFailure:
                # the server may close an idle connection at the moment of the request
                if connection.is_new or self.status != 0:
                    raise
            finally:
                self._pool.release(connection)

    async def read_body(self) -> bytes:
        return b"".join([data async for _, data in self.stream_body()])

    async def _exchange(self, connection: HttpConnection) -> AsyncGenerator[tuple[float, bytes]]:
        request = self._encode(connection.protocol)
        try:
            self.sent = time.perf_counter()
            connection.writer.write(request)
            async for item in self._read_body(connection):
                yield item
        except h11.RemoteProtocolError as error:
            kind = "invalid_response" if self.status == 0 else "disconnected"
            raise RequestFailure(kind, str(error)) from error
        except OSError as error:
            raise RequestFailure("disconnected", str(error) or type(error).__name__) from error

    async def _read_body(self, connection: HttpConnection) -> AsyncGenerator[tuple[float, bytes]]:
        while True:
            received = await connection.reader.read(_READ_SIZE)
            now = time.perf_counter()
            if not received and self.status == 0:
                raise RequestFailure("disconnected", "the server closed the connection")
            connection.protocol.receive_data(received)
            while (event := connection.protocol.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    self.status = event.status_code
                elif isinstance(event, h11.Data):
                    yield now, bytes(event.data)
                elif not isinstance(event, h11.InformationalResponse):  # the end of the response
                    return

    def _make_head(self, method: str, path: str) -> h11.Request:
        address = self._pool.address
        headers = [("Host", address.authority), ("User-Agent", "mlxrunner-bench")]
        if address.api_key is not None:
            headers.append(("Authorization", f"Bearer {address.api_key}"))
        if self._body is not None:
            headers.append(("Content-Type", "application/json"))
            headers.append(("Content-Length", str(len(self._body))))
        return h11.Request(method=method, target=address.prefix + path, headers=headers)

    def _encode(self, protocol: h11.Connection) -> bytes:
        events: list[h11.Event] = [self._head]
        if self._body is not None:
            events.append(h11.Data(data=self._body))
        return b"".join(protocol.send(event) or b"" for event in [*events, h11.EndOfMessage()])


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
        token has any text, as with end-of-sequence tokens only."""
        return self.arrivals[0] if self.arrivals else self.latency

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between chunks, each of which may hold several tokens."""
        return tuple(after - before for before, after in pairwise(self.arrivals))

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first one. None for a single token, and if no token has
        any text."""
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
    """Records a stream of completion chunks. All times come from one clock.

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
        event and for a stream in a different format."""
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
    """A streamed completion. recorder: the data received so far. on_read: called after each piece
    of the response."""

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
