"""What a client may do to a connection, said byte by byte to a real server."""

import asyncio
import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from app.core.server_stats import ConnectionStats
from app.core.settings import Settings
from app.http.connection import Connection
from app.http.connection_limits import ConnectionTable, LogThrottle, raise_fd_limit
from app.http.h11_connection import MAX_HEAD_BYTES, MAX_HEADER_FIELDS
from app.http.uvicorn_server import make_protocol_factory
from tests.api.asgi import Reply, serving
from tests.fakes import FOREVER, FakeGenerate, build_fake_app, finish, text
from tests.http.lines import ASK, CHAT, GET, PATIENCE, Line, door, eventually, head, post

STREAM = {**ASK, "stream": True}


Connect = Callable[[], Line]


@pytest.fixture(scope="module")
def connect() -> Iterator[Connect]:
    """To a server without special settings."""
    with door(header_timeout=0.5) as opened:
        yield opened


@pytest.fixture
def traffic() -> ConnectionStats:
    return ConnectionStats()


def is_ours(reply: Reply, status: int, code: str) -> bool:
    """Whether it is told as all our mistakes are, by somebody who then leaves."""
    assert reply.status == status, reply
    assert reply.error["code"] == code
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"].startswith("req_")
    return reply.headers["connection"] == "close"


def test_a_good_request_is_answered_and_the_connection_kept(connect: Connect):
    line = connect()
    for _ in range(3):
        assert line.say(post(ASK)).reply().status == 200
        assert line.say(GET).reply().status == 200


def test_a_large_body_arrives_whole():
    ask = {**ASK, "messages": [{"role": "user", "content": "x" * 3_000_000}]}
    generate = FakeGenerate()
    with door(generate) as connect:
        assert connect().say(post(ask)).reply().status == 200
    prompt: Any = generate.opened[0].prompt
    assert len(prompt.messages[0].content) == 3_000_000


def test_requests_that_were_sent_at_once_are_answered_in_their_order(connect: Connect):
    line = connect().say(GET + post(ASK) + GET)
    kinds = [line.reply().json["object"] for _ in range(3)]
    assert kinds == ["list", "chat.completion", "list"]


# Time


def test_a_head_that_trickles_is_given_up():
    with door(header_timeout=0.3) as connect:
        line = connect().dribble(GET, 0.05)
        assert is_ours(line.reply(), 408, "request_timeout")
        assert line.closed()


def test_whoever_says_nothing_is_left_without_a_word():
    with door(header_timeout=0.2) as connect:
        assert connect().closed()


def test_each_head_on_a_connection_has_its_own_time():
    with door(header_timeout=0.4) as connect:
        line = connect()
        for _ in range(3):
            assert line.dribble(GET[:3], 0.05).say(GET[3:]).reply().status == 200
        assert is_ours(line.dribble(GET, 0.05).reply(), 408, "request_timeout")


def test_a_body_that_trickles_is_given_up():
    with door(body_timeout=0.3) as connect:
        asked = post(ASK)
        at = asked.index(b"\r\n\r\n") + 4
        line = connect().say(asked[:at]).dribble(asked[at:], 0.05)
        assert is_ours(line.reply(), 408, "request_timeout")
        assert line.closed()


def test_an_answer_has_all_the_time_that_it_takes():
    with door(FakeGenerate([text("so"), FOREVER]), header_timeout=0.1, body_timeout=0.1) as connect:
        line = connect().say(post(STREAM))
        line.until(lambda read: b"so" in read)
        assert not line.closed(within=0.5)


def test_a_client_that_reads_nothing_is_cut_off():
    """Its answer was made to the end and lay in memory, for as long as it liked."""
    generate = FakeGenerate([text("x" * 1_000_000)] * 60 + [finish()])
    with door(generate, body_timeout=0.3) as connect:
        line = connect().say(post(STREAM))
        assert eventually(lambda: generate.num_closed == 1)
        assert not line.until(lambda read: b"[DONE]" in read).endswith(b"0\r\n\r\n")


def test_a_client_that_reads_slowly_gets_everything():
    generate = FakeGenerate([text("x" * 1_000_000)] * 12 + [finish()])
    with door(generate, body_timeout=0.5) as connect:
        line = connect()
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        line.say(post(STREAM))
        assert line.until(lambda read: read.endswith(b"0\r\n\r\n")).count(b"x" * 1_000_000) == 12


def test_a_client_that_reads_steadily_gets_everything_however_slow_it_is(traffic: ConnectionStats):
    """asyncio hears of what was read when a third of the system's buffer is free, here 1.3 MB:
    nothing seemed to be read for three times as long as was allowed."""
    generate = FakeGenerate([text("x" * 12_000_000), finish()])
    with door(generate, traffic, body_timeout=1) as connect:
        line = connect().say(post(ASK))
        read = line.read_steadily(400_000, 4.0)
        assert 1_000_000 < read < 2_000_000
        assert line.reply().body.count(b"x") >= 12_000_000
    assert traffic.closed_by_reason["unread_answer"] == 0


def test_a_client_that_reads_no_more_is_cut_off(traffic: ConnectionStats):
    generate = FakeGenerate([text("x" * 12_000_000), finish()])
    with door(generate, traffic, body_timeout=1) as connect:
        line = connect().say(post(ASK))
        line.read_steadily(400_000, 1.5)
        stopped = time.monotonic()
        assert eventually(lambda: traffic.closed_by_reason["unread_answer"] == 1)
        # its last progress was in one interval, the next one has none
        assert time.monotonic() - stopped < 5


def test_a_finished_answer_that_nobody_reads_is_cut_off_too():
    """uvicorn's keep-alive closes such a connection, and closing waits for what is unsent."""
    generate, traffic = FakeGenerate([text("x" * 20_000_000), finish()]), ConnectionStats()
    with door(generate, traffic, body_timeout=0.3) as connect:
        line = connect().say(post(ASK))
        assert eventually(lambda: traffic.closed_by_reason["unread_answer"] == 1)
        assert len(line.until(lambda _: False)) < 20_000_000


# What is no HTTP


@pytest.mark.parametrize(
    "said",
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
    ids=lambda said: repr(said[:18] + said[-22:]),
)
def test_what_is_no_http_is_told_in_our_words(said: bytes, connect: Connect):
    line = connect().say(said)
    reply = line.reply()
    if reply.status != 408:
        assert is_ours(reply, 400, "invalid_http")
    assert line.closed()
    assert connect().say(GET).reply().status == 200


@pytest.mark.parametrize(("version", "status"), [("2.0", 505), ("0.9", 505), ("1.2", 200)])
def test_another_http_is_not_spoken(version: str, status: int, connect: Connect):
    """HTTP/1.2 is to be read as what we know of it (RFC 9110, 2.5)."""
    asked = GET.replace(b"HTTP/1.1", f"HTTP/{version}".encode())
    assert connect().say(asked).reply().status == status


def test_a_body_whose_length_is_said_in_two_ways_is_refused(connect: Connect):
    """A proxy may have believed the other one, and taken what follows for another's request."""
    smuggling = head("POST", CHAT, Content_Length=5, Transfer_Encoding="chunked")
    line = connect().say(smuggling + b"0\r\n\r\n" + GET)
    assert is_ours(line.reply(), 400, "invalid_http")
    assert line.closed()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models?x=y"])
def test_a_target_with_its_host_is_read_like_any_other(path: str, connect: Connect):
    """As servers must (RFC 9112, 3.2.2), and the Host header counts for nothing then."""
    line = connect()
    for scheme in ("http", "https", "HTTP"):
        assert (
            line.say(head("GET", f"{scheme}://127.0.0.1:80{path}", Host="x")).reply().status == 200
        )
    refused = line.say(head("GET", f"http://rebound.example.net{path}")).reply()
    assert (refused.status, refused.error["code"]) == (403, "host_not_allowed")
    assert line.say(head("GET", "http://localhost")).reply().status == 404


@pytest.mark.parametrize("method", ["CONNECT", "BREW", "A" * 5000])
def test_a_strange_method_is_an_unknown_one(method: str, connect: Connect):
    line = connect().say(head(method, "/v1/models"))
    reply = line.reply()
    assert reply.status == 405
    assert len(reply.body) < 300
    assert line.say(GET).reply().status == 200


@pytest.mark.parametrize("wanted", ["websocket", "h2c"])
def test_who_asks_for_another_protocol_is_answered_in_this_one(wanted: str, connect: Connect):
    line = connect().say(head("GET", "/v1/models", Connection="Upgrade", Upgrade=wanted) + GET)
    assert [line.reply().status for _ in range(2)] == [200, 200]


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(connect: Connect):
    line = connect()
    asked = post(ASK, Expect="100-continue")
    at = asked.index(b"\r\n\r\n") + 4
    line.say(asked[:at])
    assert line.interim() == 100
    assert line.say(asked[at:]).reply().status == 200


def test_a_client_that_waits_to_be_asked_is_refused_without(connect: Connect):
    line = connect().say(head("POST", CHAT, Content_Length=1 << 30, Expect="100-continue"))
    assert line.reply().status == 413


def test_a_client_that_goes_between_an_answers_pieces_leaves_no_traceback(capsys: Any):
    """To close in one direction fails then: 80 lines in the log for each, if one says nothing."""
    gone = threading.Event()

    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            length = [(b"content-length", b"4")]
            await send({"type": "http.response.start", "status": 404, "headers": length})
            await asyncio.to_thread(gone.wait, PATIENCE)
            await send({"type": "http.response.body", "body": b"none"})

    with serving(refusing, http=make_protocol_factory(Settings()), lifespan="off") as url:
        line = Line(int(url.rpartition(":")[2]))
        # so much that nobody reads on, and so nobody sees the client leave
        asked = head("POST", "/none", Content_Length=1 << 20, Connection="close")
        line.say(asked + b" " * (1 << 18)).socket.recv(1000)
        line.socket.close()
        gone.set()
    assert "Traceback" not in capsys.readouterr().err  # where uvicorn writes in these tests


def test_an_unknown_transfer_encoding_is_not_implemented(connect: Connect):
    line = connect().say(head("POST", CHAT, Transfer_Encoding="gzip"))
    assert is_ours(line.reply(), 501, "invalid_http")


def test_a_body_that_breaks_behind_its_answer_ends_the_connection(capsys: Any):
    """uvicorn raised out of the event loop's callback, with a traceback for each."""
    with door(max_body=10) as connect:
        line = connect().say(head("POST", CHAT, Transfer_Encoding="chunked") + b"b\r\n" + b"x" * 11)
        assert line.reply().status == 413
        assert line.say(b"\r\nzz\r\n").closed()
    assert "Traceback" not in capsys.readouterr().err


# Size

FIELDS = {f"X-{n}": n for n in range(MAX_HEADER_FIELDS - 1)}
LONG = {"X-Long": "y" * MAX_HEAD_BYTES}


@pytest.mark.parametrize("fields", [FIELDS, LONG], ids=["many", "long"])
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_a_head_that_is_too_large_is_refused(fields: dict[str, Any], method: str, connect: Connect):
    line = connect().say(head(method, "/v1/models", **fields))
    reply = line.reply()
    if method == "HEAD":  # which may have no body, if so much of it was understood
        assert reply.status == 431
    else:
        assert is_ours(reply, 431, "request_header_fields_too_large")
    assert line.closed()


def test_a_head_of_just_the_size_is_read(connect: Connect):
    some = {name: n for name, n in FIELDS.items() if n < MAX_HEADER_FIELDS - 3}
    assert connect().say(head("GET", "/v1/models", **some)).reply().status == 200
    assert connect().say(head("GET", "/v1/models", X="y" * 60_000)).reply().status == 200


def test_a_body_of_tiny_chunks_is_refused(connect: Connect):
    """Each costs a hundred times what it carries; 256 KiB of them held everybody up for 0.2 s."""
    asked = head("POST", CHAT, Transfer_Encoding="chunked")
    assert is_ours(connect().say(asked + b"1\r\n \r\n" * 5000).reply(), 400, "invalid_http")
    body = json.dumps(ASK).encode()
    some = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert connect().say(asked + some).reply().status == 200


def test_the_connection_lives_on_after_a_body_that_was_a_little_too_large():
    with door(max_body=1000) as connect:
        line = connect()
        for _ in range(2):
            too_much = head("POST", CHAT, Content_Length=5_000_000) + b" " * 5_000_000
            assert line.say(too_much).reply().status == 413
            assert line.say(post(ASK)).reply().status == 200


def test_a_body_that_is_far_too_large_is_refused_and_not_read(connect: Connect):
    """1 GB: the answer comes at once, and what follows is read for a moment only."""
    line = connect().say(head("POST", CHAT, Content_Length=1 << 30))
    assert line.reply().error["code"] == "request_too_large"
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 1 << 30:
            sent += line.socket.send(b" " * 65536)
    # what was thrown away, and what lay in the sockets' buffers
    assert sent < 64 << 20


@pytest.mark.parametrize("coding", ["gzip", "br", "gzip, gzip", "zstd"])
def test_a_compressed_body_is_not_unpacked(coding: str, connect: Connect):
    reply = connect().say(post(ASK, Content_Encoding=coding)).reply()
    assert reply.status == 415
    assert coding in reply.error["message"]
    assert connect().say(post(ASK, Content_Encoding="identity")).reply().status == 200


# Number


def test_at_the_bound_the_one_that_waited_longest_gives_way():
    with door(max_connections=3) as connect:
        silent, slow, third = connect(), connect(), connect()
        slow.say(GET[:10])
        assert third.say(GET).reply().status == 200
        assert connect().say(GET).reply().status == 200
        assert silent.closed()
        assert connect().say(GET).reply().status == 200
        told = slow.reply()
        assert is_ours(told, 503, "too_many_connections")
        assert told.headers["retry-after"] == "1"


def test_strangers_give_way_before_those_who_have_asked_before():
    """A client that was about to ask again lost its request to a crowd which asked nothing."""
    with door(max_connections=3) as connect:
        known = connect()
        assert known.say(GET).reply().status == 200
        for _ in range(5):
            connect()
        time.sleep(0.2)
        assert known.say(GET).reply().status == 200


def test_an_answer_never_gives_way():
    generate = FakeGenerate([text("so"), FOREVER])
    with door(generate, max_connections=2) as connect:
        answered = [connect().say(post(STREAM)) for _ in range(2)]
        for line in answered:
            line.until(lambda read: b"so" in read)
        refused = connect()
        assert is_ours(refused.reply(), 503, "too_many_connections")
        assert refused.closed()
        assert not any(line.closed(within=0.1) for line in answered)
        answered.pop().socket.close()
        assert eventually(lambda: generate.num_closed == 1)
        assert connect().say(GET).reply().status == 200


def test_a_body_that_does_not_come_gives_way_too():
    with door(max_connections=1) as connect:
        slow = connect().say(head("POST", CHAT, Content_Length=100, Expect="100-continue"))
        assert slow.interim() == 100  # its head was read
        assert connect().say(GET).reply().status == 200
        assert is_ours(slow.reply(), 503, "too_many_connections")


Verbs = st.sampled_from(["add", "add", "active", "waiting", "remove"])
Moves = st.lists(st.tuples(Verbs, st.integers(0, 5)), max_size=60)


@given(moves=Moves, most=st.integers(1, 4))
def test_there_are_never_more_than_may_be(moves: list[tuple[str, int]], most: int):
    table = ConnectionTable[int](most)
    here: dict[int, str] = {}  # in order of their waiting
    for move, who in moves:
        if move == "add" and who not in here:
            full = len(here) >= most
            waits = [one for one, state in here.items() if state == "stranger"]
            waits += [one for one, state in here.items() if state == "idle"]
            leaver = table.add(who)
            assert leaver == ([*waits, who][0] if full else None)
            here[who] = "stranger"
            if leaver is not None:
                table.remove(leaver)
                del here[leaver]
        elif who in here and move == "active":
            table.mark_active(who)
            here[who] = "answered"
        elif who in here and move == "waiting":
            table.mark_waiting(who)
            if here[who] == "answered":
                del here[who]
                here[who] = "idle"
        elif who in here and move == "remove":
            table.remove(who)
            del here[who]
        assert len(here) <= most


def test_a_process_is_allowed_the_files_that_its_connections_take():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
        assert raise_fd_limit(40) is None
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        assert raise_fd_limit(400) is None
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 656
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_uvicorn_parses_with_nothing_else():
    """With httptools installed, uvicorn would take that by itself, and no bound would hold."""
    made: Any = make_protocol_factory(Settings())
    config = uvicorn.Config(build_fake_app(FakeGenerate(), Settings()), http=made)
    config.load()
    assert config.http_protocol_class is made

    async def accepted() -> object:
        return made(config, ServerState(), {})

    connection = asyncio.run(accepted())
    assert isinstance(connection, Connection)
    assert isinstance(connection, asyncio.BufferedProtocol)


# Leaving

SENT = 9 << 20


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Encoding": "gzip"}, 415),
        ({"Host": "rebound.example.net"}, 403),
    ],
)
def test_a_refusal_reaches_whoever_sends_all_before_they_read(fields: dict[str, str], status: int):
    """Closing at once reset the connection, and what a proxy made of that was a broken server."""
    with door() as connect:
        for _ in range(5):
            line = connect()
            asked = head("POST", CHAT, Content_Length=SENT, Connection="close", **fields)
            line.say(asked + b" " * SENT)
            reply = line.reply()
            assert (reply.status, reply.headers["connection"]) == (status, "close")
            # and an end in good order
            assert line.socket.recv(1) == b""


def test_what_may_be_sent_is_thrown_away_to_its_end():
    """However large bodies may be here."""
    with door(max_body=40 << 20) as connect:
        asked = head("POST", "/none", Content_Length=40 << 20, Connection="close")
        assert connect().say(asked + b" " * (40 << 20)).reply().status == 404


def test_a_refused_client_that_goes_on_for_ever_is_cut_off(traffic: ConnectionStats):
    with door(None, traffic) as connect:
        line = connect().say(head("POST", CHAT, Content_Length=1 << 40, Connection="close"))
        assert line.reply().status == 413
        assert line.socket.recv(1) == b""  # nothing more is said
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 30:
                sent += line.socket.send(b" " * 65536)
        assert sent < 64 << 20
        assert eventually(lambda: traffic.open_connections == 0)


def test_requests_behind_the_last_one_do_not_take_its_answer_back(connect: Connect):
    last = head("GET", "/v1/models", Connection="close")
    for _ in range(5):
        line = connect().say(last + GET * 50)
        assert line.reply().status == 200
        assert line.socket.recv(1) == b""


def test_there_are_never_more_sockets_than_were_allowed_and_a_few(traffic: ConnectionStats):
    """Each of these was told why it is refused, and was given time to read it."""
    seen: list[int] = []
    with door(None, traffic, max_connections=5, max_body=10) as connect:
        for _ in range(150):
            asked = head("POST", CHAT, Content_Length=1 << 20, Connection="close")
            with contextlib.suppress(ConnectionError):  # one that had to go at once
                connect().say(asked)
            seen.append(traffic.open_connections)
        assert eventually(lambda: traffic.accepted_connections == 150)
        seen.append(traffic.open_connections)
    assert 5 < max(seen) <= 5 + 64


# What is counted and told


def test_why_a_connection_was_ended_is_counted(traffic: ConnectionStats):
    generate = FakeGenerate([text("x" * 20_000_000), finish()])
    limits = {"header_timeout": 0.2, "body_timeout": 0.3}
    with door(generate, traffic, **limits) as connect:
        assert connect().closed()
        assert connect().say(GET[:5]).reply().status == 408
        assert connect().say(post(ASK)[:-3]).reply().status == 408
        assert connect().say(b"hello\r\n\r\n").reply().status == 400
        assert connect().say(head("GET", "/", **LONG)).reply().status == 431
        connect().say(post(ASK))
        assert eventually(lambda: traffic.closed_by_reason["unread_answer"] == 1)
        assert eventually(lambda: traffic.open_connections == 0)
    assert traffic.accepted_connections == 6
    assert traffic.closed_by_reason == {
        "handshake_timeout": 0,
        "head_timeout": 2,
        "body_timeout": 1,
        "unread_answer": 1,
        "too_many_connections": 0,
        "head_too_large": 1,
        "invalid_http": 1,
    }


def test_answers_are_counted_by_their_route_and_class(traffic: ConnectionStats):
    with door(None, traffic, max_body=100) as connect:
        line = connect()
        for asked in (GET, GET, head("GET", "/v1/models/none"), head("GET", "/made-up-by-client")):
            line.say(asked).reply()
        line.say(head("BREW", "/v1/models")).reply()
        line.say(head("GET", "/v1/models", Host="rebound.example.net")).reply()
        line.say(post({"x": "y" * 200})).reply()
        wanted = {
            ("GET", "/v1/models", "2xx"): 2,
            ("GET", "/v1/models/{id:path}", "4xx"): 1,
            ("none", "none", "4xx"): 2,
            ("none", "/v1/models", "4xx"): 1,
            ("POST", CHAT, "4xx"): 1,
        }
        assert eventually(lambda: traffic.responses == wanted)


def test_broken_requests_are_told_of_once_in_a_while(connect: Connect, caplog: Any):
    """Each wrote a warning, for whoever liked to fill a disk."""
    with door() as connect:
        for _ in range(30):
            assert connect().say(b"GET /\x1b[2J HTTP/1.1\r\n\r\n").reply().status == 400
    told = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(told) == 1
    assert "rejected a request from 127.0.0.1: " in told[0].getMessage()


def test_a_complaint_says_how_often_it_was_held_back():
    throttle = LogThrottle()
    assert throttle.record(0) == 1
    assert [throttle.record(now) for now in (1, 2, 59)] == [0, 0, 0]
    assert throttle.record(60) == 4
    assert throttle.record(61) == 0
