"""Two servers for the same model folder: ours and mlx-lm's.

MLX_LM names a Python that has mlx-lm installed. Both servers inherit our environment, with any
preloaded BLAS.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.ports import find_free_port
from tests.server_process import run_server

MLX_LM_VARIABLE = "MLX_LM"
TIMEOUT = 120.0

# our default on a CPU, set explicitly because figures are in units of it
CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServer:
    """model: its name in requests."""

    name: str
    port: int
    model: str


@contextlib.contextmanager
def run_ours(folder: Path, parallel: int) -> Iterator[BenchServer]:
    options = ["--parallel", str(parallel), "--cache", "radix", "--prefill-chunk", str(CHUNK)]
    with run_server(str(folder), *options) as server:
        yield BenchServer(name="ours", port=server.port, model=folder.name)


@contextlib.contextmanager
def run_mlx_lm(folder: Path) -> Iterator[BenchServer | None]:
    """Yields None if MLX_LM is not set."""
    python = os.environ.get(MLX_LM_VARIABLE)
    if python is None:
        yield None
        return
    port = find_free_port()
    command = [python, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/health")
        yield BenchServer(name="mlx-lm", port=port, model=str(folder))
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        assert process.poll() is None, (
            f"the server of {os.environ[MLX_LM_VARIABLE]} exited unexpectedly"
        )
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=TIMEOUT).status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url} is not ready")
