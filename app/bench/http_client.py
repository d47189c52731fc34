"""A minimal HTTP client for measurements: one connection per request.

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


class HttpExchange:
    """One request and its response, on its own connection.

    sent: the time of the request on the open connection, in seconds of time.perf_counter.
    connect_seconds: the duration of the TCP and TLS handshakes before it. status: 0 until the
    response headers have arrived.
    """

    def __init__(
        self, address: ServerAddress, path: str, body: bytes | None = None, method: str = "POST"
    ) -> None:
        self._address = address
        self._connection = h11.Connection(h11.CLIENT)
        self._request = self._encode(method, path, body)
        self.sent = 0.0
        self.connect_seconds = 0.0
        self.status = 0

    async def stream_body(self) -> AsyncGenerator[tuple[float, bytes]]:
        """Sends the request and yields the response body in pieces with their arrival times. The
        connection is closed when the generator is closed. Raises RequestFailure."""
        begun = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(
                self._address.host, self._address.port, ssl=self._address.ssl_context
            )
        except OSError as error:
            raise RequestFailure("connection_failed", str(error)) from error
        try:
            self.sent = time.perf_counter()
            self.connect_seconds = self.sent - begun
            writer.write(self._request)
            async for item in self._read_body(reader):
                yield item
        except h11.RemoteProtocolError as error:
            kind = "invalid_response" if self.status == 0 else "disconnected"
            raise RequestFailure(kind, str(error)) from error
        except OSError as error:
            raise RequestFailure("disconnected", str(error) or type(error).__name__) from error
        finally:
            writer.transport.abort()

    async def read_body(self) -> bytes:
        return b"".join([data async for _, data in self.stream_body()])

    async def _read_body(self, reader: asyncio.StreamReader) -> AsyncGenerator[tuple[float, bytes]]:
        while True:
            received = await reader.read(_READ_SIZE)
            now = time.perf_counter()
            if not received and self.status == 0:
                raise RequestFailure("disconnected", "the server closed the connection")
            self._connection.receive_data(received)
            while (event := self._connection.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    self.status = event.status_code
                elif isinstance(event, h11.Data):
                    yield now, bytes(event.data)
                elif not isinstance(event, h11.InformationalResponse):  # the end of the response
                    return

    def _encode(self, method: str, path: str, body: bytes | None) -> bytes:
        headers = [
            ("Host", self._address.authority),
            ("User-Agent", "mlxrunner-bench"),
            ("Connection", "close"),
        ]
        if self._address.api_key is not None:
            headers.append(("Authorization", f"Bearer {self._address.api_key}"))
        if body is not None:
            headers.append(("Content-Type", "application/json"))
            headers.append(("Content-Length", str(len(body))))
        head = h11.Request(method=method, target=self._address.prefix + path, headers=headers)
        connection = self._connection
        parts = [connection.send(head)]
        if body is not None:
            parts.append(connection.send(h11.Data(data=body)))
        parts.append(connection.send(h11.EndOfMessage()))
        return b"".join(part for part in parts if part)
