"""llama.cpp by its own programs: llama-batched-bench for bare loops, and llama-server.

Knows: the programs' options and output. Must not know: MLX, workers, HTTP. The variable LLAMA_CPP
names the folder that has the programs:

    cmake -B build -DCMAKE_BUILD_TYPE=Release
    cmake --build build --target llama-server llama-batched-bench
    LLAMA_CPP=build/bin make bench-cpu

With GCC 12, a build for a processor with AMX crashes when it computes with 4- or 8-bit weights:
GCC's `_tile_loadconfig` declares that it reads 8 of 64 bytes. In ggml-cpu/amx/mmq.cpp, replace its
call with `asm volatile("ldtilecfg %0" :: "m"(tc) : "memory")`, or use a newer compiler.
"""

import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.cpu_backends import BackendError, make_environment
from benchmarks.cpu_cells import Measurement, Workload
from benchmarks.cpu_tables import LLAMA

VARIABLE = "LLAMA_CPP"
BENCH, SERVER = "llama-batched-bench", "llama-server"
STEPS, MAX_REPEATS, TIMEOUT, PATIENCE = 16, 9, 900.0, 60.0
# runs until there is a measurement: the program may exit before its log thread has printed all
ATTEMPTS = 5
# contexts are a multiple of this many positions
_ROUND = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaPrograms:
    """system_info: the line that llama-server prints. features: those of ggml's CPU backend, from
    this line."""

    folder: Path
    system_info: str

    @property
    def features(self) -> Mapping[str, bool]:
        return parse_features(self.system_info)

    @property
    def description(self) -> str:
        tiles = "on" if self.features.get("AMX_INT8") else "off"
        enabled = [name for name, is_on in self.features.items() if is_on]
        return f"tiles {tiles} ({', '.join(enabled) or 'no features'})"


def find_programs() -> LlamaPrograms | None:
    """The programs in the folder that the variable names; None if it is not set. Raises ValueError
    if one is missing or does not run."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return None
    folder = Path(named).resolve()
    for program in (BENCH, SERVER):
        if not (folder / program).is_file():
            raise ValueError(f"{VARIABLE}: {folder} has no {program}")
    # the line is printed before the model is found to be missing
    command = [str(folder / SERVER), "--log-verbosity", "4", "--offline", "-m", "missing.gguf"]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=make_environment({}), timeout=60, check=False
    )
    printed = ran.stdout + ran.stderr
    found = re.search(r"system_info: .*", printed)
    if found is None:
        raise ValueError(f"{VARIABLE}: {SERVER} does not print its features:\n{printed[-1000:]}")
    return LlamaPrograms(folder=folder, system_info=found[0].strip())


def parse_features(system_info: str) -> dict[str, bool]:
    """From `system_info: n_threads = 2 / 2 | CPU : SSE3 = 1 | AVX512 = 1 | ...`"""
    features = system_info.partition("CPU :")[2]
    return {name: value == "1" for name, value in re.findall(r"(\w+) = (\d+)", features)}


class BatchedBench:
    """A backend. Each measurement is a run of the program, which loads the model again."""

    def __init__(self, programs: LlamaPrograms, gguf: Path, threads: int) -> None:
        self.name = LLAMA
        self.runs_on = programs.description
        self.patience = PATIENCE
        self.works: Collection[Workload] | None = None
        self._program = programs.folder / BENCH
        self._gguf = gguf
        self._threads = threads
        # seconds of one repeat
        self._durations: dict[Workload, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def measure(self, work: Workload, budget: float) -> Measurement:
        """Raises BackendError."""
        expected = self._durations.get(work, budget)
        repeats = max(1, min(MAX_REPEATS, int(budget / expected)))
        begun = time.perf_counter()
        rows: Sequence[dict[str, Any]] = ()
        for _ in range(ATTEMPTS):
            if rows := parse_rows(self._run(work, repeats), work.tokens):
                break
        else:
            raise BackendError(f"{BENCH} printed no measurements")
        seconds = time.perf_counter() - begun
        self._durations[work] = statistics.median(row["t"] for row in rows)
        key = "speed_tg" if work.streams else "speed_pp"
        return Measurement(
            rate=statistics.median(row[key] for row in rows),
            cores=None,
            count=STEPS if work.streams else work.tokens,
            seconds=seconds,
        )

    def _run(self, work: Workload, repeats: int) -> str:
        command = [str(self._program), *make_options(work, repeats), "-m", str(self._gguf)]
        command += ["-t", str(self._threads), "-tb", str(self._threads)]
        with tempfile.TemporaryFile("w+") as log:
            ran = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=make_environment({}),
                timeout=TIMEOUT, check=False,
            )  # fmt: skip
            log.seek(0)
            if ran.returncode != 0:
                message = f"{LLAMA} ended with status {ran.returncode}:\n{log.read()[-2000:]}"
                raise BackendError(message)
        return ran.stdout


def make_options(work: Workload, repeats: int) -> Sequence[str]:
    """A prompt is followed by one step, and steps by a prompt for each stream. A prompt of one
    token is the last, so that the rows before it are printed in the meantime."""
    streams, steps = (work.streams, STEPS) if work.streams else (1, 1)
    positions = -(-(work.tokens + steps) // _ROUND) * _ROUND
    return [
        "-npp", ",".join([*[str(work.tokens)] * repeats, "1"]),
        "-ntg", str(steps),
        "-npl", str(streams),
        "-c", str(streams * positions),
        "--output-format", "jsonl",
    ]  # fmt: skip


def parse_rows(printed: str, tokens: int) -> list[dict[str, Any]]:
    """The lines of JSON about prompts of this length."""
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return [row for row in rows if row["pp"] == tokens]


def make_server_command(
    programs: LlamaPrograms, gguf: Path, port: int, *, threads: int, slots: int, positions: int
) -> Sequence[str]:
    """llama-server with continuous batching. positions: those that all slots share."""
    return [
        str(programs.folder / SERVER),
        "--model", str(gguf),
        "--host", "127.0.0.1",
        "--port", str(port),
        "--parallel", str(slots),
        "--cont-batching",
        "--kv-unified",
        "--ctx-size", str(positions),
        "--threads", str(threads),
        "--threads-batch", str(threads),
        "--no-webui",
        "--offline",
    ]  # fmt: skip
