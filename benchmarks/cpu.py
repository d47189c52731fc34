"""`make bench-cpu`: our CPU kernels compared with their limits, other engines and their servers.

make bench-cpu                                          everything; many hours
make bench-cpu ARGS="--against llama --sizes 110M --formats q4 q8 --threads 1"
make bench-cpu ARGS="--against --baseline 8b51e97"      only with an older commit
make bench-cpu ARGS="--against llama --sizes 110M --formats Q4_K_M --files model.gguf"
make bench-cpu ARGS="profile --size 110M --format q4 --streams 8 --threads 1"

Both engines read the same file for GGUF's file types (random blocks) and for --files.
The report and its plots are written to build/bench-cpu; --write also replaces those of
docs/benchmarks.md. Variables select the peers; a peer without its variable is skipped:

LLAMA_CPP   a folder with llama-server and llama-batched-bench (benchmarks/cpu_llama.py
            describes the build, and what to change for AMX with GCC 12)
OPENVINO    a Python with openvino and numpy
TORCH       a Python with torch, for the speed of its matrix products
MLX_LM      a Python with mlx-lm, which .venv also has; if it is empty, mlx-lm is left out
BLAS        the OpenBLAS that is preloaded for mlx-lm, by default that of the system

Long workloads (8192 tokens and more) and HTTP are measured with the first of the sizes.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cpu_http, cpu_limits, cpu_llama, cpu_profile, cpu_report
from benchmarks.cpu_backends import CLEARED_VARIABLES, ROOT
from benchmarks.cpu_cells import FORMATS, GGUF_FILE, SHAPES, WORKLOADS, Workload
from benchmarks.cpu_llama import LlamaPrograms
from benchmarks.cpu_rounds import BarePlan, BareResults, measure_bare_loops
from benchmarks.delivery import clone_baseline

PEERS = ("stock", "llama", "openvino", "http")
SIZES, FORMS = ("110M", "Qwen3-0.6B"), ("f32", "bf16", "q8", "q4")
OUTPUT = ROOT / "build/bench-cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """peers: some of PEERS. llama, openvino, torch: None if their variables are not set. checkouts:
    the folders of older commits, by commit."""

    sizes: Sequence[str]
    forms: Sequence[str]
    files: Sequence[Path]
    threads: Sequence[int]
    works: Sequence[Workload]
    peers: Sequence[str]
    rounds: int
    budget: float
    llama: LlamaPrograms | None
    openvino: str | None
    torch: str | None
    checkouts: Mapping[str, Path]

    @property
    def is_complete(self) -> bool:
        """Whether the report can replace the published one."""
        return (
            set(PEERS) == set(self.peers)
            and self.llama is not None
            and self.openvino is not None
            and set(SIZES) <= set(self.sizes)
            and set(FORMS) <= set(self.forms)
            and set(WORKLOADS.values()) == set(self.works)
            and self.rounds >= 3
        )

    @property
    def has_bare_loops(self) -> bool:
        return bool(self.checkouts) or set(self.peers) != {"http"}


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    for name in CLEARED_VARIABLES:
        os.environ.pop(name, None)
    if arguments.what == "profile":
        selection = (arguments.size, arguments.format, arguments.streams, arguments.threads[-1])
        print(cpu_profile.report(*selection))
        return
    try:
        plan = _make_plan(arguments)
    except ValueError as error:
        parser.error(str(error))
    if arguments.write and not plan.is_complete:
        parser.error("--write needs all peers, sizes, formats and workloads, and three rounds")
    sections = _measure(plan, arguments.raw, OUTPUT)
    text = "\n\n".join(sections) + "\n"
    (OUTPUT / "report.md").write_text(text, "utf-8")
    print(text)
    if arguments.write:
        cpu_report.write_document(ROOT / "docs", OUTPUT, text)


def _measure(plan: Plan, raw: Path | None, output: Path) -> list[str]:
    """The sections of the report. Plots are written to the folder `output`."""
    output.mkdir(parents=True, exist_ok=True)
    missing = [
        name
        for name, known, wanted in (
            (f"llama.cpp ({cpu_llama.VARIABLE})", plan.llama, {"llama", "http"}),
            ("OpenVINO (OPENVINO)", plan.openvino, {"openvino"}),
        )
        if known is None and wanted & set(plan.peers)
    ]
    sections = [
        cpu_report.describe_run(
            shlex.join(sys.argv[1:]), plan.rounds, plan.budget, plan.llama, missing
        )
    ]
    print(sections[0], file=sys.stderr, flush=True)
    limits = cpu_limits.measure_limits(plan.threads)
    if plan.has_bare_loops:
        results = _measure_bare_loops(plan, raw)
        # the machine may have been slower before
        limits = cpu_limits.take_most(limits, cpu_limits.measure_limits(plan.threads))
        sections.append(cpu_report.format_limits(limits, plan.torch, plan.threads))
        sections += cpu_report.format_bare_loops(results, limits, list(plan.checkouts))
        (output / cpu_report.name_plots()[0]).write_text(
            cpu_report.draw_bare_loops(results.cells, plan.sizes[0], max(plan.threads)), "utf-8"
        )
    else:
        sections.append(cpu_report.format_limits(limits, plan.torch, plan.threads))
    if "http" in plan.peers:
        served = [form for form in cpu_http.SERVED_FORMATS if form in plan.forms]
        http = cpu_http.HttpPlan(
            size=plan.sizes[0],
            formats=served or plan.forms[:1],
            threads=max(plan.threads),
            rounds=plan.rounds,
            llama=plan.llama,
            checkouts=plan.checkouts,
            plot=output / cpu_report.name_plots()[1],
        )
        sections.append(cpu_http.report(http))
    return sections


def _measure_bare_loops(plan: Plan, raw: Path | None) -> BareResults:
    bare = BarePlan(
        sizes=plan.sizes,
        forms=plan.forms,
        files=plan.files,
        threads=plan.threads,
        works=plan.works,
        rounds=plan.rounds,
        budget=plan.budget,
        stock="stock" in plan.peers,
        llama=plan.llama if "llama" in plan.peers else None,
        openvino=plan.openvino if "openvino" in plan.peers else None,
        checkouts=plan.checkouts,
    )
    return measure_bare_loops(bare, raw)


def _make_plan(arguments: argparse.Namespace) -> Plan:
    """Raises ValueError."""
    # a failing variable is reported before checkouts are built
    llama = cpu_llama.find_programs()
    if "http" in arguments.against and any(FORMATS[form].is_file for form in arguments.formats):
        raise ValueError("servers are not measured with GGUF's file types")
    return Plan(
        sizes=arguments.sizes,
        forms=arguments.formats,
        files=arguments.files,
        threads=sorted(arguments.threads),
        works=[WORKLOADS[name] for name in WORKLOADS if name in arguments.workloads],
        peers=arguments.against,
        rounds=arguments.rounds,
        budget=arguments.budget,
        llama=llama,
        openvino=os.environ.get("OPENVINO"),
        torch=os.environ.get("TORCH"),
        checkouts={commit: clone_baseline(commit) for commit in arguments.baseline},
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench-cpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("all", "profile"), default="all")
    lists = (
        ("--sizes", "+", list(SHAPES), list(SIZES), str),
        ("--formats", "+", [form for form in FORMATS if form != GGUF_FILE], list(FORMS), str),
        ("--threads", "+", None, [1, 2], int),
        ("--workloads", "+", list(WORKLOADS), list(WORKLOADS), str),
        ("--against", "*", PEERS, list(PEERS), str),
    )
    for name, count, choices, default, kind in lists:
        parser.add_argument(
            name, nargs=count, metavar="X", type=kind, choices=choices, default=default,
            help=f"of {', '.join(map(str, choices or default))} (%(default)s)",
        )  # fmt: skip
    parser.add_argument(
        "--files",
        nargs="+",
        metavar="FILE",
        type=Path,
        default=[],
        help="GGUF files to measure, too",
    )
    parser.add_argument(
        "--baseline", nargs="+", metavar="COMMIT", default=[],
        help="also compare with these commits, cloned to build/baseline",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--budget", type=float, default=2.0, help="seconds per cell, backend and round"
    )
    parser.add_argument(
        "--raw", type=Path, help="append each measurement to this file as a line of JSON"
    )
    parser.add_argument(
        "--write", action="store_true", help="replace the part of docs/benchmarks.md"
    )
    parser.add_argument("--size", choices=list(SHAPES), default="110M", help="for profile")
    parser.add_argument("--format", choices=list(FORMATS), default="q4", help="for profile")
    parser.add_argument(
        "--streams", type=int, default=1, help="for profile: streams, or 0 for a prefill"
    )
    return parser


if __name__ == "__main__":
    main()
