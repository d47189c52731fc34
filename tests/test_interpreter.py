"""The tests that CI also runs with the newest Python: a server from start to end, and its log.

They cover the parts that depend on the interpreter's standard library: logging, subprocesses,
sockets, compiled extensions, a clean exit.
"""

import os
import re
import signal
from typing import Any

import httpx

from tests.server_process import TIMEOUT, ServerProcess, run_server
from tests.waiting import wait_until

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def send_chat(server: ServerProcess, **fields: Any) -> httpx.Response:
    body = {"model": "builtin", "messages": [{"role": "user", "content": "Hello"}], **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT)


def wait_for_log(server: ServerProcess, pattern: str) -> None:
    """Wait until a whole line of the log matches."""
    wait_until(lambda: any(re.fullmatch(pattern, line.rstrip("\n")) for line in server.log))


def test_a_server_answers_and_logs_its_start_and_its_requests() -> None:
    with run_server() as server:
        wait_for_log(server, r"[-\d]+ [\d:,]+ INFO \S+: .*running on http://127\.0\.0\.1:\d+.*")
        answer = send_chat(server, max_tokens=8)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        streamed = send_chat(server, max_tokens=8, stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n")
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
        assert send_chat(server, response_format=form).status_code == 200
        assert send_chat(server, model="no such model").status_code == 404
        access = r"[-\d]+ [\d:,]+ INFO app\.access \[\S+\]: POST /v1/chat/completions"
        wait_for_log(server, rf"{access} 200 ms=.* finish=(stop|length)")
        wait_for_log(server, rf"{access} 404 ms=.*")
        assert server.stop() == -signal.SIGTERM
        assert sum(" app.access " in line for line in server.log) == 4
        assert "Traceback" not in server.log_text()


def test_a_server_logs_and_replaces_a_crashed_model_process() -> None:
    with run_server() as server:
        status: Any = server.status()
        os.kill(status["Models"][0]["Pid"], signal.SIGKILL)
        wait_for_log(server, r"[-\d]+ [\d:,]+ ERROR \S+: .*")
        # streamed, it waits until the model is loaded again
        wait_until(lambda: send_chat(server, max_tokens=8, stream=True).status_code == 200)
