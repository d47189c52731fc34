"""A worker process that keeps its model loaded and measures a cell on request.

Knows: both ends of the protocol with the worker. Must not know: what is measured. Requests and
responses are lines of JSON; the first line of the worker, before any request, describes its
backend. The log of the worker is reported only if it exits unexpectedly.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tests.bench.cpu_cells import CACHED, PROMPT, Measurement, Workload

ROOT = Path(__file__).resolve().parents[2]

# variables that would change the backend
CLEARED_VARIABLES = (
    "LD_PRELOAD",
    "MLXRUNNER_BLAS",
    "MLXRUNNER_KERNELS",
    "MLXRUNNER_THREADS",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
)


def make_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Our environment without variables set for other measurements, and with `variables`."""
    inherited = {name: value for name, value in os.environ.items() if name not in CLEARED_VARIABLES}
    return {**inherited, **variables}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest:
    """streams: as in Workload. budget: seconds to measure for. capped: whether prompt and steps can
    be shortened if one of them takes longer than the budget."""

    streams: int
    budget: float
    capped: bool
    prompt: int = PROMPT
    cached: int = CACHED


class BackendProcess:
    def __init__(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        capped: bool = False,
    ) -> None:
        self.name = name
        self._capped = capped
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in `_stop`
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=make_environment(variables or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.runs_on: str = self._read()["runs_on"]
        except BaseException:
            self._stop()
            raise

    def measure(self, work: Workload, budget: float) -> Measurement:
        request = MeasureRequest(streams=work.streams, budget=budget, capped=self._capped)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(request)) + "\n")
        self._process.stdin.flush()
        return Measurement(**self._read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended by itself:\n{self._log.read()[-2000:]}")
        return json.loads(line)


def serve_measurements(
    measure: Callable[[dict[str, Any]], tuple[float, int]], runs_on: str
) -> None:
    """The worker's end: serve requests until the input ends. measure: from a MeasureRequest to
    tokens per second, and the number of steps or tokens measured."""
    print(json.dumps({"runs_on": runs_on}), flush=True)
    for line in sys.stdin:
        wall, processor = time.perf_counter(), time.process_time()
        rate, count = measure(json.loads(line))
        seconds = time.perf_counter() - wall
        found = {"rate": rate, "count": count, "seconds": seconds}
        cores = (time.process_time() - processor) / seconds
        print(json.dumps({**found, "cores": cores}), flush=True)
