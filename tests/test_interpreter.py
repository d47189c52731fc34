"""What CI runs with every supported Python: a server from its start to its end, and its log.

Whatever depends on the interpreter's standard library and is not tested one by one shows here:
logging, subprocesses, sockets, compiled extensions, a clean exit.
"""

import os
import re
import signal
from typing import Any

import httpx

from tests.runners.spawning import wait_until
from tests.server_process import TIMEOUT, ServerProcess, run_server

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def ask(server: ServerProcess, **fields: Any) -> httpx.Response:
    body = {"model": "builtin", "messages": [{"role": "user", "content": "Hello"}], **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT)


def logged(server: ServerProcess, pattern: str) -> None:
    """Wait until a whole line of the log matches."""
    wait_until(lambda: any(re.fullmatch(pattern, line.rstrip("\n")) for line in server.log))


def test_a_server_answers_and_logs_its_start_its_requests_and_its_end() -> None:
    with run_server() as server:
        logged(server, r"[-\d]+ [\d:,]+ INFO \S+: .*running on http://127\.0\.0\.1:\d+.*")
        answer = ask(server, max_tokens=8)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        streamed = ask(server, max_tokens=8, stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n")
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
        assert ask(server, response_format=form).status_code == 200
        assert ask(server, model="no such model").status_code == 404
        access = r"[-\d]+ [\d:,]+ INFO app\.access \[\S+\]: POST /v1/chat/completions"
        logged(server, rf"{access} 200 ms=.* finish=(stop|length)")
        logged(server, rf"{access} 404 ms=.*")
        assert server.stop() == -signal.SIGTERM
        assert sum(" app.access " in line for line in server.log) == 4
        assert "Traceback" not in server.log_text()


def test_a_server_logs_a_model_process_that_died_and_replaces_it() -> None:
    with run_server() as server:
        status: Any = server.status()
        os.kill(status["Models"][0]["Pid"], signal.SIGKILL)
        logged(server, r"[-\d]+ [\d:,]+ ERROR \S+: .*")
        # streamed, it waits until the model is loaded again
        wait_until(lambda: ask(server, max_tokens=8, stream=True).status_code == 200)
