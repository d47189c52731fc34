"""The HTTP connection, tested byte by byte against a real server."""

import asyncio
import contextlib
import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from app.core.settings import Settings
from app.core.usage import ConnectionStats
from app.http.connection import MAX_HEAD_BYTES, MAX_HEADER_FIELDS, Connection
from app.http.connection_limits import (
    ConnectionLimiter,
    ConnectionTable,
    LogThrottle,
    raise_fd_limit,
)
from app.http.uvicorn_server import make_protocol_factory
from tests.api.asgi import Reply, serve_app
from tests.fakes import FOREVER, FakeGenerate, build_fake_app, finish, text
from tests.http.raw_client import (
    CHAT,
    CHAT_BODY,
    GET,
    PATIENCE,
    RawClient,
    head,
    post,
    run_server,
)
from tests.rows import rows
from tests.waiting import wait_until

STREAM = {**CHAT_BODY, "stream": True}


Connect = Callable[[], RawClient]


@pytest.fixture(scope="module")
def connect() -> Iterator[Connect]:
    """Connects to a server with default settings."""
    with run_server() as connect:
        yield connect


@pytest.fixture
def stats() -> ConnectionStats:
    return ConnectionStats()


def is_our_error(reply: Reply, status: int, code: str) -> bool:
    """Whether it is one of our errors, after which the server closes the connection."""
    assert reply.status == status, reply
    assert reply.error["code"] == code
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"].startswith("req_")
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    assert "bytearray" not in reply.error["message"]
    return reply.headers["connection"] == "close"


def test_a_valid_request_is_answered_and_the_connection_is_kept(connect: Connect):
    client = connect()
    for _ in range(3):
        assert client.send(post(CHAT_BODY)).read_reply().status == 200
        assert client.send(GET).read_reply().status == 200


def test_a_large_body_is_received_completely():
    body = {**CHAT_BODY, "messages": [{"role": "user", "content": "x" * 3_000_000}]}
    generate = FakeGenerate()
    with run_server(generate) as connect:
        assert connect().send(post(body)).read_reply().status == 200
    prompt: Any = generate.opened[0].prompt
    assert len(prompt.messages[0].content) == 3_000_000


def test_pipelined_requests_are_answered_in_order(connect: Connect):
    client = connect().send(GET + post(CHAT_BODY) + GET)
    kinds = [client.read_reply().json["object"] for _ in range(3)]
    assert kinds == ["list", "chat.completion", "list"]


# Time


def test_a_slow_head_times_out():
    with run_server(header_timeout=1) as connect:
        client = connect().send_slowly(GET, 0.05)
        assert is_our_error(client.read_reply(), 408, "request_timeout")
        assert client.is_closed()


def test_a_silent_connection_is_closed_without_a_response():
    with run_server(header_timeout=0.2) as connect:
        assert connect().is_closed()


@pytest.mark.timing
def test_each_head_on_a_connection_has_its_own_timeout():
    with run_server(header_timeout=0.4) as connect:
        client = connect()
        for _ in range(3):
            assert client.send_slowly(GET[:3], 0.05).send(GET[3:]).read_reply().status == 200
        assert is_our_error(client.send_slowly(GET, 0.05).read_reply(), 408, "request_timeout")


def test_a_slow_body_times_out():
    with run_server(body_timeout=0.3) as connect:
        request = post(CHAT_BODY)
        body_start = request.index(b"\r\n\r\n") + 4
        client = connect().send(request[:body_start]).send_slowly(request[body_start:], 0.05)
        assert is_our_error(client.read_reply(), 408, "request_timeout")
        assert client.is_closed()


def test_a_response_has_no_timeout():
    with run_server(
        FakeGenerate([text("so"), FOREVER]), header_timeout=1, body_timeout=1
    ) as connect:
        client = connect().send(post(STREAM))
        client.read_until(lambda read: b"so" in read)
        # a wait that is too short only misses a timeout
        assert not client.is_closed(within=1.2)


def test_a_client_that_never_reads_is_disconnected():
    """Its answer was generated to the end and stayed in memory without a time limit."""
    generate = FakeGenerate([text("x" * 1_000_000)] * 60 + [finish()])
    with run_server(generate, body_timeout=0.3) as connect:
        client = connect().send(post(STREAM))
        wait_until(lambda: generate.num_closed == 1)
        assert not client.read_until(lambda read: b"[DONE]" in read).endswith(b"0\r\n\r\n")


def test_a_slow_reader_gets_the_complete_answer():
    generate = FakeGenerate([text("x" * 1_000_000)] * 12 + [finish()])
    with run_server(generate, body_timeout=5) as connect:
        client = connect()
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.send(post(STREAM))
        assert (
            client.read_until(lambda read: read.endswith(b"0\r\n\r\n")).count(b"x" * 1_000_000)
            == 12
        )


@pytest.mark.timing
def test_a_steady_reader_gets_the_complete_answer_at_any_rate(stats: ConnectionStats):
    """asyncio notices reads only when a third of the system's buffer is free, 1.3 MB in this test:
    the client seemed to read nothing for three times the timeout."""
    generate = FakeGenerate([text("x" * 12_000_000), finish()])
    with run_server(generate, stats, body_timeout=1) as connect:
        client = connect().send(post(CHAT_BODY))
        read = client.read_steadily(400_000, 4.0)
        assert 1_000_000 < read < 2_000_000
        assert client.read_reply().body.count(b"x") >= 12_000_000
    assert stats.closed_by_reason["unread_answer"] == 0


def test_a_client_that_stops_reading_is_disconnected(stats: ConnectionStats):
    generate = FakeGenerate([text("x" * 12_000_000), finish()])
    with run_server(generate, stats, body_timeout=1) as connect:
        client = connect().send(post(CHAT_BODY))
        client.read_steadily(400_000, 1.5)
        # its last progress was in one interval, the next interval has none
        wait_until(lambda: stats.closed_by_reason["unread_answer"] == 1)


def test_an_unread_finished_answer_times_out():
    """uvicorn's keep-alive closes such a connection, and closing waits for the unsent data."""
    generate, stats = FakeGenerate([text("x" * 20_000_000), finish()]), ConnectionStats()
    with run_server(generate, stats, body_timeout=0.3) as connect:
        client = connect().send(post(CHAT_BODY))
        wait_until(lambda: stats.closed_by_reason["unread_answer"] == 1)
        assert len(client.read_until(lambda _: False)) < 20_000_000


# Invalid HTTP


@rows(
    "data",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n",
        head("POST", CHAT, Content_Length=-1),
        head("POST", CHAT, Content_Length="1, 2"),
        head("POST", CHAT, Transfer_Encoding="chunked") + b"zz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS, to a port without it
    ],
    ids=lambda data: repr(data[:18] + data[-22:]),
)
def test_invalid_http_gets_our_error_format(data: bytes, connect: Connect):
    client = connect().send(data)
    assert is_our_error(client.read_reply(), 400, "invalid_http")
    assert client.is_closed()
    assert connect().send(GET).read_reply().status == 200


@pytest.mark.parametrize(("version", "status"), [("2.0", 505), ("0.9", 505), ("1.2", 200)])
def test_other_http_versions_are_rejected(version: str, status: int, connect: Connect):
    """HTTP/1.2 is read as HTTP/1.1 (RFC 9110, 2.5)."""
    request = GET.replace(b"HTTP/1.1", f"HTTP/{version}".encode())
    assert connect().send(request).read_reply().status == status


def test_a_body_with_two_lengths_is_rejected(connect: Connect):
    """A proxy may have used the other length, and take the following bytes for another request."""
    smuggling = head("POST", CHAT, Content_Length=5, Transfer_Encoding="chunked")
    client = connect().send(smuggling + b"0\r\n\r\n" + GET)
    assert is_our_error(client.read_reply(), 400, "invalid_http")
    assert client.is_closed()


@pytest.mark.parametrize("method", ["CONNECT", "BREW", "A" * 5000])
def test_an_unknown_method_is_not_allowed(method: str, connect: Connect):
    client = connect().send(head(method, "/v1/models"))
    reply = client.read_reply()
    assert reply.status == 405
    assert len(reply.body) < 300
    assert client.send(GET).read_reply().status == 200


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_upgrade_requests_are_answered_in_http_1(protocol: str, connect: Connect):
    client = connect().send(head("GET", "/v1/models", Connection="Upgrade", Upgrade=protocol) + GET)
    assert [client.read_reply().status for _ in range(2)] == [200, 200]


def test_expect_continue_is_answered(connect: Connect):
    client = connect()
    request = post(CHAT_BODY, Expect="100-continue")
    body_start = request.index(b"\r\n\r\n") + 4
    client.send(request[:body_start])
    assert client.read_interim_status() == 100
    assert client.send(request[body_start:]).read_reply().status == 200


def test_expect_continue_is_rejected_if_the_body_is_too_large(connect: Connect):
    client = connect().send(head("POST", CHAT, Content_Length=1 << 30, Expect="100-continue"))
    assert client.read_reply().status == 413


def test_a_disconnect_between_response_chunks_logs_no_traceback(capsys: Any):
    """Half-closing fails then: unhandled, it logged 80 lines for each disconnect."""
    client_closed = threading.Event()

    async def respond_late(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            length = [(b"content-length", b"4")]
            await send({"type": "http.response.start", "status": 404, "headers": length})
            await asyncio.to_thread(client_closed.wait, PATIENCE)
            await send({"type": "http.response.body", "body": b"none"})

    with serve_app(respond_late, http=make_protocol_factory(Settings()), lifespan="off") as url:
        client = RawClient(int(url.rpartition(":")[2]))
        # more than the server reads ahead, so that it does not notice the disconnect
        request = head("POST", "/none", Content_Length=1 << 20, Connection="close")
        client.send(request + b" " * (1 << 18)).socket.recv(1000)
        client.socket.close()
        client_closed.set()
    assert "Traceback" not in capsys.readouterr().err  # uvicorn logs to stderr in these tests


def test_an_unknown_transfer_encoding_is_not_implemented(connect: Connect):
    client = connect().send(head("POST", CHAT, Transfer_Encoding="gzip"))
    assert is_our_error(client.read_reply(), 501, "invalid_http")


def test_an_invalid_chunk_after_the_response_closes_the_connection(capsys: Any):
    """uvicorn raised in a callback of the event loop, with a traceback each time."""
    with run_server(max_body=10) as connect:
        client = connect().send(
            head("POST", CHAT, Transfer_Encoding="chunked") + b"b\r\n" + b"x" * 11
        )
        assert client.read_reply().status == 413
        assert client.send(b"\r\nzz\r\n").is_closed()
    assert "Traceback" not in capsys.readouterr().err


# Size

FIELDS = {f"X-{n}": n for n in range(MAX_HEADER_FIELDS - 1)}
LONG_FIELD = {"X-Long": "y" * MAX_HEAD_BYTES}


@pytest.mark.parametrize("fields", [FIELDS, LONG_FIELD], ids=["many", "long"])
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_a_too_large_head_is_rejected(fields: dict[str, Any], method: str, connect: Connect):
    client = connect().send(head(method, "/v1/models", **fields))
    reply = client.read_reply()
    if method == "HEAD":  # which has no response body, if the method was parsed
        assert reply.status == 431
    else:
        assert is_our_error(reply, 431, "request_header_fields_too_large")
    assert client.is_closed()


def test_a_head_of_the_maximum_size_is_accepted(connect: Connect):
    fields = {name: n for name, n in FIELDS.items() if n < MAX_HEADER_FIELDS - 3}
    assert connect().send(head("GET", "/v1/models", **fields)).read_reply().status == 200
    assert connect().send(head("GET", "/v1/models", X="y" * 60_000)).read_reply().status == 200


def test_a_body_of_tiny_chunks_is_rejected(connect: Connect):
    """Each costs a hundred times its content; 256 KiB of them blocked all clients for 0.2 s."""
    request = head("POST", CHAT, Transfer_Encoding="chunked")
    assert is_our_error(
        connect().send(request + b"1\r\n \r\n" * 5000).read_reply(), 400, "invalid_http"
    )
    body = json.dumps(CHAT_BODY).encode()
    fields = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert connect().send(request + fields).read_reply().status == 200


def test_the_connection_is_kept_after_a_slightly_too_large_body():
    with run_server(max_body=1000) as connect:
        client = connect()
        for _ in range(2):
            too_much = head("POST", CHAT, Content_Length=5_000_000) + b" " * 5_000_000
            assert client.send(too_much).read_reply().status == 413
            assert client.send(post(CHAT_BODY)).read_reply().status == 200


def test_a_far_too_large_body_is_rejected_and_not_read(connect: Connect):
    """1 GB: the response is immediate, and the body is read for a moment only."""
    client = connect().send(head("POST", CHAT, Content_Length=1 << 30))
    assert client.read_reply().error["code"] == "request_too_large"
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 1 << 30:
            sent += client.socket.send(b" " * 65536)
    # the discarded bytes, and those in the sockets' buffers
    assert sent < 128 << 20


@pytest.mark.parametrize("coding", ["gzip", "br", "gzip, gzip", "zstd"])
def test_a_compressed_body_is_rejected(coding: str, connect: Connect):
    reply = connect().send(post(CHAT_BODY, Content_Encoding=coding)).read_reply()
    assert reply.status == 415
    assert coding in reply.error["message"]
    assert connect().send(post(CHAT_BODY, Content_Encoding="identity")).read_reply().status == 200


# Number of connections


def test_at_the_limit_the_longest_waiting_connection_is_closed():
    with run_server(max_connections=3) as connect:
        silent, slow, third = connect(), connect(), connect()
        slow.send(GET[:10])
        assert third.send(GET).read_reply().status == 200
        assert connect().send(GET).read_reply().status == 200
        assert silent.is_closed()
        assert connect().send(GET).read_reply().status == 200
        reply = slow.read_reply()
        assert is_our_error(reply, 503, "too_many_connections")
        assert reply.headers["retry-after"] == "1"


def test_new_connection_limits_apply_at_once():
    settings = Settings(max_connections=2, max_body=1)
    limiter = ConnectionLimiter(settings, ConnectionStats())
    limiter.apply(replace(settings, max_connections=1, header_timeout=2.0, body_timeout=3.0))
    assert (limiter.table.max_connections, limiter.header_timeout) == (1, 2.0)
    limiter.apply(replace(settings, max_body=1 << 30, body_timeout=4.0))
    assert (limiter.table.max_connections, limiter.body_timeout) == (2, 4.0)
    assert limiter.max_discard_bytes == 2 << 30


def test_new_connections_are_closed_before_idle_ones(stats: ConnectionStats):
    """A keep-alive client lost its next request to many connections that sent nothing."""
    with run_server(None, stats, max_connections=3) as connect:
        idle = connect()
        assert idle.send(GET).read_reply().status == 200
        for _ in range(5):
            connect()
        wait_until(lambda: stats.accepted_connections == 6)
        assert idle.send(GET).read_reply().status == 200


def test_a_connection_with_a_response_is_never_closed_for_others():
    generate = FakeGenerate([text("so"), FOREVER])
    with run_server(generate, max_connections=2) as connect:
        streaming = [connect().send(post(STREAM)) for _ in range(2)]
        for client in streaming:
            client.read_until(lambda read: b"so" in read)
        rejected = connect()
        assert is_our_error(rejected.read_reply(), 503, "too_many_connections")
        assert rejected.is_closed()
        # they would have been closed instead of the rejected one
        assert not any(client.is_closed(within=0.1) for client in streaming)
        streaming.pop().socket.close()
        wait_until(lambda: generate.num_closed == 1)
        assert connect().send(GET).read_reply().status == 200


def test_a_connection_that_waits_for_a_body_is_closed_for_others():
    with run_server(max_connections=1) as connect:
        slow = connect().send(head("POST", CHAT, Content_Length=100, Expect="100-continue"))
        assert slow.read_interim_status() == 100  # the head was read
        assert connect().send(GET).read_reply().status == 200
        assert is_our_error(slow.read_reply(), 503, "too_many_connections")


Verbs = st.sampled_from(["add", "add", "active", "waiting", "remove"])
Moves = st.lists(st.tuples(Verbs, st.integers(0, 5)), max_size=60)


@given(moves=Moves, max_connections=st.integers(1, 4))
def test_the_connection_table_is_bounded(moves: list[tuple[str, int]], max_connections: int):
    table = ConnectionTable[int](max_connections)
    connections: dict[int, str] = {}  # in the order of waiting
    for move, connection in moves:
        if move == "add" and connection not in connections:
            full = len(connections) >= max_connections
            waiting = [one for one, state in connections.items() if state == "stranger"]
            waiting += [one for one, state in connections.items() if state == "idle"]
            evicted = table.add(connection)
            assert evicted == ([*waiting, connection][0] if full else None)
            connections[connection] = "stranger"
            if evicted is not None:
                table.remove(evicted)
                del connections[evicted]
        elif connection in connections and move == "active":
            table.mark_active(connection)
            connections[connection] = "answered"
        elif connection in connections and move == "waiting":
            table.mark_waiting(connection)
            if connections[connection] == "answered":
                del connections[connection]
                connections[connection] = "idle"
        elif connection in connections and move == "remove":
            table.remove(connection)
            del connections[connection]
        assert len(connections) <= max_connections


def test_the_file_limit_is_raised_for_the_connections():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
        assert raise_fd_limit(40) is None
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        assert raise_fd_limit(400) is None
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 656
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_uvicorn_uses_no_other_parser():
    """If httptools is installed, uvicorn would use it by default, without our limits."""
    protocol_factory: Any = make_protocol_factory(Settings())
    config = uvicorn.Config(build_fake_app(FakeGenerate(), Settings()), http=protocol_factory)
    config.load()
    assert config.http_protocol_class is protocol_factory

    async def accept() -> object:
        return protocol_factory(config, ServerState(), {})

    connection = asyncio.run(accept())
    assert isinstance(connection, Connection)
    assert isinstance(connection, asyncio.BufferedProtocol)


# Closing

BODY_BYTES = 9 << 20


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Encoding": "gzip"}, 415),
        ({"Host": "rebound.example.net"}, 403),
    ],
)
def test_a_rejection_reaches_clients_that_send_everything_before_reading(
    fields: dict[str, str], status: int
):
    """Closing at once reset the connection, which a proxy reported as a broken server."""
    with run_server() as connect:
        for _ in range(5):
            client = connect()
            request = head("POST", CHAT, Content_Length=BODY_BYTES, Connection="close", **fields)
            client.send(request + b" " * BODY_BYTES)
            reply = client.read_reply()
            assert (reply.status, reply.headers["connection"]) == (status, "close")
            # and a proper close
            assert client.socket.recv(1) == b""


@contextlib.contextmanager
def control_timeouts(
    monkeypatch: pytest.MonkeyPatch, request: bytes, phase: str
) -> Iterator[tuple[RawClient, Connection, Callable[[], None]]]:
    """Yields a client that has sent a request, its connection, which is in the given phase, and a
    function that makes this phase time out. It does not time out by itself."""
    found: list[Connection] = []
    monkeypatch.setattr("app.http.connection._DISCARD_SECONDS", 100 * PATIENCE)
    monkeypatch.setattr("app.http.connection._LINGER_SECONDS", 100 * PATIENCE)
    made = Connection.connection_made

    def connection_made(self: Connection, transport: asyncio.Transport) -> None:
        found.append(self)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    with run_server() as connect:
        client = connect().send(request)
        wait_until(lambda: bool(found) and found[0]._phase_timer.phase == phase)
        [connection] = found

        def expire() -> None:
            done = threading.Event()
            connection.loop.call_soon_threadsafe(connection._on_phase_timeout)
            connection.loop.call_soon_threadsafe(done.set)
            assert done.wait(PATIENCE)

        yield client, connection, expire


@pytest.mark.parametrize(
    ("fields", "phase"),
    [
        ({}, "rest"),
        ({"Connection": "close"}, "leaving"),
        ({"Transfer_Encoding": "unknown"}, "leaving"),
    ],
    ids=["kept", "closed", "rejected"],
)
def test_an_early_response_reaches_a_client_that_sends_slowly(
    fields: dict[str, str], phase: str, monkeypatch: pytest.MonkeyPatch
):
    """A client that sent 9 MB at 1 MB/s with a wrong key got a broken pipe after five seconds."""
    request = head("POST", "/none", Content_Length=BODY_BYTES, **fields)
    with control_timeouts(monkeypatch, request, phase) as (client, connection, expire):
        for sent in range(1 << 20, BODY_BYTES, 1 << 20):
            client.send(b" " * (1 << 20))
            wait_until(lambda sent=sent: connection._discarded_bytes >= sent)
            expire()
            assert connection._phase_timer.phase == phase
        assert client.read_reply().status in (404, 501)
        expire()
        assert connection.transport.is_closing(), "it has sent nothing since the last timeout"


def test_a_client_that_sends_slowly_is_disconnected_at_the_timeout_of_the_body(
    monkeypatch: pytest.MonkeyPatch,
):
    request = head("POST", "/none", Content_Length=BODY_BYTES)
    with control_timeouts(monkeypatch, request, "rest") as (client, connection, expire):
        client.send(b" " * (1 << 20))
        wait_until(lambda: connection._discarded_bytes == 1 << 20)
        connection._discard_deadline = 0.0
        expire()
        assert connection.transport.is_closing()


def test_an_unread_body_within_the_limit_is_discarded_completely():
    """For any limit of the body size."""
    with run_server(max_body=40 << 20) as connect:
        request = head("POST", "/none", Content_Length=40 << 20, Connection="close")
        assert connect().send(request + b" " * (40 << 20)).read_reply().status == 404


def test_a_rejected_client_that_keeps_sending_is_disconnected(stats: ConnectionStats):
    with run_server(None, stats) as connect:
        client = connect().send(head("POST", CHAT, Content_Length=1 << 40, Connection="close"))
        assert client.read_reply().status == 413
        assert client.socket.recv(1) == b""  # the server sends nothing more
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 30:
                sent += client.socket.send(b" " * 65536)
        assert sent < 128 << 20
        wait_until(lambda: stats.open_connections == 0)


def test_pipelined_requests_after_connection_close_do_not_reset_the_response(connect: Connect):
    last = head("GET", "/v1/models", Connection="close")
    for _ in range(5):
        client = connect().send(last + GET * 50)
        assert client.read_reply().status == 200
        assert client.socket.recv(1) == b""


def test_the_number_of_sockets_is_bounded_while_rejected_ones_linger(stats: ConnectionStats):
    """Each rejected client gets the reason, and time to read it."""
    seen: list[int] = []
    clients: list[RawClient] = []  # a client that is collected closes its socket
    request = head("POST", CHAT, Content_Length=1 << 20, Connection="close")
    with run_server(None, stats, max_connections=5, max_body=10) as connect:
        for _ in range(150):
            clients.append(connect().send(request))
            assert clients[-1].read_reply().status == 413
            seen.append(stats.open_connections)
        wait_until(lambda: stats.accepted_connections == 150)
        seen.append(stats.open_connections)
    assert 5 < max(seen) <= 5 + 64


# Metrics and log


def test_closed_connections_are_counted_by_reason(stats: ConnectionStats):
    generate = FakeGenerate([text("x" * 20_000_000), finish()])
    with run_server(None, stats, header_timeout=0.2) as connect:
        assert connect().is_closed()
        connect().send(GET[:5]).read_until(lambda _: False)
    with run_server(generate, stats, body_timeout=0.3) as connect:
        assert connect().send(post(CHAT_BODY)[:-3]).read_reply().status == 408
        assert connect().send(b"hello\r\n\r\n").read_reply().status == 400
        assert connect().send(head("GET", "/", **LONG_FIELD)).read_reply().status == 431
        connect().send(post(CHAT_BODY))
        wait_until(lambda: stats.closed_by_reason["unread_answer"] == 1)
        wait_until(lambda: stats.open_connections == 0)
    assert stats.accepted_connections == 6
    assert stats.closed_by_reason == {
        "head_timeout": 2,
        "body_timeout": 1,
        "unread_answer": 1,
        "too_many_connections": 0,
        "head_too_large": 1,
        "invalid_http": 1,
    }


def test_responses_are_counted_by_route_and_status_class(stats: ConnectionStats):
    with run_server(None, stats, max_body=100) as connect:
        client = connect()
        for request in (
            GET,
            GET,
            head("GET", "/v1/models/none"),
            head("GET", "/made-up-by-client"),
        ):
            client.send(request).read_reply()
        client.send(head("BREW", "/v1/models")).read_reply()
        client.send(head("GET", "/v1/models", Host="rebound.example.net")).read_reply()
        client.send(post({"x": "y" * 200})).read_reply()
        expected = {
            ("GET", "/v1/models", "2xx"): 2,
            ("GET", "/v1/models/{id:path}", "4xx"): 1,
            ("none", "none", "4xx"): 2,
            ("none", "/v1/models", "4xx"): 1,
            ("POST", CHAT, "4xx"): 1,
        }
        wait_until(lambda: stats.responses == expected)


def test_warnings_of_invalid_requests_are_throttled(connect: Connect, caplog: Any):
    """Each logged a warning, so that a client could fill the disk."""
    with run_server() as connect:
        for _ in range(30):
            assert connect().send(b"GET /\x1b[2J HTTP/1.1\r\n\r\n").read_reply().status == 400
    warnings = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "rejected a request from 127.0.0.1: " in warnings[0].getMessage()


def test_the_throttle_counts_the_suppressed_messages():
    throttle = LogThrottle()
    assert throttle.record(0) == 1
    assert [throttle.record(now) for now in (1, 2, 59)] == [0, 0, 0]
    assert throttle.record(60) == 4
    assert throttle.record(61) == 0
