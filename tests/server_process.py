"""A real server: the command, in its own process, on a free port."""

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 60.0

# disables coverage in child processes
UNTRACED = {"COVERAGE_PROCESS_CONFIG": ""}


class ServerProcess:
    """A running `mlxrunner serve`. log: the lines written so far. environ: additional environment
    variables. ssl_context: of the client. max_open_files: None for the limit of this process.
    module: runs the command. checkout: of the server, with its own environment; None for this
    one."""

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        max_open_files: int | None = None,
        module: str = "app",
        checkout: Path | None = None,
    ) -> None:
        python = sys.executable if checkout is None else str(checkout / ".venv/bin/python")
        command = [python, "-m", module, "serve", "--port", "0", *arguments]
        if max_open_files is not None:
            command = ["/bin/sh", "-c", f'ulimit -n {max_open_files}; exec "$@"', "sh", *command]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=checkout or ROOT,
            env={**os.environ, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log: list[str] = []
        # one client for all requests: creating one takes 30 ms, mostly for certificates
        verify = True if ssl_context is None else ssl_context
        self._http = httpx.Client(verify=verify, timeout=TIMEOUT)
        self._listening = threading.Event()
        self.port = 0
        self._scheme = "http"
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        assert self._listening.wait(TIMEOUT), self.log_text()
        assert self.port, self.log_text()
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def log_text(self) -> str:
        return "".join(self.log)

    def wait_until_ready(self) -> "ServerProcess":
        wait_until(
            lambda: self._http.get(f"{self.url}/health").status_code == 200,
            self.log_text,
            limit=TIMEOUT,
            interval=0.02,
        )
        return self

    def status(self) -> dict[str, int]:
        return self._http.get(f"{self.url}/v1/status").json()

    def stop(self, with_signal: int = signal.SIGTERM) -> int:
        """The exit status."""
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
        try:
            return self.process.wait(TIMEOUT)
        finally:
            self._http.close()
            self._reader.join(TIMEOUT)
            if self.process.stdout is not None:
                self.process.stdout.close()

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if found := re.search(r"running on (https?)://[^:]+:(\d+)", line):
                self._scheme, self.port = found[1], int(found[2])
                self._listening.set()
        self._listening.set()


@contextlib.contextmanager
def run_server(
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    ssl_context: ssl.SSLContext | None = None,
    max_open_files: int | None = None,
    module: str = "app",
    checkout: Path | None = None,
) -> Iterator[ServerProcess]:
    """Run `mlxrunner serve` with these arguments. It is killed at the end, which would lose its
    coverage data, so it is not traced: tracing takes 50 % longer. A server that ends by itself can
    be traced with `environ=os.environ`."""
    server = ServerProcess(
        arguments, {**UNTRACED, **(environ or {})}, ssl_context, max_open_files, module, checkout
    )
    try:
        yield server.wait_until_ready()
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.stop()
