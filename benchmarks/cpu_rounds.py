"""Measures the bare loops of `make bench-cpu`: all backends of a model and of a number of threads
run at the same time, and alternate in rounds.

Knows: how to start each backend. Must not know: tables, limits, servers.
"""

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from app.runners.spawn import request_huge_pages
from benchmarks import cpu_gguf, cpu_tables
from benchmarks.cpu_backends import (
    ROOT,
    Backend,
    BackendError,
    BackendProcess,
    WorkerCommand,
    make_environment,
)
from benchmarks.cpu_cells import (
    FORMATS,
    GGUF_FILE,
    LONG_DECODE,
    SHAPES,
    Cell,
    CellRounds,
    Measurement,
    Workload,
    decode,
    prefill,
)
from benchmarks.cpu_llama import BatchedBench, LlamaPrograms
from benchmarks.cpu_weights import StoredWeights

STOCK = {"MLXRUNNER_KERNELS": "off", "MLXRUNNER_BLAS": "stock"}
# stock MLX is not measured again in a cell that took this many budgets, and a peer in one that took
# this many seconds
MAX_BUDGETS, PATIENCE = 3, 60.0
STOCK_WORKS = (decode(1), decode(4), decode(8), prefill(512))
# only with the first size, because others take minutes per measurement
LONG_WORKS = (LONG_DECODE, prefill(8192))


@dataclass(frozen=True, slots=True, kw_only=True)
class BarePlan:
    """files: GGUF files to measure as well. stock: whether to measure stock MLX. llama: None to
    omit it. openvino: a Python, or None. checkouts: the folders of older commits, by commit.
    budget: seconds per cell, backend and round."""

    sizes: Sequence[str]
    forms: Sequence[str]
    files: Sequence[Path]
    threads: Sequence[int]
    works: Sequence[Workload]
    rounds: int
    budget: float
    stock: bool
    llama: LlamaPrograms | None
    openvino: str | None
    checkouts: Mapping[str, Path]


@dataclass(slots=True)
class BareResults:
    """runs_on: descriptions of backends, each once, so that readers see if one was not always the
    same. failures: the errors of peers that exited unexpectedly."""

    cells: dict[Cell, CellRounds] = field(default_factory=dict[Cell, CellRounds])
    runs_on: dict[str, None] = field(default_factory=dict[str, None])
    failures: list[str] = field(default_factory=list[str])


def measure_bare_loops(plan: BarePlan, raw: Path | None = None) -> BareResults:
    """raw: a file to which each measurement is appended as a line of JSON."""
    results = BareResults()
    models = [*itertools.product(plan.sizes, plan.forms)]
    for size, form in [*models, *((str(file), GGUF_FILE) for file in plan.files)]:
        with tempfile.TemporaryDirectory() as place:
            files = write_models(Path(place), size, form, plan)
            for threads in plan.threads:
                cells = [
                    Cell(size=files.size, form=form, threads=threads, workload=work)
                    for work in plan.works
                    if size == plan.sizes[0] or work not in LONG_WORKS
                ]
                with contextlib.ExitStack() as stack:
                    backends = _start_backends(stack, files, threads, plan, results)
                    for cell, name, measured in measure_rounds(
                        backends, cells, plan.rounds, plan.budget, results.failures
                    ):
                        results.cells.setdefault(cell, CellRounds()).add(name, measured)
                        if raw is not None:
                            line = {"cell": str(cell), "arm": name, **asdict(measured)}
                            with raw.open("a") as file:
                                file.write(json.dumps(line) + "\n")
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """folder: for MLX and OpenVINO, or the GGUF file that all read. gguf: for llama.cpp; None if it
    is not measured."""

    folder: Path
    size: str
    form: str
    gguf: Path | None


def write_models(place: Path, size: str, form: str, plan: BarePlan) -> ModelFiles:
    """Write the weights in a separate process, which frees its memory on exit. size: or a file."""
    if form == GGUF_FILE:
        path = Path(size).resolve()
        return ModelFiles(folder=path, size=path.stem, form=form, gguf=path)
    print(f"writing {size} {form}", file=sys.stderr)
    folder = place / size
    write = [sys.executable, "-m", "benchmarks.cpu_models", str(folder), size, form]
    subprocess.run(write, cwd=ROOT, env=make_environment({}), check=True)
    gguf = None
    if FORMATS[form].is_file:
        folder = gguf = folder / "model.gguf"
    elif plan.llama is not None:
        gguf = place / f"{size}.gguf"
        cpu_gguf.write(gguf, StoredWeights(folder, SHAPES[size], FORMATS[form]))
    return ModelFiles(folder=folder, size=size, form=form, gguf=gguf)


def _start_backends(
    stack: contextlib.ExitStack,
    files: ModelFiles,
    threads: int,
    plan: BarePlan,
    results: BareResults,
) -> list[Backend]:
    backends: list[Backend] = []
    for start in _list_backends(files, threads, plan):
        try:
            backend = stack.enter_context(start())
        except BackendError as error:
            _report_failure(f"{files.size} {files.form}, {threads} thr.", error, results.failures)
            continue
        backends.append(backend)
        line = f"{backend.name}: {backend.runs_on}"
        results.runs_on[line] = None
        print(line, file=sys.stderr)
    return backends


def _list_backends(
    files: ModelFiles, threads: int, plan: BarePlan
) -> Iterator[Callable[[], Backend]]:
    """Functions that start a backend. Ours is the first."""
    variables = {"MLXRUNNER_THREADS": str(threads)}
    own_variables = {**variables, **find_server_variables(ROOT)}
    worker = [sys.executable, "-m", "benchmarks.cpu_worker"]
    ours = WorkerCommand([*worker, "ours", str(files.folder)], own_variables)
    yield lambda: BackendProcess(cpu_tables.OURS, ours)
    if FORMATS[files.form].bits is not None and plan.openvino is not None:
        rounded = WorkerCommand([*worker, "ours", str(files.folder), "8"], own_variables)
        works = tuple(map(prefill, (128, 512, 2048)))
        yield lambda: BackendProcess(cpu_tables.OURS_8_BITS, rounded, works=works)
    for commit, checkout in plan.checkouts.items():
        python = str(checkout / ".venv/bin/python")
        # where older commits have it
        module = "benchmarks" if (checkout / "benchmarks").is_dir() else "tests.bench"
        command = [python, "-m", f"{module}.cpu_worker", "ours", str(files.folder)]
        old_variables = {**variables, **find_server_variables(checkout)}
        old = WorkerCommand(command, old_variables, folder=checkout, one_context=True)
        yield lambda commit=commit, old=old: BackendProcess(commit, old, patience=PATIENCE)
    if plan.llama is not None and files.gguf is not None:
        programs, gguf = plan.llama, files.gguf
        yield lambda: BatchedBench(programs, gguf, threads)
    if FORMATS[files.form].is_file:
        return
    if plan.openvino is not None:
        command = [plan.openvino, "-m", "benchmarks.cpu_openvino", str(files.folder)]
        command += [files.size, files.form, str(threads)]
        peer = WorkerCommand(command)
        yield lambda: BackendProcess(cpu_tables.OPENVINO, peer, patience=PATIENCE)
    if plan.stock and threads == min(plan.threads):
        stock = WorkerCommand([*worker, "stock", str(files.folder)], STOCK)
        patience = MAX_BUDGETS * plan.budget
        yield lambda: BackendProcess(
            cpu_tables.STOCK, stock, capped=True, patience=patience, works=STOCK_WORKS
        )


def find_server_variables(checkout: Path) -> Mapping[str, str]:
    """The variables of a model process of that commit's server. The first commits did not request
    huge pages."""
    definition = f"def {request_huge_pages.__name__}("
    modules = (checkout / "app/runners").glob("*.py")
    return request_huge_pages({}) if any(definition in m.read_text() for m in modules) else {}


def measure_rounds(
    backends: Sequence[Backend],
    cells: Sequence[Cell],
    rounds: int,
    budget: float,
    failures: list[str],
) -> Iterator[tuple[Cell, str, Measurement]]:
    """Cell, name of the backend, measurement. Backends alternate, in reverse order every other
    round. A peer that ends by itself is not measured again; ours raises BackendError."""
    finished: set[tuple[str, Cell]] = set()
    failed: set[str] = set()
    for turn in range(rounds):
        for cell in cells:
            for backend in backends if turn % 2 == 0 else reversed(backends):
                if backend.name in failed or (backend.name, cell) in finished:
                    continue
                if backend.works is not None and cell.workload not in backend.works:
                    continue
                try:
                    measured = backend.measure(cell.workload, budget)
                except BackendError as error:
                    if backend.name == cpu_tables.OURS:
                        raise
                    failed.add(backend.name)
                    _report_failure(str(cell), error, failures)
                    continue
                if measured.seconds > backend.patience:
                    finished.add((backend.name, cell))
                print(f"{cell}, round {turn}, {backend.name}: {_show(measured)}", file=sys.stderr)
                yield cell, backend.name, measured


def _show(measured: Measurement) -> str:
    cores = "" if measured.cores is None else f", {measured.cores:.2f} cores"
    return f"{measured.rate:.4g} tokens/s{cores}"


def _report_failure(where: str, error: BackendError, failures: list[str]) -> None:
    print(f"{where}: {error}", file=sys.stderr)
    failures.append(f"{where}: {str(error).splitlines()[0].rstrip(':')}")
