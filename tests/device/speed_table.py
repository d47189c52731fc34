"""The table of the README for the GPU of this machine: tokens per second over HTTP, ours and
mlx-lm's.

Knows: the formats of the table, the servers of benchmarks/cpu_http.py. Must not know: the device.
Measurements alternate between the servers. The figures are medians.
"""

import os
import statistics
from collections.abc import Mapping

from benchmarks.cpu_http import MLX_LM, OURS, HttpPlan, ScenarioRounds, measure_format
from benchmarks.cpu_scenarios import SCENARIOS, TOKENS

# by the names of benchmarks/cpu_cells.py
FORMATS = {"q4-bf16": "4 bits", "bf16": "bfloat16", "f32": "float32"}
# of benchmarks/cpu_scenarios.py
CLIENTS = ("1 client", "8 clients")


def report(size: str, rounds: int) -> str:
    plan = HttpPlan(
        size=size,
        formats=tuple(FORMATS),
        threads=os.cpu_count() or 1,  # ignored on a GPU
        rounds=rounds,
        llama=None,
        checkouts={},
        plot=None,
    )
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in CLIENTS]
    rows = [
        line
        for form, title in FORMATS.items()
        for line in format_rows(title, measure_format(form, plan, scenarios))
    ]
    return "\n".join([*format_head(), *rows])


def format_head() -> list[str]:
    return ["| | mlxrunner | mlx-lm | ratio |", "|---|---|---|---|"]


def format_rows(title: str, found: Mapping[tuple[str, str], ScenarioRounds]) -> list[str]:
    """A row per number of clients. ratio: the median of the rounds' ratios."""
    rows: list[str] = []
    for clients in CLIENTS:
        ours = found[clients, OURS].values(TOKENS)
        cells = [f"{title}, {clients}", f"{statistics.median(ours):.3g}", "–", "–"]
        if (clients, MLX_LM) in found:
            theirs = found[clients, MLX_LM].values(TOKENS)
            pairs = zip(ours, theirs, strict=False)
            cells[2] = f"{statistics.median(theirs):.3g}"
            cells[3] = f"{statistics.median(a / b for a, b in pairs):.3g}"
        rows.append(f"| {' | '.join(cells)} |")
    return rows
