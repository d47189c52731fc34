"""deploy/nginx, run by a real nginx before real servers."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.settings import Settings
from tests.deploy.nginx import Certificate, Nginx, events, proxying, replicas, until
from tests.serving import PATIENCE, Served
from tests.tiny import END

KEY = {"Authorization": "Bearer a-key"}


@pytest.fixture(scope="module")
def pair(tiny_model: Path, certificate: Certificate) -> Iterator[list[Served]]:
    with ExitStack() as stack:
        yield replicas(2, tiny_model, stack)


@pytest.fixture(scope="module")
def one(
    pair: list[Served], certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nginx]:
    with proxying("one.conf", pair[:1], certificate, tmp_path_factory.mktemp("one")) as running:
        yield running


@pytest.fixture(scope="module")
def both(
    pair: list[Served], certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nginx]:
    with proxying("replicas.conf", pair, certificate, tmp_path_factory.mktemp("both")) as running:
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
    one: Nginx, pair: list[Served]
) -> None:
    body = completion(4000, stream=True)
    with closing(one.send("POST", "/v1/completions", json=body, stream=True)) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        pieces = events(reply.iter_lines())
        assert next(pieces)["choices"][0]["text"]
        assert pair[0].status()["Running"] == 1
    until(lambda: pair[0].status()["Running"] == 0)
    assert pair[0].status()["Tokens"]["generated"] < 4000


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


def converse(nginx: Nginx, name: str, headers: dict[str, str], turns: int = 3) -> list[int]:
    """Turns of a conversation that grows; the replica of each. The work that was skipped is told
    by the answer itself."""
    said: list[dict[str, str]] = []
    asked: list[int] = []
    for turn in range(turns):
        said.append({"role": "user", "content": f"{name} asks question {turn}"})
        request_id = f"{name}-{turn}-{len(asked)}"
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
def test_a_conversation_stays_where_its_beginning_is_cached(
    both: Nginx, pair: list[Served], header: str
) -> None:
    """Eight of them, all with one key from one address, as from behind a web page."""
    where: dict[int, int] = defaultdict(int)
    for number in range(8):
        name = f"{header}-{number}".lower()
        asked = converse(both, name, {header: name, **KEY}, turns=2)
        assert len(asked) == 2
        assert len(set(asked)) == 1
        where[asked[0]] += 1
    assert set(where) == {one.port for one in pair}


def test_who_names_no_conversation_stays_by_key(both: Nginx, pair: list[Served]) -> None:
    where: set[int] = set()
    for number in range(8):
        keys = ({"Authorization": f"Bearer key-{number}"}, {"x-api-key": f"key-{number}"})
        asked = converse(both, f"key-{number}", keys[number % 2], turns=2)
        assert len(set(asked)) == 1
        where |= set(asked)
    assert where == {one.port for one in pair}


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
        assert self.begun.wait(PATIENCE)

    def join(self) -> "Streaming":
        self._thread.join(PATIENCE)
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


def homes(nginx: Nginx, servers: list[Served]) -> dict[int, list[str]]:
    """Two conversations of each replica, by port."""
    found: dict[int, list[str]] = {one.port: [] for one in servers}
    for number in range(200):
        name = f"home-{number}"
        headers = {"X-Session-Id": name, "x-request-id": name}
        assert nginx.send("GET", "/v1/models", headers=headers).status_code == 200
        [port] = nginx.asked(name)
        found[port].append(name)
        if all(len(names) >= 2 for names in found.values()):
            return found
    raise AssertionError(found)


def test_replicas_die_drain_and_are_missed_by_nobody_else(
    tiny_model: Path, certificate: Certificate, tmp_path: Path
) -> None:
    """First one is killed, then one is told to stop, then the last one is gone too."""
    with ExitStack() as stack:
        servers = replicas(3, tiny_model, stack)
        nginx = stack.enter_context(proxying("replicas.conf", servers, certificate, tmp_path))
        killed, drained, last = servers
        of = homes(nginx, servers)
        every = [name for names in of.values() for name in names[:2]]

        torn = Streaming(nginx, of[killed.port][0], 4000)
        whole = Streaming(nginx, of[last.port][0], 1000)
        killed.process.kill()
        assert isinstance(torn.join().error, httpx.RemoteProtocolError)
        assert torn.pieces < 4000
        for name in every:
            assert_answered(nginx, name)
        assert whole.join().error is None

        leaving = Streaming(nginx, of[drained.port][0], 1000)
        drained.process.terminate()
        until(lambda: not listens(drained))
        for name in every:
            assert_answered(nginx, name)
        assert leaving.join().error is None
        assert drained.stop() == 0

        last.stop()
        refused = nginx.send("GET", "/v1/models")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_unavailable"
        assert int(refused.headers["retry-after"]) > 0


def assert_answered(nginx: Nginx, session: str) -> None:
    reply = nginx.send(
        "POST", "/v1/completions", json=completion(4), headers={"X-Session-Id": session}
    )
    assert reply.status_code == 200, reply.text


def listens(server: Served) -> bool:
    try:
        httpx.get(f"{server.url}/health")
    except httpx.ConnectError:
        return False
    return True


def test_an_answer_that_nobody_has_seen_yet_is_made_by_another(
    tiny_model: Path, certificate: Certificate, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        servers = replicas(2, tiny_model, stack)
        nginx = stack.enter_context(proxying("replicas.conf", servers, certificate, tmp_path))
        home = homes(nginx, servers)[servers[0].port][0]
        replies: list[httpx.Response] = []

        def ask() -> None:
            headers = {"X-Session-Id": home, "x-request-id": "twice"}
            body = completion(3000)
            replies.append(nginx.send("POST", "/v1/completions", json=body, headers=headers))

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: servers[0].status()["Running"] == 1)
        servers[0].process.kill()
        asking.join(PATIENCE)
        assert replies[0].status_code == 200
        assert replies[0].json()["usage"]["completion_tokens"] == 3000
        assert nginx.asked("twice") == [servers[0].port, servers[1].port]
