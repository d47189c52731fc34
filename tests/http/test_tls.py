"""TLS: whoever does not speak it is counted and cut off, whoever does is served like others."""

import contextlib
import socket
import ssl
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from app.core.server_stats import ConnectionStats
from tests.fakes import FakeGenerate, finish, text
from tests.http.lines import ASK, CHAT, GET, Line, door, eventually, head, post

Connect = Callable[[], Line]


class Lock:
    """A certificate for localhost: as settings, and for a client that trusts it."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        leaf = authority.issue_cert("localhost")
        self.settings = {"tls_cert": str(folder / "cert"), "tls_key": str(folder / "key")}
        leaf.cert_chain_pems[0].write_to_path(self.settings["tls_cert"])
        leaf.private_key_pem.write_to_path(self.settings["tls_key"])
        self._trust = ssl.create_default_context()
        authority.configure_trust(self._trust)

    def agree(self, line: Line) -> Line:
        line.socket = self._trust.wrap_socket(line.socket, server_hostname="localhost")
        return line


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Lock:
    return Lock(tmp_path_factory.mktemp("lock"))


@pytest.fixture
def traffic() -> ConnectionStats:
    return ConnectionStats()


@contextlib.contextmanager
def locked(lock: Lock, *things: Any, **settings: Any) -> Iterator[Connect]:
    with door(*things, **settings, **lock.settings) as connect:
        yield connect


def test_whoever_speaks_it_is_served_and_their_connection_kept(lock: Lock):
    with locked(lock) as connect:
        line = lock.agree(connect())
        for _ in range(3):
            assert line.say(GET).reply().status == 200
            assert line.say(post(ASK)).reply().status == 200


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", GET[:3]], ids=["nothing", "some", "other"])
def test_a_handshake_that_does_not_come_is_given_up(
    lock: Lock, traffic: ConnectionStats, said: bytes
):
    """asyncio would have waited for a minute."""
    with locked(lock, None, traffic, header_timeout=0.3) as connect:
        line = connect().say(said)
        assert line.until(lambda _: False) == b""
        assert eventually(lambda: traffic.open_connections == 0)
        assert traffic.closed_by_reason["handshake_timeout"] == 1


def test_what_is_no_tls_is_not_answered(lock: Lock, traffic: ConnectionStats):
    with locked(lock, None, traffic) as connect:
        line = connect().say(GET)
        assert b"HTTP" not in line.until(lambda _: False)
        assert eventually(lambda: traffic.open_connections == 0)
        assert lock.agree(connect()).say(GET).reply().status == 200


def test_each_head_has_its_time_behind_the_handshake_too(lock: Lock, traffic: ConnectionStats):
    with locked(lock, None, traffic, header_timeout=1) as connect:
        assert lock.agree(connect()).closed()
        assert traffic.closed_by_reason["head_timeout"] == 1


def test_those_who_have_not_agreed_are_counted_and_give_way_first(
    lock: Lock, traffic: ConnectionStats
):
    with locked(lock, None, traffic, max_connections=3) as connect:
        known = lock.agree(connect())
        assert known.say(GET).reply().status == 200
        silent = [connect() for _ in range(6)]
        assert eventually(lambda: traffic.accepted_connections == 7)
        assert eventually(lambda: traffic.open_connections <= 3)
        assert silent[0].closed()
        assert lock.agree(connect()).say(GET).reply().status == 200
        assert known.say(GET).reply().status == 200
    assert traffic.closed_by_reason["too_many_connections"] == 5


def test_sockets_that_are_opened_and_closed_leave_nothing_behind(
    lock: Lock, traffic: ConnectionStats
):
    with locked(lock, None, traffic) as connect:
        for _ in range(50):
            connect().socket.close()
        assert eventually(
            lambda: traffic.accepted_connections == 50 and traffic.open_connections == 0
        )
    assert sum(traffic.closed_by_reason.values()) == 0


def test_whoever_does_not_answer_to_our_closing_is_not_kept_for_ever(
    lock: Lock, traffic: ConnectionStats
):
    """Closing TLS takes two, and a client that is gone says nothing."""
    with locked(lock, None, traffic, header_timeout=0.2, body_timeout=0.3) as connect:
        lock.agree(connect())
        assert eventually(
            lambda: traffic.accepted_connections == 1 and traffic.open_connections == 0
        )


def test_an_answer_behind_which_we_close_has_all_the_time_that_it_takes_to_read(lock: Lock):
    """asyncio gives a closing connection one time for all that is still unsent."""
    generate = FakeGenerate([text("x" * 10_000_000), finish()])
    with locked(lock, generate, body_timeout=1) as connect:
        line = connect()
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        lock.agree(line).say(post(ASK, Connection="close"))
        read = bytearray()
        while more := line.socket.recv(65536):
            read += more
            time.sleep(0.004)  # for 16 KiB, so that it takes more than two seconds
        assert read.count(b"x") >= 10_000_000


def test_a_finished_answer_that_nobody_reads_is_cut_off(lock: Lock, traffic: ConnectionStats):
    """It lay below TLS, which told nobody."""
    generate = FakeGenerate([text("x" * 20_000_000), finish()])
    with locked(lock, generate, traffic, body_timeout=0.3) as connect:
        line = lock.agree(connect()).say(post(ASK))
        assert eventually(lambda: traffic.closed_by_reason["unread_answer"] == 1)
        assert eventually(lambda: traffic.open_connections == 0)
        with contextlib.suppress(OSError):  # reset, or torn in the middle of a record
            assert len(line.until(lambda _: False)) < 20_000_000


def test_a_client_that_reads_steadily_gets_everything_however_slow_it_is(
    lock: Lock, traffic: ConnectionStats
):
    generate = FakeGenerate([text("x" * 12_000_000), finish()])
    with locked(lock, generate, traffic, body_timeout=1) as connect:
        line = lock.agree(connect()).say(post(ASK))
        read = line.read_steadily(400_000, 4.0)
        assert 1_000_000 < read < 2_000_000
        assert line.reply().body.count(b"x") >= 12_000_000
    assert traffic.closed_by_reason["unread_answer"] == 0


def test_a_client_that_reads_no_more_is_cut_off(lock: Lock, traffic: ConnectionStats):
    generate = FakeGenerate([text("x" * 12_000_000), finish()])
    with locked(lock, generate, traffic, body_timeout=1) as connect:
        line = lock.agree(connect()).say(post(ASK))
        line.read_steadily(400_000, 1.5)
        stopped = time.monotonic()
        assert eventually(lambda: traffic.closed_by_reason["unread_answer"] == 1)
        assert time.monotonic() - stopped < 5


def test_a_refusal_of_a_long_body_is_read_to_its_end(lock: Lock):
    with locked(lock) as connect:
        line = lock.agree(connect())
        long = 9 << 20
        line.say(
            head("POST", CHAT, Content_Length=long, Content_Type="text/plain", Connection="close")
        )
        line.say(b" " * long)
        assert line.reply().status == 415


def test_a_connection_takes_little_memory(lock: Lock):
    """asyncio's buffer is a quarter of a megabyte for each."""
    with locked(lock) as connect:
        lock.agree(connect())
        tracemalloc.start()
        try:
            for _ in range(50):
                lock.agree(connect())
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert taken < 50 * 100_000
