"""A server in a child process, which runs as long as its parent needs it.

Knows: the command that runs a server, its readiness, its log file. Must not know: the reason why
the parent needs a server.

This module is also the program of the child. The child exits if its parent exits for any reason. It
has its own session, so that Ctrl-C in the terminal does not stop it.
"""

import http.client
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from app.core.errors import AppError, ErrorKind

# the number of seconds for one request to the server, between two readiness checks, and for a
# shutdown
_REQUEST_TIMEOUT = 10.0
_POLL_INTERVAL = 0.05
_STOP_TIMEOUT = 10.0

_MAX_REASON_CHARS = 1000


def get_json(
    url: str, api_key: str | None = None, timeout: float = _REQUEST_TIMEOUT
) -> tuple[int, Mapping[str, Any]]:
    """Returns the status and the JSON object of a GET request, {} for any other body. Ignores
    proxies. Raises OSError if there is no server."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=timeout) as reply:
            status, body = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read()
    except http.client.HTTPException:  # another protocol
        return 0, {}
    try:
        parsed: Any = json.loads(body)
    except ValueError:
        return status, {}
    return status, cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}


class LaunchedServer:
    """A server process. arguments: of `mlxrunner serve`. log_file: receives its output.

    Use it as a context manager: the server stops when the context exits.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], log_file: Path
    ) -> None:
        self._log_file = log_file
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_until_ready(self, url: str) -> None:
        """Returns when the server has loaded its model. A load that makes no progress ends by the
        server's own timeout. Raises AppError(ENGINE) if the server exits."""
        while True:
            if self._process.poll() is not None:
                raise AppError(ErrorKind.ENGINE, f"the server did not start: {self._find_reason()}")
            try:
                status, _ = get_json(f"{url}/health")
            except OSError:
                status = 0
            if status == 200:
                return
            time.sleep(_POLL_INTERVAL)

    def stop(self) -> None:
        """Stops the server. The program has ended, so no request needs its response."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _find_reason(self) -> str:
        """Returns the error line of the server, otherwise the last line of its log."""
        text = self._log_file.read_text("utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()] or ["it printed nothing"]
        prefix = "mlxrunner: "
        messages = [line for line in lines if line.startswith(prefix)] or lines
        return messages[-1].removeprefix(prefix)[:_MAX_REASON_CHARS]


def _run_child() -> None:
    import os
    import runpy

    from app.runners.parent_watch import exit_with_parent

    exit_with_parent(os.getppid())
    sys.argv = ["mlxrunner", "serve", *sys.argv[1:]]
    runpy.run_module("app", run_name="__main__")


if __name__ == "__main__":
    _run_child()
