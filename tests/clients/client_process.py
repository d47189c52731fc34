"""Runs a client to its end."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.server_process import TIMEOUT, ServerProcess
from tests.waiting import wait_until

# Seconds. On a busy machine, the imports of a library without bytecode take two minutes.
CLIENT_TIMEOUT = 5 * TIMEOUT


def run_client(
    command: list[str], environment: Mapping[str, str], folder: Path, server: ServerProcess
) -> str:
    """Runs the command like `run_to_end`. The server must have no running request and no failure at
    the end."""
    output = run_to_end(command, environment, folder, server, CLIENT_TIMEOUT)
    # the server notices a disconnect a moment later
    wait_until(lambda: server.status()["Running"] == 0)
    status = server.status()
    assert (status["Status"], status["Failures"]) == (0, 0)
    return output


def run_to_end(
    command: list[str],
    environment: Mapping[str, str],
    folder: Path,
    server: ServerProcess,
    timeout: float,
) -> str:
    """Runs the command, which must succeed, and returns its output."""
    process = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert process.returncode == 0, (
        f"{process.stdout[-6000:]}\n--- the server ---\n{server.log_text()[-4000:]}"
    )
    return process.stdout
