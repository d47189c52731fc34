"""Connection limits with few file descriptors: new connections wait until others close."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from app.core.server_stats import ConnectionStats
from app.core.settings import Settings
from app.http import connection_limits
from app.http.connection_limits import Acceptor, ConnectionLimiter, LogThrottle
from tests.descriptors import exhaust_descriptors
from tests.waiting import wait_until_async

PATIENCE = 20.0


class Echo(asyncio.Protocol):
    """Echoes the received data."""

    def __init__(self, open_: set["Echo"]) -> None:
        self._open = open_

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)


@contextlib.asynccontextmanager
async def run_acceptor(max_connections: int, open_: set[Echo]) -> AsyncIterator[int]:
    """Run an acceptor with at most so many connections. Yields its port."""
    server = await asyncio.get_running_loop().create_server(lambda: Echo(open_), "127.0.0.1", 0)
    [listener] = server.sockets
    port = listener.getsockname()[1]
    acceptor = Acceptor(
        listener, lambda: Echo(open_), lambda more: len(open_) + more < max_connections
    )
    try:
        yield port
    finally:
        acceptor.close()
        server.close()
        for echo in open_:
            echo.transport.abort()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def check_echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    async with asyncio.timeout(PATIENCE):
        assert await reader.readexactly(5) == b"hello"


def test_connections_beyond_the_limit_wait_until_others_close():
    async def run() -> None:
        open_: set[Echo] = set()
        async with run_acceptor(3, open_) as port:
            first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for connection in first:
                await check_echo(*connection)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"hello")
            with pytest.raises(TimeoutError):
                # a wait that is too short only misses that it was accepted
                async with asyncio.timeout(0.3):
                    await reader.readexactly(5)
            assert len(open_) == 3
            first[1][1].close()
            async with asyncio.timeout(PATIENCE):
                assert await reader.readexactly(5) == b"hello"
            for each in (writer, *(each_writer for _, each_writer in first)):
                each.close()
                await each.wait_closed()

    asyncio.run(run())


def test_accept_errors_are_retried_and_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """asyncio logged a hundred tracebacks at a time."""
    monkeypatch.setattr(connection_limits, "_ERROR_BACKOFF_SECONDS", 0.05)
    errors: list[int] = []
    record = LogThrottle.record

    def record_error(throttle: LogThrottle, now: float) -> int:
        errors.append(record(throttle, now))
        return errors[-1]

    monkeypatch.setattr(LogThrottle, "record", record_error)

    async def run() -> None:
        open_: set[Echo] = set()
        async with run_acceptor(9, open_) as port:
            client = socket.socket()
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            with exhaust_descriptors():
                await loop.sock_connect(client, ("127.0.0.1", port))
                await loop.sock_sendall(client, b"hello")
                await wait_until_async(lambda: len(errors) >= 3)
                assert not open_
            async with asyncio.timeout(PATIENCE):
                assert await loop.sock_recv(client, 5) == b"hello"
            client.close()

    asyncio.run(run())
    messages = [record.message for record in caplog.records]
    assert messages == ["cannot accept connections: [Errno 24] Too many open files"]


class Connection:
    def __init__(self, limiter: ConnectionLimiter) -> None:
        self.limiter = limiter

    def evict(self, *, notify: bool) -> None:
        assert not notify
        self.limiter.remove(self)

    def abort(self) -> None:
        raise AssertionError


def test_connections_that_waited_for_a_second_are_closed_for_new_ones(
    monkeypatch: pytest.MonkeyPatch,
):
    """Recent connections may have sent a request that the server has not read yet."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stats = ConnectionStats()
    limiter = ConnectionLimiter(Settings(), stats)
    stranger, idle, active, recent = (Connection(limiter) for _ in range(4))
    for connection in (stranger, idle, active):
        limiter.add(connection)
    for connection in (idle, active):
        limiter.table.mark_active(connection)
    limiter.table.mark_waiting(idle)
    now = 100.9
    limiter.add(recent)
    assert limiter.has_room(5)
    assert not limiter.has_room(4)
    assert len(limiter.table) == 4
    now = 101.1
    assert not limiter.has_room(4)
    assert len(limiter.table) == 2  # the active and the recent one
    assert limiter.has_room(4)
    assert stats.closed_by_reason["too_many_connections"] == 2
