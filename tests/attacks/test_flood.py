"""Too much of everything, while another client asks as usual: connections that say little, heads
and bodies without end, answers that nobody reads."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests import tiny
from tests.attacks.attacker import Attack, Flood, Send
from tests.attacks.conftest import Undisturbed, Victim
from tests.http.lines import GET, Line, calling, head, post
from tests.machine_lock import MachineLock
from tests.runners.spawning import wait_until
from tests.server_process import TIMEOUT, run_server

COMPLETIONS = "/v1/completions"
GIGABYTE = 1 << 30


@pytest.fixture
def connect(victim: Victim) -> Iterator[Callable[[], Line]]:
    with calling(victim.server.port) as opened:
        yield opened


def test_slow_loris_with_500_sockets(victim: Victim, machine: MachineLock):
    """Each says one more byte of a head that never ends. They are refused when their time is up,
    each in words that say so, and cost nobody else anything."""
    model = str(victim.disk / "tiny")
    with (
        run_server(model, "--runner", "thread", "--header-timeout", "3") as server,
        calling(server.port) as connect,
    ):
        slow = [connect().say(b"POST / HTTP/1.1\r\nX: ") for _ in range(500)]

        def dribble() -> None:
            for line in slow:
                with contextlib.suppress(OSError):  # refused in the meantime
                    line.say(b"y")
            time.sleep(0.1)  # it is slow, and works for that reason

        Undisturbed(server, machine)(dribble)
        refused = slow[0].reply()
        assert (refused.status, refused.error["code"]) == (408, "request_timeout")
        assert slow[-1].reply().status == 408


def test_500_sockets_that_never_speak_tls(victim: Victim, tmp_path: Path, machine: MachineLock):
    """asyncio waited a minute for each, and nobody counted them: they could take all open files."""
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    leaf.private_key_pem.write_to_path(tmp_path / "key.pem")
    trust = httpx.create_ssl_context()
    authority.configure_trust(trust)
    model, cert, key = (str(one) for one in (victim.disk / "tiny", *sorted(tmp_path.iterdir())))
    patience = ("--header-timeout", "3", "--max-connections", "600")
    arguments = ("--runner", "thread", "--tls-cert", cert, "--tls-key", key, *patience)
    with (
        run_server(model, *arguments, ssl_context=trust) as server,
        calling(server.port) as connect,
    ):
        silent = [connect().say(b"\x16\x03\x01") for _ in range(500)]

        def more() -> None:
            """All the time; each drives out the one that waited longest."""
            with contextlib.suppress(OSError):
                connect().say(GET[:1])

        Undisturbed(server, machine, trust)(more)
        # let go when their time is up, as those are that say something else
        assert silent[0].closed(within=10)
        assert silent[-1].closed(within=10)
        metrics = httpx.get(f"{server.url}/metrics", verify=trust, timeout=TIMEOUT).text
        assert "too_many_connections" in metrics
        assert figure(metrics, "mlxrunner_http_connections") <= 600 + 64
        assert (
            figure(
                metrics, 'mlxrunner_http_connections_turned_away_total{reason="handshake_timeout"}'
            )
            >= 400
        )


def figure(metrics: str, sample: str) -> float:
    [found] = [line for line in metrics.splitlines() if line.startswith(f"{sample} ")]
    return float(found.rpartition(" ")[2])


def test_more_sockets_than_are_allowed(victim: Victim):
    """A second client's connection is older than these, but it is asking: it stays."""

    # three processes, each with four threads that hold a hundred
    victim.undisturbed(Attack([[Send(b"G")]], threads=4, hold=100, share=0.16))


def test_more_clients_than_there_are_files_for(victim: Victim):
    """Each took a file of the server's, which then could not reach its own model: 500."""
    model = str(victim.disk / "tiny")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4}
    with run_server(model, max_open_files=320) as server:

        async def ask(client: httpx.AsyncClient) -> httpx.Response:
            return await client.post(COMPLETIONS, json=body)

        async def all_at_once() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=server.url, timeout=TIMEOUT, limits=limits
            ) as client:
                return await asyncio.gather(*(ask(client) for _ in range(330)))

        replies = asyncio.run(all_at_once())
        refused = [reply for reply in replies if reply.status_code != 200]
        assert {reply.status_code for reply in refused} <= {429, 503}
        assert all(int(reply.headers["retry-after"]) > 0 for reply in refused)
        assert len(refused) < 330
        assert "accepting at most 160 connections" in server.log_text()
        assert "Traceback" not in server.log_text()
        assert "Too many open files" not in server.log_text()


def test_a_body_of_a_gigabyte(victim: Victim):
    whole = head("POST", COMPLETIONS, Content_Length=GIGABYTE), b" " * (1 << 16)
    chunk = b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
    chunks = head("POST", COMPLETIONS, Transfer_Encoding="chunked"), chunk
    for start, piece in (whole, chunks):
        # what is discarded, and what lies in the sockets' buffers
        assert flood(Line(victim.server.port).say(start), piece) < 64 << 20
        victim.undisturbed(Attack([[Send(start), Flood(piece)]], threads=2))


def test_bodies_of_tiny_chunks(victim: Victim):
    start = Send(head("POST", COMPLETIONS, Transfer_Encoding="chunked"))
    victim.undisturbed(Attack([[start, Flood(b"1\r\n \r\n" * 10_000)]], threads=2))


def test_heads_without_end(victim: Victim):
    fields = [Send(b"GET / HTTP/1.1\r\n"), Flood(b"X-Y: z\r\n" * 10_000)]
    victim.undisturbed(Attack([fields, [Flood(b"y" * 80_000)]], threads=2))


def test_answers_that_nobody_reads(victim: Victim, connect: Callable[[], Line]):
    """A place in the engine is theirs until the answer is made, and no longer."""
    ask = {"model": "tiny", "prompt": "x", "max_tokens": 400, "stream": True, "logprobs": 5}
    ask |= {"logit_bias": {str(tiny.END): -100}}
    before = generated(victim)
    for _ in range(8):
        line = connect()
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.say(post(ask, COMPLETIONS))
    # else they hold their places
    wait_until(lambda: generated(victim) >= before + 8 * 400)
    wait_until(lambda: victim.server.status()["Running"] == 0)


def generated(victim: Victim) -> int:
    status: Any = victim.server.status()
    return status["Tokens"]["generated"]


def flood(line: Line, piece: bytes) -> int:
    """Says it until nobody listens any more; how many bytes that were."""
    sent = 0
    with contextlib.closing(line.socket), contextlib.suppress(OSError):
        while sent < GIGABYTE:
            sent += line.socket.send(piece)
    return sent
