"""Connections where there are few files: the next ones wait until others leave."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from app.core.server_stats import ConnectionStats
from app.core.settings import Settings
from app.http.connection_limits import Acceptor, ConnectionLimiter
from tests.descriptors import exhaust_descriptors

PATIENCE = 20.0


class Echo(asyncio.Protocol):
    """Says back what it hears."""

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
async def accepting(most: int, open_: set[Echo]) -> AsyncIterator[int]:
    """Yields the port of what accepts so many at a time."""
    server = await asyncio.get_running_loop().create_server(lambda: Echo(open_), "127.0.0.1", 0)
    [listener] = server.sockets
    port = listener.getsockname()[1]
    acceptor = Acceptor(listener, lambda: Echo(open_), lambda more: len(open_) + more < most)
    try:
        yield port
    finally:
        acceptor.close()
        server.close()
        for echo in open_:
            echo.transport.abort()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    async with asyncio.timeout(PATIENCE):
        assert await reader.readexactly(5) == b"hello"


def test_those_beyond_the_bound_wait_until_others_leave():
    async def run() -> None:
        open_: set[Echo] = set()
        async with accepting(3, open_) as port:
            first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for line in first:
                await echoed(*line)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"hello")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await reader.readexactly(5)
            assert len(open_) == 3
            first[1][1].close()
            async with asyncio.timeout(PATIENCE):
                assert await reader.readexactly(5) == b"hello"
            for closing in (writer, *(one for _, one in first)):
                closing.close()
                await closing.wait_closed()

    asyncio.run(run())


def test_where_the_system_refuses_it_is_tried_again_and_told_once(
    caplog: pytest.LogCaptureFixture,
):
    """asyncio wrote a hundred tracebacks at a time."""

    async def run() -> None:
        open_: set[Echo] = set()
        async with accepting(9, open_) as port:
            caller = socket.socket()
            caller.setblocking(False)
            loop = asyncio.get_running_loop()
            with exhaust_descriptors():
                await loop.sock_connect(caller, ("127.0.0.1", port))
                await loop.sock_sendall(caller, b"hello")
                await asyncio.sleep(1.2)
                assert not open_
            async with asyncio.timeout(PATIENCE):
                assert await loop.sock_recv(caller, 5) == b"hello"
            caller.close()

    asyncio.run(run())
    told = [record.message for record in caplog.records]
    assert told == ["cannot accept connections: [Errno 24] Too many open files"]


class Connection:
    def __init__(self, limiter: ConnectionLimiter) -> None:
        self.limiter = limiter

    def evict(self, *, notify: bool) -> None:
        assert not notify
        self.limiter.remove(self)

    def abort(self) -> None:
        raise AssertionError


def test_where_there_is_no_room_those_leave_that_have_waited_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
):
    """Those that came just now have perhaps asked, and nobody has read it yet."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    traffic = ConnectionStats()
    limiter = ConnectionLimiter(Settings(), traffic)
    stranger, idle, answered, late = (Connection(limiter) for _ in range(4))
    for connection in (stranger, idle, answered):
        limiter.add(connection)
    for connection in (idle, answered):
        limiter.table.mark_active(connection)
    limiter.table.mark_waiting(idle)
    now = 100.9
    limiter.add(late)
    assert limiter.has_room(5)
    assert not limiter.has_room(4)
    assert len(limiter.table) == 4
    now = 101.1
    assert not limiter.has_room(4)
    assert len(limiter.table) == 2  # the one that is answered, and the one that came late
    assert limiter.has_room(4)
    assert traffic.closed_by_reason["too_many_connections"] == 2
