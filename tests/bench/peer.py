"""Two servers of the same model folder, side by side: ours and mlx-lm's.

MLX_LM names a Python that has mlx-lm installed. Both servers inherit our environment, and with it
whatever BLAS is preloaded.
"""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.serving import serving

VARIABLE = "MLX_LM"
PATIENCE = 120.0

# our default on a CPU, said aloud because figures are told in units of it
CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """model: what requests have to call it."""

    name: str
    port: int
    model: str


@contextlib.contextmanager
def ours(folder: Path, parallel: int) -> Iterator[Server]:
    options = ["--parallel", str(parallel), "--cache", "radix", "--prefill-chunk", str(CHUNK)]
    with serving(str(folder), *options) as server:
        yield Server(name="ours", port=server.port, model=folder.name)


@contextlib.contextmanager
def theirs(folder: Path) -> Iterator[Server | None]:
    """None where MLX_LM is not set."""
    python = os.environ.get(VARIABLE)
    if python is None:
        yield None
        return
    port = _free_port()
    command = [python, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health")
        yield Server(name="mlx-lm", port=port, model=str(folder))
    finally:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server of {os.environ[VARIABLE]} exited unexpectedly"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url} is not ready")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]
