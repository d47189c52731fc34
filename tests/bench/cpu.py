"""`make bench-cpu`: our CPU kernels compared with stock MLX, llama.cpp and their servers.

make bench-cpu                                          everything
make bench-cpu ARGS="--against llama --sizes 110M --formats q4 q8 --threads 1"
make bench-cpu ARGS="profile --size 110M --format q4 --streams 8 --threads 1"

LLAMA_CPP names a Python with llama-cpp-python[server] 0.3.36 (built with its defaults), gguf and
numpy; MLX_LM one with mlx-lm, which .venv also has; BLAS the OpenBLAS that is preloaded for mlx-lm,
by default that of the system. Without LLAMA_CPP its columns are left out.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench import cpu_http, cpu_profile
from tests.bench.cpu_backends import CLEARED_VARIABLES, ROOT, BackendProcess, make_environment
from tests.bench.cpu_cells import (
    CACHED,
    FORMATS,
    PROMPT,
    SHAPES,
    WORKLOADS,
    Cell,
    CellRounds,
    format_table,
    format_verdicts,
    median_cores,
)

LLAMA_VARIABLE = "LLAMA_CPP"
BASELINES = ("stock", "llama", "http")
STOCK = {"MLXRUNNER_KERNELS": "off", "MLXRUNNER_BLAS": "stock"}

# a backend that took this many budgets for a cell is not measured again
MAX_BUDGETS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """budget: seconds per cell, backend and round. llama: the Python that has llama.cpp."""

    sizes: Sequence[str]
    formats: Sequence[str]
    threads: Sequence[int]
    baselines: Sequence[str]
    rounds: int
    budget: float
    llama: str | None

    @property
    def is_complete(self) -> bool:
        """Whether the figures can replace the published ones."""
        return set(BASELINES) == set(self.baselines) and self.llama is not None and self.rounds >= 3


def main() -> None:
    arguments = _parse_arguments()
    for name in CLEARED_VARIABLES:
        os.environ.pop(name, None)
    if arguments.what == "profile":
        selection = (arguments.size, arguments.format, arguments.streams, arguments.threads[-1])
        print(cpu_profile.report(*selection))
        return
    plan = Plan(
        sizes=arguments.sizes,
        formats=arguments.formats,
        threads=sorted(arguments.threads),
        baselines=arguments.against,
        rounds=arguments.rounds,
        budget=arguments.budget,
        llama=os.environ.get(LLAMA_VARIABLE),
    )
    print(_describe_machine(plan), flush=True)
    if {"stock", "llama"} & set(plan.baselines):
        for line in run_bare_loops(plan, arguments.raw):
            print(line, flush=True)
    if "http" in plan.baselines:
        # a partial measurement does not replace the plot
        plot = arguments.plot or (ROOT / cpu_http.PLOT if plan.is_complete else None)
        threads = max(plan.threads)
        print(cpu_http.report(threads, plan.rounds, plan.llama, plot), flush=True)


def run_bare_loops(plan: Plan, raw: Path | None = None) -> Iterator[str]:
    """The tables of bare loops. raw: a file to which each measurement is appended as a line of
    JSON."""
    found: dict[Cell, CellRounds] = {}
    # ordered and unique, so that readers see if a backend was not always the same
    runs_on: dict[str, None] = {}
    for size, form in itertools.product(plan.sizes, plan.formats):
        with tempfile.TemporaryDirectory() as place:
            files = _write_models(Path(place), size, form, plan)
            for threads in plan.threads:
                with contextlib.ExitStack() as stack:
                    backends = [
                        stack.enter_context(backend)
                        for backend in _make_backends(files, threads, plan)
                    ]
                    runs_on |= {f"{backend.name}: {backend.runs_on}": None for backend in backends}
                    print(
                        *(f"{backend.name}: {backend.runs_on}" for backend in backends),
                        sep="\n",
                        file=sys.stderr,
                    )
                    cells = [
                        Cell(size=size, form=form, threads=threads, workload=work)
                        for work in WORKLOADS
                    ]
                    for cell, name, measured in _measure_rounds(backends, cells, plan):
                        found.setdefault(cell, CellRounds()).add(name, measured)
                        if raw is not None:
                            line = {"cell": str(cell), "arm": name, **asdict(measured)}
                            with raw.open("a") as file:
                                file.write(json.dumps(line) + "\n")
    yield "\n".join(f"- {backend}" for backend in runs_on)
    for other, note in (("stock", _STOCK_NOTE), ("llama", _LLAMA_NOTE)):
        if lines := format_table(found, other):
            yield "\n".join(["", f"### Against {other}", "", note, "", *lines])
    for threads in plan.threads:
        busy = {name: median_cores(found, name, threads) for name in ("ours", "llama")}
        cores = ", ".join(
            f"{name} {value:.2f}" for name, value in busy.items() if value is not None
        )
        yield f"\nCores kept busy with {threads} thread(s), median of cells: {cores}"
    yield "\n".join(["", "Targets:", *format_verdicts(found)])


_TABLE_NOTE = (
    "Tokens/s, ours / theirs = **ratio** (range of the rounds' ratios). Decode: greedy, with "
    f"so many streams together, after {CACHED} cached positions; prefill: {PROMPT} tokens at once."
)
_STOCK_NOTE = (
    f"{_TABLE_NOTE} Stock MLX has one thread, and is measured beside ours on the fewest; "
    "[n, r] is where "
    "it was measured on n steps or prompt tokens only, or in r rounds, because more take too long."
)
_LLAMA_NOTE = (
    f"{_TABLE_NOTE} Threads are those that compute: with one, Python builds the graph of "
    "the next step "
    "on another thread meanwhile, which llama.cpp does not need."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelFiles:
    folder: Path
    gguf: Path | None


def _write_models(place: Path, size: str, form: str, plan: Plan) -> _ModelFiles:
    """Write the models in separate processes, which free their memory on exit."""
    print(f"writing {size} {form}", file=sys.stderr)
    folder = place / size
    _run([sys.executable, "-m", "tests.bench.cpu_models", str(folder), size, form])
    if plan.llama is None or "llama" not in plan.baselines:
        return _ModelFiles(folder=folder, gguf=None)
    gguf = place / f"{size}.gguf"
    _run([plan.llama, "-m", "tests.bench.cpu_gguf", str(gguf), size, form])
    return _ModelFiles(folder=folder, gguf=gguf)


def _make_backends(files: _ModelFiles, threads: int, plan: Plan) -> Iterator[BackendProcess]:
    mlx = [sys.executable, "-m", "tests.bench.cpu_worker"]
    folder = str(files.folder)
    yield BackendProcess("ours", [*mlx, "ours", folder], {"MLXRUNNER_THREADS": str(threads)})
    if files.gguf is not None and plan.llama is not None:
        command = [plan.llama, "-m", "tests.bench.cpu_llama", str(files.gguf), str(threads)]
        yield BackendProcess("llama", command)
    if "stock" in plan.baselines and threads == min(plan.threads):
        yield BackendProcess("stock", [*mlx, "stock", folder], STOCK, capped=True)


def _measure_rounds(
    backends: Sequence[BackendProcess], cells: Sequence[Cell], plan: Plan
) -> Iterator[tuple]:
    """Cell, name of the backend, measurement. Backends alternate, in reverse order every other
    round."""
    finished: set[tuple[str, Cell]] = set()
    for turn in range(plan.rounds):
        for cell in cells:
            for backend in backends if turn % 2 == 0 else reversed(backends):
                if (backend.name, cell) in finished:
                    continue
                measured = backend.measure(cell.workload, plan.budget)
                if backend.name == "stock" and measured.seconds > MAX_BUDGETS * plan.budget:
                    finished.add((backend.name, cell))
                shown = f"{measured.rate:.4g} tokens/s, {measured.cores:.2f} cores"
                print(f"{cell}, round {turn}, {backend.name}: {shown}", file=sys.stderr)
                yield cell, backend.name, measured


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, cwd=ROOT, env=make_environment({}), check=True)


def _describe_machine(plan: Plan) -> str:
    parts = [platform.platform(), f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    # two threads of llama.cpp lose an order of magnitude if another process uses a core
    parts.append(f"load before {os.getloadavg()[0]:.1f}")
    if plan.llama is None and {"llama", "http"} & set(plan.baselines):
        parts.append(f"llama.cpp not measured ({LLAMA_VARIABLE} is not set)")
    return f"{', '.join(parts)}; random weights, {plan.rounds} rounds of {plan.budget:g} s"


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-cpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("all", "profile"), default="all")
    plain = [name for name in FORMATS if not name.endswith("-g32")]
    lists = (
        ("--sizes", list(SHAPES), list(SHAPES), str),
        ("--formats", list(FORMATS), plain, str),
        ("--threads", None, [1, 2], int),
        ("--against", BASELINES, list(BASELINES), str),
    )
    for name, choices, default, kind in lists:
        parser.add_argument(
            name, nargs="+", metavar="X", type=kind, choices=choices, default=default,
            help=f"of {', '.join(map(str, choices or default))} (%(default)s)",
        )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--budget", type=float, default=2.0, help="seconds per cell, backend and round"
    )
    parser.add_argument(
        "--raw", type=Path, help="append each measurement to this file as a line of JSON"
    )
    parser.add_argument("--plot", type=Path, help=f"of HTTP ({cpu_http.PLOT}, of a whole run)")
    parser.add_argument("--size", choices=list(SHAPES), default="110M", help="for profile")
    parser.add_argument("--format", choices=list(FORMATS), default="q4", help="for profile")
    parser.add_argument(
        "--streams", type=int, default=1, help="for profile: streams, or 0 for a prefill"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
