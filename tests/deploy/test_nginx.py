"""deploy/nginx, run by a real nginx in front of real servers."""

import signal
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.settings import Settings
from tests.deploy.nginx import Certificate, Nginx, Replicas, iter_events, run_nginx
from tests.server_process import TIMEOUT, ServerProcess
from tests.throttle import Throttle
from tests.tiny import END, LONG
from tests.waiting import wait_until

KEY = {"Authorization": "Bearer a-key"}


@pytest.fixture(scope="module")
def throttle(tmp_path_factory: pytest.TempPathFactory) -> Throttle:
    """The throttle of all servers in this file."""
    return Throttle(tmp_path_factory.mktemp("servers") / "throttle")


@pytest.fixture(scope="module")
def replicas(long_model: Path, certificate: Certificate, throttle: Throttle) -> Iterator[Replicas]:
    with Replicas(long_model, throttle.variables) as running:
        yield running


@pytest.fixture
def servers(replicas: Replicas) -> list[ServerProcess]:
    """Three ready servers; those that another test has stopped are replaced."""
    return replicas.get_ready(3)


@pytest.fixture
def one(servers: list[ServerProcess], certificate: Certificate, tmp_path: Path) -> Iterator[Nginx]:
    with run_nginx("one.conf", servers[:1], certificate, tmp_path) as running:
        yield running


@pytest.fixture
def several(
    servers: list[ServerProcess], certificate: Certificate, tmp_path: Path
) -> Iterator[Nginx]:
    with run_nginx("replicas.conf", servers, certificate, tmp_path) as running:
        yield running


def build_body(tokens: int, **fields: Any) -> dict[str, Any]:
    """A request for exactly this many tokens."""
    return {
        "model": "tiny",
        "prompt": "once upon a time",
        "max_tokens": tokens,
        "logit_bias": {str(END): -100},
        "temperature": 0,
        **fields,
    }


# One server


def test_a_stream_is_not_buffered_and_a_disconnect_cancels_it(
    one: Nginx, servers: list[ServerProcess]
) -> None:
    body = build_body(LONG // 2, stream=True)
    with closing(one.send("POST", "/v1/completions", json=body, stream=True)) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        pieces = iter_events(reply.iter_lines())
        assert next(pieces)["choices"][0]["text"]
        wait_until(lambda: servers[0].status()["Running"] == 1, limit=TIMEOUT)
    wait_until(lambda: servers[0].status()["Running"] == 0, limit=TIMEOUT)


def test_an_unstreamed_answer_is_complete(one: Nginx) -> None:
    reply = one.send("POST", "/v1/completions", json=build_body(50))
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 50


def test_errors_of_the_server_are_passed_on(one: Nginx) -> None:
    reply = one.send("POST", "/v1/completions", json={"model": "none"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.exhaustive
def test_bodies_are_accepted_up_to_the_limit_of_the_server(one: Nginx) -> None:
    """Up to the limit the server reports the error, above it nginx, in the same format."""
    overhead = len(httpx.Request("POST", one.http.base_url, json=build_body(1, prompt="")).content)
    for size, status, code in (
        (Settings().max_body, 400, "context_length_exceeded"),
        (Settings().max_body + 1, 413, "request_too_large"),
    ):
        body = build_body(1, prompt="x" * (size - overhead))
        reply = one.send("POST", "/v1/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


def test_the_host_header_reaches_the_server(one: Nginx) -> None:
    """So the server's host check also rejects DNS rebinding to the proxy."""
    assert one.send("GET", "/health").status_code == 200
    for path in ("/v1/models", "/v1/status"):
        reply = one.send("GET", path, headers={"Host": "rebound.example.net"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_not_allowed")


# Several servers


def run_conversation(nginx: Nginx, name: str, headers: dict[str, str]) -> list[int]:
    """Three turns of a conversation; returns the replica of each."""
    messages: list[dict[str, str]] = []
    ports: list[int] = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"{name} asks question {turn}"})
        request_id = uuid.uuid4().hex
        reply = nginx.send(
            "POST",
            "/v1/chat/completions",
            json={"model": "tiny", "messages": messages, "max_tokens": 8},
            headers={**headers, "x-request-id": request_id},
        )
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0 or turn == 0
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
        ports += nginx.get_replica_ports(request_id)
    return ports


@pytest.mark.parametrize(
    "header", ["X-Session-Id", "x-session-affinity", "Session-Id", "X-OpenWebUI-Chat-Id"]
)
def test_a_conversation_stays_on_one_replica(several: Nginx, header: str) -> None:
    """All with one key from one address, as behind a web interface."""
    for number in range(3):
        name = f"{header}-{number}".lower()
        assert len(set(run_conversation(several, name, {header: name, **KEY}))) == 1
    assert len({find_replica(several, {header: f"conversation {n}", **KEY}) for n in range(24)}) > 1


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key"])
def test_without_a_session_the_key_selects_the_replica(several: Nginx, header: str) -> None:
    assert len(set(run_conversation(several, header.lower(), {header: "Bearer a-key"}))) == 1
    assert len({find_replica(several, {header: f"Bearer key-{n}"}) for n in range(24)}) > 1


def find_replica(nginx: Nginx, headers: dict[str, str]) -> int:
    """The port of the replica that nginx selects for these headers."""
    request_id = uuid.uuid4().hex
    reply = nginx.send("GET", "/v1/models", headers={**headers, "x-request-id": request_id})
    assert reply.status_code == 200
    [port] = nginx.get_replica_ports(request_id)
    return port


class StreamReader:
    """Reads a long answer in a thread."""

    def __init__(self, nginx: Nginx, session: str, tokens: int) -> None:
        self._nginx = nginx
        self._session = session
        self._tokens = tokens
        self.started = threading.Event()
        self.error: Exception | None = None
        self.pieces = 0
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.started.wait(TIMEOUT)

    def join(self) -> "StreamReader":
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        return self

    def _read(self) -> None:
        try:
            reply = self._nginx.send(
                "POST",
                "/v1/completions",
                json=build_body(self._tokens, stream=True),
                headers={"X-Session-Id": self._session},
                stream=True,
            )
            with closing(reply):
                for _ in iter_events(reply.iter_lines()):
                    self.pieces += 1
                    self.started.set()
        except (httpx.HTTPError, AssertionError) as error:
            self.error = error
        finally:
            self.started.set()


def find_sessions(nginx: Nginx, servers: list[ServerProcess]) -> dict[int, list[str]]:
    """Two sessions of each replica, by port."""
    sessions: dict[int, list[str]] = {one.port: [] for one in servers}
    number = 0
    while any(len(names) < 2 for names in sessions.values()):
        name = f"home-{number}"
        sessions[find_replica(nginx, {"X-Session-Id": name})].append(name)
        number += 1
    return {port: names[:2] for port, names in sessions.items()}


def test_rejected_requests_do_not_disable_a_replica(
    several: Nginx, servers: list[ServerProcess]
) -> None:
    """The rejection of an unread body does not count as a failure of the replica."""
    session = find_sessions(several, servers)[servers[0].port][0]
    headers = {"X-Session-Id": session, "Content-Type": "text/plain"}
    for _ in range(12):
        body = b"x" * (9 << 20)
        reply = several.send("POST", "/v1/completions", content=body, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert find_replica(several, {"X-Session-Id": session}) == servers[0].port


def test_replicas_may_crash_and_drain(
    several: Nginx, servers: list[ServerProcess], throttle: Throttle
) -> None:
    """The first replica is killed, the second one drains, and then the last one stops."""
    killed, drained, last = servers
    sessions = find_sessions(several, servers)
    all_sessions = [name for names in sessions.values() for name in names]

    throttle.on()
    interrupted = StreamReader(several, sessions[killed.port][0], LONG // 2)
    complete = StreamReader(several, sessions[last.port][0], 200)
    with ThreadPoolExecutor() as threads:
        retried = threads.submit(
            send_completion, several, sessions[killed.port][1], build_body(500)
        )
        wait_until(lambda: killed.status()["Running"] == 2, limit=TIMEOUT)
        killed.process.kill()
        throttle.off()
        # nothing had been sent to the client, so nginx retried on another replica
        assert retried.result().json()["usage"]["completion_tokens"] == 500
    assert isinstance(interrupted.join().error, httpx.RemoteProtocolError)
    assert interrupted.pieces > 0
    for name in all_sessions:
        assert send_completion(several, name, build_body(4)).status_code == 200
    assert complete.join().error is None

    throttle.on()
    draining = StreamReader(several, sessions[drained.port][0], 200)
    drained.process.terminate()
    wait_until(lambda: not is_listening(drained), limit=TIMEOUT)
    throttle.off()
    for name in all_sessions:
        assert send_completion(several, name, build_body(4)).status_code == 200
    assert draining.join().error is None
    # as a process without a handler ends, which service managers accept as a clean exit
    assert drained.stop() in (0, -signal.SIGTERM)

    last.stop()
    reply = several.send("GET", "/v1/models")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_unavailable")
    assert int(reply.headers["retry-after"]) > 0


def send_completion(nginx: Nginx, session: str, body: dict[str, Any]) -> httpx.Response:
    return nginx.send("POST", "/v1/completions", json=body, headers={"X-Session-Id": session})


def is_listening(server: ServerProcess) -> bool:
    try:
        httpx.get(f"{server.url}/health", timeout=TIMEOUT)
    except httpx.ConnectError:
        return False
    except httpx.TransportError:  # it had this connection in its backlog when it closed its socket
        return True
    return True
