"""`make bench ARGS=agreement`: `mlxrunner bench` compared with an independent client.

Both clients load the same server with the same number of concurrent prompts of the same length. The
loads of the two clients alternate, and the order changes from round to round. A ratio is the median
over the rounds of ours / theirs. The servers are ours and mlx-lm's. The other client is
../shared/bench/bench_client.py. It runs with the Python that MLX_LM names, which needs aiohttp.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import server_pair
from benchmarks.server_pair import BenchServer
from tests.conftest import SHARED

CLIENT = SHARED.parent / "bench" / "bench_client.py"
ROUNDS, WAVES = 5, 3
PROMPT, ANSWER = 256, 64
CLIENTS = (1, 4)

# output tokens per second, seconds to the first token
Load = tuple[float, float]


def report(folder: Path) -> str:
    if server_pair.MLX_LM_VARIABLE not in os.environ or not CLIENT.is_file():
        return f"agreement: not measured (needs {server_pair.MLX_LM_VARIABLE} and ../shared/bench)"
    lines = [
        f"{PROMPT} prompt tokens, {ANSWER} output tokens, {ROUNDS} rounds; ours / theirs:",
        "| server | clients | output tokens/s | ratio | TTFT, ms | ratio |",
        "|---|---|---|---|---|---|",
    ]
    # one after the other: the threads of an idle server would disturb the other one
    with server_pair.run_ours(folder, max(CLIENTS)) as server:
        lines += _compare(server)
    with server_pair.run_mlx_lm(folder) as server:
        assert server is not None
        lines += _compare(server)
    return "\n".join(lines)


def _compare(server: BenchServer) -> list[str]:
    clients: list[Callable[[BenchServer, int, str], Load]] = [_load_with_ours, _load_with_theirs]
    lines: list[str] = []
    for count in CLIENTS:
        loads: list[list[Load]] = [[], []]
        for turn in range(ROUNDS + 1):
            for which in (0, 1) if turn % 2 else (1, 0):
                loads[which].append(clients[which](server, count, f"{count}/{turn}"))
        cells: list[str] = []
        for metric, scale in ((0, 1.0), (1, 1000.0)):
            # the first round warms up
            ours, theirs = ([load[metric] * scale for load in side[1:]] for side in loads)
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            cells.append(f"{statistics.median(ours):.4g}, {statistics.median(theirs):.4g}")
            cells.append(
                f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        lines.append(f"| {server.name} | {count} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr)
    return lines


def _load_with_ours(server: BenchServer, clients: int, salt: str) -> Load:
    command = [sys.executable, "-m", "app", "bench", "--json", "--endpoint", "completions"]
    command += ["--base-url", f"http://127.0.0.1:{server.port}", "--model", server.model]
    command += ["--max-concurrency", str(clients), "--num-prompts", str(clients)]
    command += ["--rounds", str(WAVES), "--seed", salt]
    command += ["--input-len", str(PROMPT), "--output-len", str(ANSWER)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    [target] = json.loads(result.stdout)["servers"]
    [level] = target["levels"]
    return level["output_throughput"], level["median_ttft_ms"] / 1000


def _load_with_theirs(server: BenchServer, clients: int, salt: str) -> Load:
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "result.json"
        command = [os.environ[server_pair.MLX_LM_VARIABLE], str(CLIENT), "--out", str(out)]
        command += ["--base-url", f"http://127.0.0.1:{server.port}", "--model", server.model]
        command += ["--endpoint", "completions", "--scenarios", "concurrency"]
        command += ["--clients", str(clients), "--repeats", str(WAVES), "--salt", salt]
        command += ["--prompt-tokens", str(PROMPT), "--max-tokens", str(ANSWER)]
        subprocess.run(command, check=True, capture_output=True)
        loads: Any = json.loads(out.read_text())["results"]["concurrency"]
    median = loads[str(clients)]["median"]
    return median["total_tps"], median["ttft_p50_s"]
