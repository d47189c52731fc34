"""Floods, while another client sends requests: silent connections, endless heads and bodies, unread
answers."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import tiny
from tests.attacks.attacker import Attack, Flood, Send
from tests.attacks.conftest import LatencyCheck, Victim
from tests.http.raw_client import RawClient, head, open_connections, post
from tests.machine_lock import MachineLock
from tests.server_process import TIMEOUT, run_server
from tests.waiting import wait_until

COMPLETIONS = "/v1/completions"
GIGABYTE = 1 << 30


@pytest.fixture
def connect(victim: Victim) -> Iterator[Callable[[], RawClient]]:
    with open_connections(victim.server.port) as connect:
        yield connect


@pytest.mark.timing
def test_slow_loris_with_500_sockets(victim: Victim, machine: MachineLock):
    """Each sends one more byte of an endless head. They time out with an error, and do not slow
    down other clients."""
    model = str(victim.disk / "tiny")
    with (
        run_server(model, "--runner", "thread", "--header-timeout", "3") as server,
        open_connections(server.port) as connect,
    ):
        slow = [connect().send(b"POST / HTTP/1.1\r\nX: ") for _ in range(500)]

        def send_one_byte_each() -> None:
            for client in slow:
                with contextlib.suppress(OSError):  # rejected meanwhile
                    client.send(b"y")
            time.sleep(0.1)  # slow on purpose

        LatencyCheck(server, machine)(send_one_byte_each)
        reply = slow[0].read_reply()
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        assert slow[-1].read_reply().status == 408


@pytest.mark.exhaustive
@pytest.mark.timing
def test_more_sockets_than_are_allowed(victim: Victim):
    """The other client's connection is older than these, but active: it is kept."""

    # three processes, each with four threads that hold a hundred
    victim.attack(Attack([[Send(b"G")]], threads=4, hold=100, share=0.16))


# Request headers and the bytes to repeat after them, with a Content-Length and in chunks.
BODIES_OF_A_GIGABYTE = (
    (head("POST", COMPLETIONS, Content_Length=GIGABYTE), b" " * (1 << 16)),
    (
        head("POST", COMPLETIONS, Transfer_Encoding="chunked"),
        b"10000\r\n" + b" " * (1 << 16) + b"\r\n",
    ),
)


@pytest.mark.exhaustive
def test_a_body_of_a_gigabyte(victim: Victim):
    for start, piece in BODIES_OF_A_GIGABYTE:
        # the discarded bytes, and those in the sockets' buffers
        assert flood(RawClient(victim.server.port).send(start), piece) < 64 << 20


@pytest.mark.exhaustive
@pytest.mark.timing
def test_bodies_of_a_gigabyte_do_not_disturb_other_clients(victim: Victim):
    for start, piece in BODIES_OF_A_GIGABYTE:
        victim.attack(Attack([[Send(start), Flood(piece)]], threads=2))


@pytest.mark.timing
def test_bodies_of_tiny_chunks(victim: Victim):
    start = Send(head("POST", COMPLETIONS, Transfer_Encoding="chunked"))
    victim.attack(Attack([[start, Flood(b"1\r\n \r\n" * 10_000)]], threads=2))


@pytest.mark.timing
def test_endless_heads(victim: Victim):
    fields = [Send(b"GET / HTTP/1.1\r\n"), Flood(b"X-Y: z\r\n" * 10_000)]
    victim.attack(Attack([fields, [Flood(b"y" * 80_000)]], threads=2))


def test_unread_answers(victim: Victim, connect: Callable[[], RawClient]):
    """A request is in the engine only until its answer is generated."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 400, "stream": True, "logprobs": 5}
    body |= {"logit_bias": {str(tiny.END): -100}}
    before = count_generated_tokens(victim)
    for _ in range(8):
        client = connect()
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.send(post(body, COMPLETIONS))
    # otherwise they would still be running
    wait_until(lambda: count_generated_tokens(victim) >= before + 8 * 400, limit=TIMEOUT)
    wait_until(lambda: victim.server.status()["Running"] == 0, limit=TIMEOUT)


def count_generated_tokens(victim: Victim) -> int:
    status: Any = victim.server.status()
    return status["Tokens"]["generated"]


def flood(client: RawClient, piece: bytes) -> int:
    """Sends the piece until the connection fails. Returns the number of bytes sent."""
    sent = 0
    with contextlib.closing(client.socket), contextlib.suppress(OSError):
        while sent < GIGABYTE:
            sent += client.socket.send(piece)
    return sent
