"""A minimal HTTP client for measurements.

Knows: HTTP/1.1 (through h11), TLS, the time at which bytes arrive. Must not know: OpenAI's API.

The client does little work per chunk, because it often shares the machine with the server. It
ignores proxies and does not follow redirects.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

import h11

from app.core.errors import AppError, ErrorKind

_READ_SIZE = 1 << 16
_PORTS = {"http": 80, "https": 443}


class RequestFailure(Exception):
    """A request that failed. kind: a stable name by which failures are counted."""

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
