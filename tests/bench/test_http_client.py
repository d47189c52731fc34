"""Addresses of servers, TLS, and connections."""

import asyncio
import ssl

import pytest
import trustme

from app.bench.client import StreamedRequest, make_stream_body
from app.bench.http_client import (
    ConnectionPool,
    HttpExchange,
    RequestFailure,
    ServerAddress,
)
from app.core.errors import AppError


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1", 8080, ""),
        ("http://127.0.0.1:8080/", "127.0.0.1", 8080, ""),
        ("http://127.0.0.1:8080/v1", "127.0.0.1", 8080, ""),
        ("http://[::1]:9/v1/", "::1", 9, ""),
        ("http://example", "example", 80, ""),
        ("https://example/openai/v1", "example", 443, "/openai"),
    ],
)
def test_a_url_with_or_without_v1_is_an_address(
    url: str, host: str, port: int, prefix: str
) -> None:
    address = ServerAddress.parse(url)
    assert (address.host, address.port, address.prefix) == (host, port, prefix)
    assert (address.ssl_context is not None) is url.startswith("https")


def test_the_host_header_has_brackets_around_an_ipv6_address() -> None:
    assert ServerAddress.parse("http://[::1]:9").authority == "[::1]:9"


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8080", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://a?b"],
)
def test_another_url_is_rejected(url: str) -> None:
    with pytest.raises(AppError, match="is not the URL of a server"):
        ServerAddress.parse(url)


@pytest.mark.parametrize(("insecure", "kind"), [(False, "connection_failed"), (True, "http_500")])
def test_a_certificate_is_verified_unless_insecure(insecure: bool, kind: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def send() -> str:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        address = ServerAddress.parse(f"https://localhost:{port}", insecure=insecure)
        async with server:
            measured = await StreamedRequest(
                ConnectionPool(address), "/v1/x", make_stream_body({})
            ).run(30)
        assert measured.error is not None
        return measured.error.kind

    assert asyncio.run(send()) == kind


class KeepAliveServer:
    """A server that keeps connections open. connections: their number. close_after: responses on a
    connection, after which it is closed without notice."""

    def __init__(self, close_after: int) -> None:
        self._close_after = close_after
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            for _ in range(self._close_after):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            # one more request, which is not answered
            await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.transport.abort()


async def fetch(script: KeepAliveServer, count: int, max_idle: int) -> list[bytes]:
    server = await asyncio.start_server(script.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = ConnectionPool(ServerAddress.parse(f"http://127.0.0.1:{port}"), max_idle)
    try:
        return [await HttpExchange(pool, "/x", method="GET").read_body() for _ in range(count)]
    finally:
        pool.close()
        server.close()


@pytest.mark.parametrize(("max_idle", "connections"), [(1, 1), (0, 5)])
def test_connections_are_reused(max_idle: int, connections: int) -> None:
    script = KeepAliveServer(close_after=9)
    assert asyncio.run(fetch(script, 5, max_idle)) == [b"ok"] * 5
    assert script.connections == connections


def test_a_connection_that_the_server_closes_while_idle_is_replaced() -> None:
    script = KeepAliveServer(close_after=2)
    assert asyncio.run(fetch(script, 5, 1)) == [b"ok"] * 5
    assert script.connections == 3


def test_a_new_connection_that_the_server_closes_is_a_failure() -> None:
    script = KeepAliveServer(close_after=0)
    with pytest.raises(RequestFailure) as raised:
        asyncio.run(fetch(script, 1, 1))
    assert raised.value.kind == "disconnected"
    assert script.connections == 1
