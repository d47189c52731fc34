"""deploy/nginx, run by a real nginx before real servers."""

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
from tests.deploy.nginx import Certificate, Nginx, Replicas, events, proxying, until
from tests.server_process import TIMEOUT, ServerProcess
from tests.throttle import Throttle
from tests.tiny import END, LONG

KEY = {"Authorization": "Bearer a-key"}


@pytest.fixture(scope="module")
def throttle(tmp_path_factory: pytest.TempPathFactory) -> Throttle:
    """Of all servers here."""
    return Throttle(tmp_path_factory.mktemp("servers") / "throttle")


@pytest.fixture(scope="module")
def ever(long_model: Path, certificate: Certificate, throttle: Throttle) -> Iterator[Replicas]:
    with Replicas(long_model, throttle.variables) as running:
        yield running


@pytest.fixture
def servers(ever: Replicas) -> list[ServerProcess]:
    """Three, ready; what another test ended is replaced."""
    return ever.alive(3)


@pytest.fixture
def one(servers: list[ServerProcess], certificate: Certificate, tmp_path: Path) -> Iterator[Nginx]:
    with proxying("one.conf", servers[:1], certificate, tmp_path) as running:
        yield running


@pytest.fixture
def several(
    servers: list[ServerProcess], certificate: Certificate, tmp_path: Path
) -> Iterator[Nginx]:
    with proxying("replicas.conf", servers, certificate, tmp_path) as running:
        yield running


def completion(tokens: int, **more: Any) -> dict[str, Any]:
    """Exactly so many tokens."""
    return {
        "model": "tiny",
        "prompt": "once upon a time",
        "max_tokens": tokens,
        "logit_bias": {str(END): -100},
        "temperature": 0,
        **more,
    }


# One server


def test_a_stream_arrives_while_it_is_written_and_ends_when_its_client_leaves(
    one: Nginx, servers: list[ServerProcess]
) -> None:
    body = completion(LONG // 2, stream=True)
    with closing(one.send("POST", "/v1/completions", json=body, stream=True)) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        pieces = events(reply.iter_lines())
        assert next(pieces)["choices"][0]["text"]
        assert servers[0].status()["Running"] == 1
    until(lambda: servers[0].status()["Running"] == 0)


def test_an_answer_that_is_not_streamed_comes_whole(one: Nginx) -> None:
    reply = one.send("POST", "/v1/completions", json=completion(50))
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 50


def test_errors_are_the_servers_own(one: Nginx) -> None:
    reply = one.send("POST", "/v1/completions", json={"model": "none"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_bodies_are_let_through_up_to_the_servers_limit(one: Nginx) -> None:
    """At the limit the server says what is wrong, above it nginx, in the same words."""
    shell = len(httpx.Request("POST", one.http.base_url, json=completion(1, prompt="")).content)
    for size, status, code in (
        (Settings().max_body, 400, "context_length_exceeded"),
        (Settings().max_body + 1, 413, "request_too_large"),
    ):
        body = completion(1, prompt="x" * (size - shell))
        reply = one.send("POST", "/v1/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


def test_the_name_that_was_asked_for_reaches_the_server(one: Nginx) -> None:
    """So a page that got another name to lead to the proxy is refused by the server's own check."""
    assert one.send("GET", "/health").status_code == 200
    for path in ("/v1/models", "/v1/status"):
        refused = one.send("GET", path, headers={"Host": "rebound.example.net"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")


# Several


def converse(nginx: Nginx, name: str, headers: dict[str, str]) -> list[int]:
    """Three turns of a conversation that grows; the replica of each."""
    said: list[dict[str, str]] = []
    asked: list[int] = []
    for turn in range(3):
        said.append({"role": "user", "content": f"{name} asks question {turn}"})
        request_id = uuid.uuid4().hex
        reply = nginx.send(
            "POST",
            "/v1/chat/completions",
            json={"model": "tiny", "messages": said, "max_tokens": 8},
            headers={**headers, "x-request-id": request_id},
        )
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0 or turn == 0
        said.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        asked += nginx.asked(request_id)
    return asked


@pytest.mark.parametrize(
    "header", ["X-Session-Id", "x-session-affinity", "Session-Id", "X-OpenWebUI-Chat-Id"]
)
def test_a_conversation_stays_where_its_beginning_is_cached(several: Nginx, header: str) -> None:
    """All with one key from one address, as from behind a web page."""
    for number in range(3):
        name = f"{header}-{number}".lower()
        assert len(set(converse(several, name, {header: name, **KEY}))) == 1
    assert len({place(several, {header: f"conversation {n}", **KEY}) for n in range(24)}) > 1


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key"])
def test_who_names_no_conversation_stays_by_key(several: Nginx, header: str) -> None:
    assert len(set(converse(several, header.lower(), {header: "Bearer a-key"}))) == 1
    assert len({place(several, {header: f"Bearer key-{n}"}) for n in range(24)}) > 1


def place(nginx: Nginx, headers: dict[str, str]) -> int:
    """The port of the replica that these headers lead to."""
    request_id = uuid.uuid4().hex
    reply = nginx.send("GET", "/v1/models", headers={**headers, "x-request-id": request_id})
    assert reply.status_code == 200
    [port] = nginx.asked(request_id)
    return port


class Streaming:
    """A long answer, read on a thread of its own."""

    def __init__(self, nginx: Nginx, session: str, tokens: int) -> None:
        self._nginx = nginx
        self._session = session
        self._tokens = tokens
        self.begun = threading.Event()
        self.error: Exception | None = None
        self.pieces = 0
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.begun.wait(TIMEOUT)

    def join(self) -> "Streaming":
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        return self

    def _read(self) -> None:
        try:
            reply = self._nginx.send(
                "POST",
                "/v1/completions",
                json=completion(self._tokens, stream=True),
                headers={"X-Session-Id": self._session},
                stream=True,
            )
            with closing(reply):
                for _ in events(reply.iter_lines()):
                    self.pieces += 1
                    self.begun.set()
        except (httpx.HTTPError, AssertionError) as error:
            self.error = error
        finally:
            self.begun.set()


def homes(nginx: Nginx, servers: list[ServerProcess]) -> dict[int, list[str]]:
    """Two conversations of each replica, by port."""
    found: dict[int, list[str]] = {one.port: [] for one in servers}
    number = 0
    while any(len(names) < 2 for names in found.values()):
        name = f"home-{number}"
        found[place(nginx, {"X-Session-Id": name})].append(name)
        number += 1
    return {port: names[:2] for port, names in found.items()}


def test_no_client_can_make_nginx_leave_out_a_replica(
    several: Nginx, servers: list[ServerProcess]
) -> None:
    """Nor is a body that is refused unread, of a client without rights, a server that broke off."""
    home = homes(several, servers)[servers[0].port][0]
    headers = {"X-Session-Id": home, "Content-Type": "text/plain"}
    for _ in range(12):
        body = b"x" * (9 << 20)
        reply = several.send("POST", "/v1/completions", content=body, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert place(several, {"X-Session-Id": home}) == servers[0].port


def test_replicas_die_drain_and_are_missed_by_nobody_else(
    several: Nginx, servers: list[ServerProcess], throttle: Throttle
) -> None:
    """First one is killed, then one is told to stop, then the last one is gone too."""
    killed, drained, last = servers
    of = homes(several, servers)
    every = [name for names in of.values() for name in names]

    throttle.on()
    torn = Streaming(several, of[killed.port][0], LONG // 2)
    whole = Streaming(several, of[last.port][0], 200)
    with ThreadPoolExecutor() as threads:
        unseen = threads.submit(ask, several, of[killed.port][1], completion(500))
        until(lambda: killed.status()["Running"] == 2)
        killed.process.kill()
        throttle.off()
        # nobody had seen any of it, so another one made it
        assert unseen.result().json()["usage"]["completion_tokens"] == 500
    assert isinstance(torn.join().error, httpx.RemoteProtocolError)
    assert torn.pieces > 0
    for name in every:
        assert ask(several, name, completion(4)).status_code == 200
    assert whole.join().error is None

    throttle.on()
    leaving = Streaming(several, of[drained.port][0], 200)
    drained.process.terminate()
    until(lambda: not listens(drained))
    throttle.off()
    for name in every:
        assert ask(several, name, completion(4)).status_code == 200
    assert leaving.join().error is None
    # as a process without a handler would end, which service managers take for a good end
    assert drained.stop() in (0, -signal.SIGTERM)

    last.stop()
    refused = several.send("GET", "/v1/models")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_unavailable")
    assert int(refused.headers["retry-after"]) > 0


def ask(nginx: Nginx, session: str, body: dict[str, Any]) -> httpx.Response:
    return nginx.send("POST", "/v1/completions", json=body, headers={"X-Session-Id": session})


def listens(server: ServerProcess) -> bool:
    try:
        httpx.get(f"{server.url}/health")
    except httpx.ConnectError:
        return False
    return True
