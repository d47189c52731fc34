"""The page of examples/browser in a real browser, served from another port than the API."""

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
    """The example, as `python -m http.server` serves it."""
    handler = functools.partial(_Quiet, directory=str(ROOT / "examples" / "browser"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield f"http://localhost:{web.server_port}/"
        web.shutdown()
        thread.join(TIMEOUT)


@pytest.fixture(scope="module")
def throttle(tmp_path_factory: pytest.TempPathFactory) -> Throttle:
    return Throttle(tmp_path_factory.mktemp("browser") / "throttle")


@pytest.fixture(scope="module")
def server(throttle: Throttle) -> Iterator[ServerProcess]:
    """One whose answers are long enough to be seen while they are written, and may have no end."""
    endless = ("--context-shift", "--cache", "slots")
    with run_server(*endless, environ=throttle.variables) as running:
        yield running


@pytest.fixture(scope="module")
def seen(
    server: ServerProcess, page: str, node: str, chrome: str, throttle: Throttle
) -> dict[str, Any]:
    """What tests/clients/browser.mjs tells."""
    throttle.on()
    driver = Path(__file__).parent / "browser.mjs"
    done = subprocess.run(
        [node, str(driver), chrome, page, server.url],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
        check=False,
    )
    throttle.off()
    assert done.returncode == 0, f"{done.stderr}\n--- the server ---\n{server.log_text()[-4000:]}"
    return json.loads(done.stdout)


def test_an_answer_comes_piece_by_piece(seen: dict[str, Any], server: ServerProcess):
    asked = {"role": "user", "content": "Hello! Who are you?"}
    body = {"model": "builtin", "messages": [asked], "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT)
    assert seen["whole"]["text"] == reply.json()["choices"][0]["message"]["content"]
    lengths = [length for _, length in seen["whole"]["seen"]]
    assert len(set(lengths)) > 3
    assert lengths == sorted(lengths)
    times = [at for at, _ in seen["whole"]["seen"]]
    assert times[-1] > times[0], "all of it came at once"


def test_the_stop_button_frees_the_server(seen: dict[str, Any]):
    assert seen["stopped"] == {"before": 1, "after": 0}


def test_a_refusal_is_shown(seen: dict[str, Any]):
    assert "temperature" in seen["refused"]["state"]
    assert seen["errors"] == []
