"""`make bench ARGS=graph`: the host's work for a decode step on a GPU, ours and mlx-lm's.

Both build the graphs that a Metal GPU would get, with one stub per fused function, and a CPU stands
in for the GPU that takes them. The absolute times therefore mean little. The two libraries take
turns, and the ratio is the median of the ratios of all turns. MLX_LM names a Python that has mlx-lm
installed (see benchmarks/server_pair.py); by default it is this one.
"""

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.server_pair import MLX_LM_VARIABLE
from tests.device import models
from tests.server_process import ROOT

TURNS = 9
ROWS = (1, 8, 32)

# 4-bit weights
MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense, 28 layers": models.DENSE,
    "experts, 48 layers": {**models.EXPERTS, "num_hidden_layers": 48, "num_experts": 32},
}

# The highest ratios of the sums of the times, by rows, for the dense model.
TARGETS: Mapping[int, float] = {1: 1.2, 8: 1.7}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """The milliseconds to build a graph and to dispatch it. nodes, launches: see
    `tests.device.graph_counts.GraphCounts`."""

    build: float
    eval: float
    nodes: int
    launches: int

    @property
    def total(self) -> float:
        return self.build + self.eval


def report() -> str:
    lines = [
        "the host's work for a decode step on a GPU, with stubs: medians, ms of CPU time",
        "",
        "| model | rows | | nodes | launches | build | dispatch | ratio | target |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, config in MODELS.items():
        for rows in ROWS:
            target = TARGETS.get(rows) if config is models.DENSE else None
            lines += format_rows(name, rows, _measure(config, rows), target)
            print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def format_rows(
    name: str, rows: int, found: Mapping[str, Sequence[HostWork]], target: float | None
) -> Iterator[str]:
    for library, turns in found.items():
        cells = [name, str(rows), library, str(turns[0].nodes), str(turns[0].launches)]
        cells += [f"{statistics.median(turn.build for turn in turns):.2f}"]
        cells += [f"{statistics.median(turn.eval for turn in turns):.2f}"]
        ratio = ""
        if library == "ours" and "mlx-lm" in found:
            pairs = zip(turns, found["mlx-lm"], strict=True)
            ratio = f"{statistics.median(a.total / b.total for a, b in pairs):.2f}"
        limit = "" if target is None or not ratio else f"≤ {target}"
        yield f"| {' | '.join([*cells, ratio, limit])} |"


def _measure(config: Mapping[str, Any], rows: int) -> dict[str, list[HostWork]]:
    with contextlib.ExitStack() as stack:
        workers = {
            library: stack.enter_context(_run_worker(python, library, config, rows))
            for library, python in _find_pythons().items()
        }
        found: dict[str, list[HostWork]] = {library: [] for library in workers}
        for _ in range(TURNS):
            for library, worker in workers.items():
                found[library].append(_take_turn(worker))
    return found


def _find_pythons() -> dict[str, str]:
    named = os.environ.get(MLX_LM_VARIABLE)
    has_library = importlib.util.find_spec("mlx_lm") is not None
    theirs = named or (sys.executable if has_library else None)
    return {"ours": sys.executable} | ({} if theirs is None else {"mlx-lm": theirs})


@contextlib.contextmanager
def _run_worker(
    python: str, library: str, config: Mapping[str, Any], rows: int
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [python, "-m", "benchmarks.graph_worker", library, json.dumps(dict(config)), str(rows)],
        cwd=ROOT,
        env={**os.environ, "MLXRUNNER_KERNELS": "off", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _take_turn(worker: subprocess.Popen[str]) -> HostWork:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    assert line, "the worker has ended"
    return HostWork(**json.loads(line))
