"""The backends of bare loops: worker processes that keep a model loaded and measure on request.

Knows: both ends of the protocol with a worker. Must not know: what is measured, llama.cpp. Requests
and responses are lines of JSON; the first line of the worker, before any request, describes its
backend. The log of the worker is reported only if it exits unexpectedly.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from benchmarks.cpu_cells import CACHED, PROMPT, Measurement, Workload

ROOT = Path(__file__).resolve().parents[1]

# variables that would change the backend
CLEARED_VARIABLES = (
    "LD_PRELOAD",
    "MLXRUNNER_BLAS",
    "MLXRUNNER_ISA",
    "MLXRUNNER_KERNELS",
    "MLXRUNNER_THREADS",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
)


class BackendError(Exception):
    """A backend ended by itself. The message has the end of its log."""


class Backend(Protocol):
    """runs_on: its version and settings. patience: after a measurement that took longer than this
    many seconds, the cell is not measured again. works: the workloads that it measures; None for
    all."""

    name: str
    runs_on: str
    patience: float
    works: Collection[Workload] | None

    def measure(self, work: Workload, budget: float) -> Measurement: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...


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


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """folder: in which it runs. one_context: whether a process can measure one length of the cache
    only, as in older commits."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    folder: Path = ROOT
    one_context: bool = False


class BackendProcess:
    def __init__(
        self,
        name: str,
        worker: WorkerCommand,
        *,
        capped: bool = False,
        patience: float = math.inf,
        works: Collection[Workload] | None = None,
    ) -> None:
        self.name = name
        self.patience = patience
        self.works = works
        self._worker = worker
        self._capped = capped
        self._context: int | None = None
        self._start()

    def measure(self, work: Workload, budget: float) -> Measurement:
        """Raises BackendError."""
        lengths = {"cached": work.tokens} if work.streams else {"prompt": work.tokens}
        request = MeasureRequest(
            streams=work.streams, budget=budget, capped=self._capped, **lengths
        )
        if self._worker.one_context and work.streams:
            if self._context not in (None, work.tokens):
                self._stop()
                self._start()
            self._context = work.tokens
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(request)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_read` raises
        return Measurement(**self._read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in `_stop`
        self._process = subprocess.Popen(
            self._worker.command,
            cwd=self._worker.folder,
            env=make_environment(self._worker.variables),
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

    def _stop(self) -> None:
        if self._log.closed:
            return
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            log = self._log.read()[-2000:]
            raise BackendError(f"{self.name} ended by itself with status {status}:\n{log}")
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
