"""How the real server ends: what it finishes, what it breaks off, and that it says so."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.http.lines import GET, calling, eventually, post
from tests.server_process import TIMEOUT, ServerProcess, run_server
from tests.throttle import Throttle

COMPLETIONS = "/v1/completions"


def asking(tokens: int | None = None, *, stream: bool = True) -> dict[str, Any]:
    """An answer of exactly so many tokens, or one that never ends by itself."""
    body = {"model": "tiny", "prompt": "x", **tiny.UNENDING, "stream": stream}
    return body if tokens is None else {**body, "max_tokens": tokens}


@contextmanager
def started(
    model: Path, drain: float, *more: str, variables: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    arguments = ("--runner", "thread", "--drain", str(drain), *more)
    around = {**os.environ, **(variables or {})}
    with run_server(str(model), *arguments, environ=around) as server:
        yield server


class Client(threading.Thread):
    """Asks, and reads to the end. lines: of the reply that came until now. error: what the
    connection broke with."""

    def __init__(
        self, server: ServerProcess, body: Mapping[str, Any], path: str = COMPLETIONS
    ) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.status = 0
        self.error: httpx.TransportError | None = None
        self.headers: Mapping[str, str] = {}
        self._ask = ("POST", server.url + path)
        self._body = body
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(*self._ask, json=self._body, timeout=TIMEOUT) as reply:
                self.status, self.headers = reply.status_code, reply.headers
                for line in filter(None, reply.iter_lines()):
                    self.lines.append(line)
        except httpx.TransportError as error:
            self.error = error

    def begun(self) -> "Client":
        assert eventually(lambda: bool(self.lines))
        return self

    def over(self) -> "Client":
        self.join(TIMEOUT)
        assert not self.is_alive()
        return self


def here(server: ServerProcess, count: int) -> bool:
    """Whether so many answers are in the making, or wait for a place."""

    def counted() -> int:
        now = server.status()
        return now["Running"] + now["Waiting"]

    return eventually(lambda: counted() == count)


def test_a_stream_that_fits_the_drain_time_is_not_lost(
    tiny_model: Path, throttle: Throttle
) -> None:
    slow = throttle.on().variables
    with started(tiny_model, 60, "--runner", "process", variables=slow) as server:
        streams = [Client(server, asking(900)).begun() for _ in range(4)]
        whole = Client(server, asking(900, stream=False))
        assert here(server, 5)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: "shutting down (5 requests" in server.log_text())
        throttle.off()
        for stream in streams:
            assert stream.over().lines[-1] == "data: [DONE]"
            last = json.loads(stream.lines[-2].removeprefix("data: "))
            assert last["choices"][0]["finish_reason"] == "length"
        assert whole.over().status == 200
        assert json.loads(whole.lines[0])["usage"]["completion_tokens"] == 900
        assert server.stop(0) == -signal.SIGTERM
        assert "Traceback" not in server.log_text()


def test_what_does_not_fit_ends_with_an_error_in_its_own_words(long_model: Path) -> None:
    with started(long_model, 0.3) as server:
        stream = Client(server, asking()).begun()
        # this dialect has no way to forbid the end, to which the model never comes by itself
        knobs = {"num_predict": tiny.LONG // 2, "temperature": 0}
        lines = Client(server, {"prompt": "x", "options": knobs}, "/completion")
        lines.begun()
        whole = Client(server, asking(stream=False))
        assert here(server, 3)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        told = json.loads(stream.over().lines[-2].removeprefix("data: "))
        assert told["error"]["code"] == "server_stopping"
        assert stream.lines[-1] == "data: [DONE]"
        assert "the server is shutting down" in lines.over().lines[-1]
        assert whole.over().status == 503
        assert whole.headers["retry-after"] == "1"
        assert json.loads(whole.lines[0])["error"]["code"] == "server_stopping"
        assert server.stop(0) == 0
        assert time.monotonic() - begun < 30
        assert "Traceback" not in server.log_text()


def test_nobody_is_served_any_more_while_answers_end(long_model: Path) -> None:
    with started(long_model, 60) as server, calling(server.port) as connect:
        idle, half = connect(), connect()
        assert idle.say(GET).reply().status == 200
        half.say(GET[:10])
        stream = Client(server, asking()).begun()
        server.process.send_signal(signal.SIGTERM)
        assert idle.closed()
        refused = half.reply()
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert refused.error["code"] == "server_stopping"
        with pytest.raises(ConnectionRefusedError):
            connect()
        assert stream.is_alive()
        # told again
        begun = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(TIMEOUT) == -signal.SIGINT
        # instead of after the 60 seconds that the answer has
        assert time.monotonic() - begun < 30
        assert stream.over().error is not None


def test_a_client_that_does_not_read_does_not_keep_the_server(long_model: Path) -> None:
    with started(long_model, 0.1) as server, calling(server.port) as connect:
        line = connect()
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        told = {**asking(), "logprobs": 5}
        line.say(post(told, COMPLETIONS))
        trickle = connect().say(post(told, COMPLETIONS)[:-5])
        assert here(server, 1)
        begun = time.monotonic()
        assert server.stop() == -signal.SIGTERM
        assert time.monotonic() - begun < 30
        assert "Traceback" not in server.log_text()
        assert trickle.closed()


def test_a_server_without_clients_ends_at_once(tiny_model: Path) -> None:
    with started(tiny_model, 60) as server, calling(server.port) as connect:
        assert connect().say(GET).reply().status == 200
        begun = time.monotonic()
        assert server.stop() == -signal.SIGTERM
        assert time.monotonic() - begun < 30
