"""A real server: the command, in a process of its own, on a port of its own."""

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

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 60.0

# what coverage sets for processes that it is to trace
UNTRACED = {"COVERAGE_PROCESS_CONFIG": ""}


class ServerProcess:
    """A running `mlxrunner serve`. log: what it wrote so far. environ: what its environment holds
    beside ours. ssl_context: who signed its certificate, for a client. max_open_files: how many it
    may have open, where not as many as we."""

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        max_open_files: int | None = None,
    ) -> None:
        command = [sys.executable, "-m", "app", "serve", "--port", "0", *arguments]
        if max_open_files is not None:
            command = ["/bin/sh", "-c", f'ulimit -n {max_open_files}; exec "$@"', "sh", *command]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log: list[str] = []
        # one for all: a client of its own takes 30 ms to make, most of it for certificates
        self._http = httpx.Client(verify=True if ssl_context is None else ssl_context)
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
        deadline = time.monotonic() + TIMEOUT
        while self._http.get(f"{self.url}/health").status_code != 200:
            assert time.monotonic() < deadline, self.log_text()
            time.sleep(0.02)
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
) -> Iterator[ServerProcess]:
    """Arguments of `mlxrunner serve`. It is killed in the end, when what coverage has noted of it
    is lost, so it is not traced either: that takes half as long again. One that ends by itself may
    be, with `variables=os.environ`."""
    server = ServerProcess(arguments, {**UNTRACED, **(environ or {})}, ssl_context, max_open_files)
    try:
        yield server.wait_until_ready()
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.stop()
