"""Shutdown of the real server: the requests that it finishes, those that it aborts, and their
errors."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.http.raw_client import GET, open_connections, post
from tests.server_process import TIMEOUT, ServerProcess, run_server
from tests.throttle import Throttle
from tests.waiting import wait_until

COMPLETIONS = "/v1/completions"

# Seconds of a drain that ends earlier: the test would fail after `TIMEOUT`.
NEVER = 100 * TIMEOUT


def build_body(tokens: int | None = None, *, stream: bool = True) -> dict[str, Any]:
    """A request for exactly this many tokens, or for an endless answer."""
    body = {"model": "tiny", "prompt": "x", **tiny.UNENDING, "stream": stream}
    return body if tokens is None else {**body, "max_tokens": tokens}


@contextmanager
def run_with_drain(
    model: Path, drain: float, *options: str, variables: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    arguments = ("--runner", "thread", "--drain", str(drain), *options)
    environ = {**os.environ, **(variables or {})}
    with run_server(str(model), *arguments, environ=environ) as server:
        yield server


class Client(threading.Thread):
    """Sends a request and reads to the end. lines: the lines received so far. error: the error of
    the connection."""

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

    def wait_until_begun(self) -> "Client":
        wait_until(lambda: bool(self.lines), limit=TIMEOUT)
        return self

    def wait_until_done(self) -> "Client":
        self.join(TIMEOUT)
        assert not self.is_alive()
        return self


def wait_for_requests(server: ServerProcess, count: int) -> None:
    """Returns when this many requests are running or waiting."""

    def count_requests() -> int:
        status = server.status()
        return status["Running"] + status["Waiting"]

    wait_until(lambda: count_requests() == count, limit=TIMEOUT)


def test_requests_that_finish_within_the_drain_time_are_completed(
    tiny_model: Path, throttle: Throttle
) -> None:
    throttled = throttle.on().variables
    with run_with_drain(tiny_model, 60, "--runner", "process", variables=throttled) as server:
        streams = [Client(server, build_body(900)).wait_until_begun() for _ in range(4)]
        unstreamed = Client(server, build_body(900, stream=False))
        wait_for_requests(server, 5)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "shutting down (5 requests" in server.log_text(), limit=TIMEOUT)
        throttle.off()
        for stream in streams:
            assert stream.wait_until_done().lines[-1] == "data: [DONE]"
            last = json.loads(stream.lines[-2].removeprefix("data: "))
            assert last["choices"][0]["finish_reason"] == "length"
        assert unstreamed.wait_until_done().status == 200
        assert json.loads(unstreamed.lines[0])["usage"]["completion_tokens"] == 900
        assert server.stop(0) == -signal.SIGTERM
        assert "Traceback" not in server.log_text()


def test_unfinished_requests_end_with_an_error_in_their_dialect(long_model: Path) -> None:
    with run_with_drain(long_model, 0.3) as server:
        stream = Client(server, build_body()).wait_until_begun()
        # this dialect has no ignore_eos, but this model never generates the end of text
        knobs = {"num_predict": tiny.LONG // 2, "temperature": 0}
        lines = Client(server, {"prompt": "x", "options": knobs}, "/completion")
        lines.wait_until_begun()
        unstreamed = Client(server, build_body(stream=False))
        wait_for_requests(server, 3)
        server.process.send_signal(signal.SIGINT)
        error = json.loads(stream.wait_until_done().lines[-2].removeprefix("data: "))
        assert error["error"]["code"] == "server_stopping"
        assert stream.lines[-1] == "data: [DONE]"
        assert "the server is shutting down" in lines.wait_until_done().lines[-1]
        assert unstreamed.wait_until_done().status == 503
        assert unstreamed.headers["retry-after"] == "1"
        assert json.loads(unstreamed.lines[0])["error"]["code"] == "server_stopping"
        assert server.stop(0) == 0
        assert "Traceback" not in server.log_text()


def test_new_requests_are_rejected_during_the_drain(long_model: Path) -> None:
    with run_with_drain(long_model, NEVER) as server, open_connections(server.port) as connect:
        idle, half = connect(), connect()
        assert idle.send(GET).read_reply().status == 200
        half.send(GET[:10])
        stream = Client(server, build_body()).wait_until_begun()
        server.process.send_signal(signal.SIGTERM)
        assert idle.is_closed()
        refused = half.read_reply()
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert refused.error["code"] == "server_stopping"
        with pytest.raises(ConnectionRefusedError):
            connect()
        assert stream.is_alive()
        # the second signal
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(TIMEOUT) == -signal.SIGINT
        assert stream.wait_until_done().error is not None


def test_a_client_that_does_not_read_does_not_delay_the_shutdown(long_model: Path) -> None:
    with run_with_drain(long_model, 0.1) as server, open_connections(server.port) as connect:
        client = connect()
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {**build_body(), "logprobs": 5}
        client.send(post(body, COMPLETIONS))
        incomplete = connect().send(post(body, COMPLETIONS)[:-5])
        wait_for_requests(server, 1)
        assert server.stop() == -signal.SIGTERM
        assert "Traceback" not in server.log_text()
        assert incomplete.is_closed()


def test_a_server_without_requests_stops_at_once(tiny_model: Path) -> None:
    with run_with_drain(tiny_model, NEVER) as server, open_connections(server.port) as connect:
        assert connect().send(GET).read_reply().status == 200
        assert server.stop() == -signal.SIGTERM
