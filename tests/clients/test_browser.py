"""The page of examples/browser in a real browser, served from a different port than the API."""

import functools
import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server_process import ROOT, TIMEOUT, ServerProcess, run_server
from tests.throttle import Throttle


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """The URL of the example, served as by `python -m http.server`."""
    handler = functools.partial(_Quiet, directory=str(ROOT / "examples" / "browser"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        yield f"http://localhost:{http_server.server_port}/"
        http_server.shutdown()
        thread.join(TIMEOUT)


@pytest.fixture(scope="module")
def throttle(tmp_path_factory: pytest.TempPathFactory) -> Throttle:
    return Throttle(tmp_path_factory.mktemp("browser") / "throttle")


@pytest.fixture(scope="module")
def server(throttle: Throttle) -> Iterator[ServerProcess]:
    """A server whose answers are long enough to be observed while they are streamed, and may be
    endless."""
    options = ("--context-shift", "--cache", "slots")
    with run_server(*options, environ=throttle.variables) as server:
        yield server


@pytest.fixture(scope="module")
def observed(
    server: ServerProcess, page: str, node: str, chrome: str, throttle: Throttle
) -> dict[str, Any]:
    """The output of tests/clients/browser.mjs."""
    throttle.on()
    driver = Path(__file__).parent / "browser.mjs"
    process = subprocess.run(
        [node, str(driver), chrome, page, server.url],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
        check=False,
    )
    throttle.off()
    assert process.returncode == 0, (
        f"{process.stderr}\n--- the server ---\n{server.log_text()[-4000:]}"
    )
    return json.loads(process.stdout)


def test_an_answer_is_shown_while_it_is_streamed(observed: dict[str, Any], server: ServerProcess):
    message = {"role": "user", "content": "Hello! Who are you?"}
    body = {"model": "builtin", "messages": [message], "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT)
    assert observed["whole"]["text"] == reply.json()["choices"][0]["message"]["content"]
    lengths = [length for _, length in observed["whole"]["seen"]]
    assert len(set(lengths)) > 3
    assert lengths == sorted(lengths)
    times = [time for time, _ in observed["whole"]["seen"]]
    assert times[-1] > times[0], "the answer was not streamed"


def test_the_stop_button_frees_the_server(observed: dict[str, Any]):
    assert observed["stopped"] == {"before": 1, "after": 0}


def test_an_error_is_shown(observed: dict[str, Any]):
    assert "temperature" in observed["refused"]["state"]
    assert observed["errors"] == []
