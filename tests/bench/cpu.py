"""`make bench-cpu`: our CPU operations against stock MLX, llama.cpp and the servers on either.

make bench-cpu                                          everything
make bench-cpu ARGS="--against llama --sizes 110M --formats q4 q8 --threads 1"
make bench-cpu ARGS="profile --size 110M --format q4 --streams 8 --threads 1"

LLAMA_CPP names a Python that has llama-cpp-python[server] 0.3.36 (built with its defaults), gguf
and numpy; MLX_LM one that has mlx-lm, which .venv has too; BLAS the OpenBLAS that is preloaded for
mlx-lm, if not the system's. Without LLAMA_CPP its columns are left out.
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
from tests.bench.cpu_arms import FOREIGN, ROOT, Arm, environment
from tests.bench.cpu_cells import (
    CACHED,
    FORMATS,
    PROMPT,
    SHAPES,
    WORKS,
    Cell,
    Rounds,
    cores,
    table,
    verdicts,
)

VARIABLE = "LLAMA_CPP"
AGAINST = ("stock", "llama", "http")
STOCK = {"MLXRUNNER_KERNELS": "off", "MLXRUNNER_BLAS": "stock"}

# an arm that took this many budgets for a cell has said what there is to say of it
PATIENCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """budget: seconds that an arm measures a cell for, each round. llama: the Python that has
    it."""

    sizes: Sequence[str]
    formats: Sequence[str]
    threads: Sequence[int]
    against: Sequence[str]
    rounds: int
    budget: float
    llama: str | None

    @property
    def whole(self) -> bool:
        """Whether its figures may replace those that are published."""
        return set(AGAINST) == set(self.against) and self.llama is not None and self.rounds >= 3


def main() -> None:
    arguments = _arguments()
    for name in FOREIGN:
        os.environ.pop(name, None)
    if arguments.what == "profile":
        told = (arguments.size, arguments.format, arguments.streams, arguments.threads[-1])
        print(cpu_profile.report(*told))
        return
    plan = Plan(
        sizes=arguments.sizes,
        formats=arguments.formats,
        threads=sorted(arguments.threads),
        against=arguments.against,
        rounds=arguments.rounds,
        budget=arguments.budget,
        llama=os.environ.get(VARIABLE),
    )
    print(_machine(plan), flush=True)
    if {"stock", "llama"} & set(plan.against):
        for line in bare(plan, arguments.raw):
            print(line, flush=True)
    if "http" in plan.against:
        # a part of the measurement does not replace the plot of the whole
        plot = arguments.plot or (ROOT / cpu_http.PLOT if plan.whole else None)
        threads = max(plan.threads)
        print(cpu_http.report(threads, plan.rounds, plan.llama, plot), flush=True)


def bare(plan: Plan, raw: Path | None = None) -> Iterator[str]:
    """The tables of bare loops. raw: where each measurement is appended as a line of JSON."""
    found: dict[Cell, Rounds] = {}
    # in order, each once: whoever reads the figures sees where one arm was not always the same
    runs_on: dict[str, None] = {}
    for size, form in itertools.product(plan.sizes, plan.formats):
        with tempfile.TemporaryDirectory() as place:
            files = _prepared(Path(place), size, form, plan)
            for threads in plan.threads:
                with contextlib.ExitStack() as stack:
                    arms = [stack.enter_context(arm) for arm in _arms(files, threads, plan)]
                    runs_on |= {f"{arm.name}: {arm.runs_on}": None for arm in arms}
                    print(
                        *(f"{arm.name}: {arm.runs_on}" for arm in arms), sep="\n", file=sys.stderr
                    )
                    cells = [
                        Cell(size=size, form=form, threads=threads, work=work) for work in WORKS
                    ]
                    for cell, name, measured in _rounds(arms, cells, plan):
                        found.setdefault(cell, Rounds()).add(name, measured)
                        if raw is not None:
                            line = {"cell": str(cell), "arm": name, **asdict(measured)}
                            with raw.open("a") as file:
                                file.write(json.dumps(line) + "\n")
    yield "\n".join(f"- {told}" for told in runs_on)
    for other, said in (("stock", _SAID_OF_STOCK), ("llama", _SAID_OF_LLAMA)):
        if lines := table(found, other):
            yield "\n".join(["", f"### Against {other}", "", said, "", *lines])
    for threads in plan.threads:
        busy = {name: cores(found, name, threads) for name in ("ours", "llama")}
        told = ", ".join(f"{name} {value:.2f}" for name, value in busy.items() if value is not None)
        yield f"\nCores kept busy with {threads} thread(s), median of cells: {told}"
    yield "\n".join(["", "Targets:", *verdicts(found)])


_SAID = (
    "Tokens/s, ours / theirs = **ratio** (range of the rounds' ratios). Decode: greedy, with "
    f"so many streams together, after {CACHED} cached positions; prefill: {PROMPT} tokens at once."
)
_SAID_OF_STOCK = (
    f"{_SAID} Stock MLX has one thread, and is measured beside ours on the fewest; [n, r] is where "
    "it was measured on n steps or prompt tokens only, or in r rounds, because more take too long."
)
_SAID_OF_LLAMA = (
    f"{_SAID} Threads are those that compute: with one, Python builds the graph of the next step "
    "on another thread meanwhile, which llama.cpp does not need."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    folder: Path
    gguf: Path | None


def _prepared(place: Path, size: str, form: str, plan: Plan) -> _Files:
    """Written by processes of their own, which take what they held along."""
    print(f"writing {size} {form}", file=sys.stderr)
    folder = place / size
    _run([sys.executable, "-m", "tests.bench.cpu_models", str(folder), size, form])
    if plan.llama is None or "llama" not in plan.against:
        return _Files(folder=folder, gguf=None)
    gguf = place / f"{size}.gguf"
    _run([plan.llama, "-m", "tests.bench.cpu_gguf", str(gguf), size, form])
    return _Files(folder=folder, gguf=gguf)


def _arms(files: _Files, threads: int, plan: Plan) -> Iterator[Arm]:
    mlx = [sys.executable, "-m", "tests.bench.cpu_worker"]
    folder = str(files.folder)
    yield Arm("ours", [*mlx, "ours", folder], {"MLXRUNNER_THREADS": str(threads)})
    if files.gguf is not None and plan.llama is not None:
        command = [plan.llama, "-m", "tests.bench.cpu_llama", str(files.gguf), str(threads)]
        yield Arm("llama", command)
    if "stock" in plan.against and threads == min(plan.threads):
        yield Arm("stock", [*mlx, "stock", folder], STOCK, capped=True)


def _rounds(arms: Sequence[Arm], cells: Sequence[Cell], plan: Plan) -> Iterator[tuple]:
    """Cell, arm's name, what it measured: arms in turns, every other round in the other order."""
    told_all: set[tuple[str, Cell]] = set()
    for turn in range(plan.rounds):
        for cell in cells:
            for arm in arms if turn % 2 == 0 else reversed(arms):
                if (arm.name, cell) in told_all:
                    continue
                measured = arm.measure(cell.work, plan.budget)
                if arm.name == "stock" and measured.seconds > PATIENCE * plan.budget:
                    told_all.add((arm.name, cell))
                shown = f"{measured.rate:.4g} tokens/s, {measured.cores:.2f} cores"
                print(f"{cell}, round {turn}, {arm.name}: {shown}", file=sys.stderr)
                yield cell, arm.name, measured


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, cwd=ROOT, env=environment({}), check=True)


def _machine(plan: Plan) -> str:
    told = [platform.platform(), f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    # two threads of llama.cpp lose an order of magnitude where a third party wants a core
    told.append(f"load before {os.getloadavg()[0]:.1f}")
    if plan.llama is None and {"llama", "http"} & set(plan.against):
        told.append(f"llama.cpp not measured ({VARIABLE} is not set)")
    return f"{', '.join(told)}; random weights, {plan.rounds} rounds of {plan.budget:g} s"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-cpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("all", "profile"), default="all")
    plain = [name for name in FORMATS if not name.endswith("-g32")]
    lists = (
        ("--sizes", list(SHAPES), list(SHAPES), str),
        ("--formats", list(FORMATS), plain, str),
        ("--threads", None, [1, 2], int),
        ("--against", AGAINST, list(AGAINST), str),
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
