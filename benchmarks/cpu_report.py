"""The sections of the report of `make bench-cpu`, and the page that has them.

Knows: limits, results of bare loops, Markdown, docs/benchmarks.md. Must not know: how anything is
measured.
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.core.units import pluralize
from benchmarks import cpu_limits, cpu_mlx, cpu_plot, cpu_tables
from benchmarks.cpu_backends import ROOT, make_environment
from benchmarks.cpu_cells import (
    CACHED,
    Cell,
    CellResults,
    CellRounds,
    decode,
    median_cores,
    prefill,
)
from benchmarks.cpu_limits import Limits
from benchmarks.cpu_llama import LlamaPrograms
from benchmarks.cpu_rounds import BareResults
from tests.manual.tables import replace_part

PAGE = "benchmarks.md"
# of an idle machine, with a margin for programs that ran just before
MAX_LOAD = 0.5
BUSY = ". **The machine was busy**, and its figures are not reliable"
# each is a panel for each format
PLOTTED = (decode(1), decode(8), prefill(512))

_TABLE_NOTE = (
    "Tokens/s, ours / theirs = **ratio** (range of the rounds' ratios). Decode: greedy, with "
    f"so many streams together, after {CACHED} cached positions; prefill: a prompt at once. "
    "[n, r] is where theirs was measured on n steps or prompt tokens only, or in r rounds, because "
    "more take too long."
)
_NOTES: Mapping[str, str] = {
    cpu_tables.STOCK: "Stock MLX has one thread, and is measured beside ours on the fewest.",
    cpu_tables.LLAMA: "llama-batched-bench does not sample, so its steps have no argmax.",
    cpu_tables.OPENVINO: "A bare loop over a model built from OpenVINO's operations, with its "
    "defaults: 8 bits of activations and of caches where it chooses so.",
}


def describe_run(
    arguments: str,
    rounds: int,
    budget: float,
    llama: LlamaPrograms | None,
    missing: Sequence[str],
) -> str:
    """The machine, the command and the peers."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    load = os.getloadavg()[0]
    lines = [
        f"**{cpu_limits.describe_processor()}, {os.cpu_count()} cores**",
        "",
        f"- {platform.platform()}, Python {platform.python_version()}",
        f"- commit: {commit or 'unknown'}",
        # two threads of llama.cpp lose an order of magnitude if another process uses a core
        f"- load average before: {load:.1f}" + (BUSY if load > MAX_LOAD else ""),
        f'- `make bench-cpu ARGS="{arguments}"`; {pluralize(rounds, "round")}, '
        f"{budget:g} s per cell and backend; random weights, the same for all",
    ]
    lines.append(f"- mlxrunner: {cpu_mlx.describe_backend()}")
    if llama is not None:
        lines.append(f"- llama.cpp: {llama.description}")
    lines += [f"- not measured: {name} is not set" for name in missing]
    return "\n".join(lines)


def format_limits(limits: Limits, torch: str | None, threads: Sequence[int]) -> str:
    note = (
        "The most of all rounds, of all threads together. A multiplication and an addition are "
        "two operations. Percentages below are of the limit of a cell: the time to read weights "
        "and caches once or, if it is longer, the time of its operations at the peak of the "
        "fastest instructions for its format. With activations of 24 bits, products of 4- and "
        "8-bit weights take three times as many operations as counted here, and with 16 bits, the "
        "default for 16-bit checkpoints, twice as many."
    )
    lines = ["### Limits of the machine", "", note, "", *cpu_limits.format_limits(limits)]
    if torch is not None:
        lines += ["", *_format_torch(measure_torch(torch, threads))]
    return "\n".join(lines)


def measure_torch(python: str, threads: Sequence[int]) -> list[dict[str, float | str]]:
    script = str(Path(__file__).with_name("cpu_torch.py"))
    found: list[dict[str, float | str]] = []
    for count in threads:
        printed = subprocess.run(
            [python, script, str(count)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=make_environment({}),
        ).stdout
        found += map(json.loads, printed.splitlines())
    return found


def _format_torch(rows: Sequence[Mapping[str, float | str]]) -> list[str]:
    parts = [f"{row['name']} {row['rate']:.0f} ({row['threads']} thread(s))" for row in rows]
    return [f"PyTorch, linear 1024x3072 with 512 rows, GOP/s: {', '.join(parts)}."]


def format_bare_loops(results: BareResults, limits: Limits, commits: Sequence[str]) -> list[str]:
    """commits: older commits that were measured."""
    found = results.cells
    by_cell = {
        cell: limit
        for cell in found
        if (limit := cpu_limits.compute_limit(cell, limits)) is not None
    }
    sections = [
        "\n".join(
            [
                "### Bare loops",
                "",
                *(f"- {backend}" for backend in results.runs_on),
                *(f"- failed: {failure}" for failure in results.failures),
                "",
                "Tokens/s of this version (percentage of the limit):",
                "",
                *cpu_tables.format_limit_table(found, by_cell),
                "",
                f"![Tokens per second of bare loops]({name_plots()[0]})",
            ]
        )
    ]
    others = (cpu_tables.STOCK, cpu_tables.LLAMA, cpu_tables.OPENVINO, *commits)
    for other in others:
        if lines := cpu_tables.format_table(found, other):
            note = f"{_TABLE_NOTE} {_NOTES.get(other, '')}".rstrip()
            sections.append("\n".join([f"### Against {other}", "", note, "", *lines]))
    rounded = cpu_tables.format_table(found, cpu_tables.OPENVINO, cpu_tables.OURS_8_BITS)
    if rounded:
        title = f"### Against {cpu_tables.OPENVINO}, with `--activations 8`"
        sections.append("\n".join([title, "", *rounded]))
    targets = [*cpu_tables.TARGETS]
    for commit in commits:
        targets += cpu_tables.make_baseline_targets(commit)
    verdicts = cpu_tables.format_verdicts(found, by_cell, targets)
    sections.append("\n".join(["### Targets of bare loops", "", *verdicts, *_format_cores(found)]))
    return sections


def _format_cores(found: CellResults) -> list[str]:
    lines: list[str] = []
    for threads in sorted({cell.threads for cell in found}):
        names = (cpu_tables.OURS, cpu_tables.OPENVINO)
        busy = {name: median_cores(found, name, threads) for name in names}
        cores = ", ".join(f"{name} {n:.2f}" for name, n in busy.items() if n is not None)
        lines.append(
            f"- cores kept busy with {pluralize(threads, 'compute thread')}, median: {cores}"
        )
    return lines


def draw_bare_loops(found: CellResults, size: str, threads: int) -> str:
    """Tokens per second of all backends: a panel for each format and plotted workload."""
    panels: list[cpu_plot.Panel] = []
    for form in dict.fromkeys(cell.form for cell in found):
        for work in PLOTTED:
            cell = Cell(size=size, form=form, threads=threads, workload=work)
            rounds = found.get(cell, CellRounds())
            values = {name: rounds.rate(name) for name in rounds.by_backend}
            if values:
                panels.append(cpu_plot.Panel(title=f"{form}, {work}", values=values))
    return cpu_plot.draw_bars(f"{size}, {pluralize(threads, 'thread')}, tokens/s", panels)


def name_plots() -> tuple[Path, Path]:
    """The files of the plots of bare loops and of servers, for this kind of processor."""
    kind = cpu_limits.find_processor_kind()
    return Path(f"cpu-{kind}-bare.svg"), Path(f"cpu-{kind}-http.svg")


def write_document(docs: Path, output: Path, text: str) -> None:
    """Replace the part of the page for this kind of processor, and the plots next to it. output:
    the folder of the plots."""
    page, part = docs / PAGE, f"cpu-{cpu_limits.find_processor_kind()}"
    page.write_text(replace_part(page.read_text("utf-8"), part, text), "utf-8")
    for plot in name_plots():
        shutil.copyfile(output / plot, docs / plot)
