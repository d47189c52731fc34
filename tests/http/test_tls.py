"""TLS: connections are served and limited like plain ones."""

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from app.core.usage import ConnectionStats
from tests.fakes import FakeGenerate, finish, text
from tests.http.raw_client import CHAT, CHAT_BODY, GET, RawClient, head, post
from tests.http.raw_client import run_server as run_plain_server
from tests.waiting import wait_until

Connect = Callable[[], RawClient]


class CertificateFiles:
    """A certificate for localhost, as settings, and a client context that trusts it."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        leaf = authority.issue_cert("localhost")
        self.settings = {"tls_cert": str(folder / "cert"), "tls_key": str(folder / "key")}
        leaf.cert_chain_pems[0].write_to_path(self.settings["tls_cert"])
        leaf.private_key_pem.write_to_path(self.settings["tls_key"])
        self._client_context = ssl.create_default_context()
        authority.configure_trust(self._client_context)

    def handshake(self, client: RawClient) -> RawClient:
        client.socket = self._client_context.wrap_socket(client.socket, server_hostname="localhost")
        return client


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return CertificateFiles(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def stats() -> ConnectionStats:
    return ConnectionStats()


@contextlib.contextmanager
def run_server(certificate: CertificateFiles, *args: Any, **settings: Any) -> Iterator[Connect]:
    with run_plain_server(*args, **settings, **certificate.settings) as connect:
        yield connect


def test_requests_over_tls_are_answered_and_the_connection_is_kept(certificate: CertificateFiles):
    with run_server(certificate) as connect:
        client = certificate.handshake(connect())
        for _ in range(3):
            assert client.send(GET).read_reply().status == 200
            assert client.send(post(CHAT_BODY)).read_reply().status == 200


def test_plain_http_is_not_answered(certificate: CertificateFiles, stats: ConnectionStats):
    with run_server(certificate, None, stats) as connect:
        client = connect().send(GET)
        assert b"HTTP" not in client.read_until(lambda _: False)
        assert certificate.handshake(connect()).send(GET).read_reply().status == 200
    assert stats.accepted_connections == 1


def test_the_head_has_its_timeout_after_the_handshake(
    certificate: CertificateFiles, stats: ConnectionStats
):
    with run_server(certificate, None, stats, header_timeout=1) as connect:
        assert certificate.handshake(connect()).is_closed()
        assert stats.closed_by_reason["head_timeout"] == 1


@pytest.mark.timing
def test_the_last_response_of_a_connection_may_be_read_slowly(certificate: CertificateFiles):
    """asyncio has one timeout for all unsent data of a closing connection."""
    generate = FakeGenerate([text("x" * 10_000_000), finish()])
    with run_server(certificate, generate, body_timeout=1) as connect:
        client = connect()
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        certificate.handshake(client).send(post(CHAT_BODY, Connection="close"))
        read = bytearray()
        while more := client.socket.recv(65536):
            read += more
            time.sleep(0.004)  # for 16 KiB, so that it takes more than two seconds
        assert read.count(b"x") >= 10_000_000


def test_an_unread_finished_answer_times_out(certificate: CertificateFiles, stats: ConnectionStats):
    """It was buffered below TLS, where it went unnoticed."""
    generate = FakeGenerate([text("x" * 20_000_000), finish()])
    with run_server(certificate, generate, stats, body_timeout=0.3) as connect:
        client = certificate.handshake(connect()).send(post(CHAT_BODY))
        wait_until(lambda: stats.closed_by_reason["unread_answer"] == 1)
        wait_until(lambda: stats.open_connections == 0)
        with contextlib.suppress(OSError):  # reset, or closed in the middle of a TLS record
            assert len(client.read_until(lambda _: False)) < 20_000_000


@pytest.mark.timing
def test_a_steady_reader_gets_the_complete_answer_at_any_rate(
    certificate: CertificateFiles, stats: ConnectionStats
):
    generate = FakeGenerate([text("x" * 12_000_000), finish()])
    with run_server(certificate, generate, stats, body_timeout=1) as connect:
        client = certificate.handshake(connect()).send(post(CHAT_BODY))
        read = client.read_steadily(400_000, 4.0)
        assert 1_000_000 < read < 2_000_000
        assert client.read_reply().body.count(b"x") >= 12_000_000
    assert stats.closed_by_reason["unread_answer"] == 0


def test_a_client_that_stops_reading_is_disconnected(
    certificate: CertificateFiles, stats: ConnectionStats
):
    generate = FakeGenerate([text("x" * 12_000_000), finish()])
    with run_server(certificate, generate, stats, body_timeout=1) as connect:
        client = certificate.handshake(connect()).send(post(CHAT_BODY))
        client.read_steadily(400_000, 1.5)
        wait_until(lambda: stats.closed_by_reason["unread_answer"] == 1)


def test_the_rejection_of_a_long_body_can_be_read(certificate: CertificateFiles):
    with run_server(certificate) as connect:
        client = certificate.handshake(connect())
        length = 9 << 20
        client.send(
            head("POST", CHAT, Content_Length=length, Content_Type="text/plain", Connection="close")
        )
        client.send(b" " * length)
        assert client.read_reply().status == 415
