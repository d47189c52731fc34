"""The cost of delivering tokens, from the engine to the client: three figures.

A model with almost no compute (hidden 64, one layer), at 1, 8 and 32 clients, compared with an
older commit; one client of a 110M model in 4 bits compared with the bare loop; and the CPU time per
token of the server's processes. Rounds alternate, and the ratios are the medians of those of
adjacent runs, so that drift of the machine affects both sides.

The older commit is cloned to build/baseline, with a separate environment from its own locks.
"""

import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import cpu_models, random_model
from benchmarks.client import format_spread, make_prompt
from benchmarks.serving import run_bare_loop
from benchmarks.stream_counter import StreamsResult, count_streams
from tests.server_process import ROOT, run_server

CLIENTS, TOKENS, ROUNDS = (1, 8, 32), 256, 9
BARE_TOKENS, BARE_ROUNDS = 128, 9
PARALLEL = ("--parallel", "32")
HERE = "this commit"

Results = Mapping[tuple[str, int], Sequence[StreamsResult]]


def report(baseline: str | None) -> str:
    """baseline: a commit to compare with; None for no comparison."""
    checkouts: dict[str, Path | None] = {HERE: None}
    if baseline is not None:
        checkouts[baseline] = clone_baseline(baseline)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place:
        free = random_model.write(Path(place), "free")
        quantized = Path(place) / "110M-q4"
        cpu_models.write(quantized, "110M", "q4", served=True)
        parts = [_report_free(free, checkouts), _report_bare(quantized, checkouts)]
    heading = f"delivery; the load average of {os.cpu_count()} cores was {load:.1f} before"
    return "\n\n".join([heading, *parts])


def clone_baseline(commit: str) -> Path:
    """A checkout of a commit with its environment. It is kept for the next run."""
    folder = ROOT / "build/baseline" / commit
    if not folder.is_dir():
        _run("git", "clone", "--quiet", "--no-checkout", str(ROOT), str(folder))
        _run("git", "-C", str(folder), "checkout", "--quiet", commit)
    _run("make", "--silent", "-C", str(folder), "venv")
    return folder


def _run(*command: str) -> None:
    # the variables of a running make belong to this checkout
    environment = {name: v for name, v in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def _report_free(model: Path, checkouts: Mapping[str, Path | None]) -> str:
    found: dict[tuple[str, int], list[StreamsResult]] = {}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(run_server(str(model), *PARALLEL, checkout=checkout))
            for name, checkout in checkouts.items()
        }
        for server in servers.values():
            count_streams(server, model.name, 1, 16, seed=-1)  # the first request loads modules
        for turn in range(ROUNDS):
            for clients in CLIENTS:
                for name in alternate(list(servers), turn):
                    result = count_streams(servers[name], model.name, clients, TOKENS, seed=turn)
                    found.setdefault((name, clients), []).append(result)
    return format_free(found)


def alternate(names: Sequence[str], turn: int) -> Sequence[str]:
    """The order of a round: every other round runs backwards."""
    return names if turn % 2 == 0 else names[::-1]


def format_free(found: Results) -> str:
    lines = [
        f"A model with almost no compute, {TOKENS} tokens a stream, {ROUNDS} rounds:",
        "| clients | server | tokens/s | CPU per token, µs: front | runner | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for (name, clients), results in sorted(found.items(), key=lambda item: item[0][1]):
        ratio = ""
        if name != HERE:
            pairs = zip(found[HERE, clients], results, strict=True)
            ratio = format_spread([a.tokens_per_second / b.tokens_per_second for a, b in pairs])
        rates = format_spread([result.tokens_per_second for result in results])
        lines.append(f"| {clients} | {name} | {rates} | {_format_cpu(results)} | {ratio} |")
    return "\n".join(lines)


def _format_cpu(results: Sequence[StreamsResult]) -> str:
    fronts, runners = [1e6 * r.front for r in results], [1e6 * r.runner for r in results]
    return f"{statistics.median(fronts):.0f} | {statistics.median(runners):.0f}"


def _report_bare(folder: Path, checkouts: Mapping[str, Path | None]) -> str:
    model = random_model.load(folder)
    prompt = make_prompt(8, seed=0)
    ratios: dict[str, list[float]] = {name: [] for name in checkouts}
    extra: dict[str, list[float]] = {name: [] for name in checkouts}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(run_server(str(folder), *PARALLEL, checkout=checkout))
            for name, checkout in checkouts.items()
        }
        for server in servers.values():
            count_streams(server, folder.name, 1, 16, seed=-1)
        for turn in range(BARE_ROUNDS):
            for name in alternate(list(servers), turn):
                bare = run_bare_loop(model, prompt, BARE_TOKENS)
                served = count_streams(servers[name], folder.name, 1, BARE_TOKENS, seed=turn)
                ratios[name].append(served.decode_rate / bare.tokens_per_second)
                extra[name].append(1e3 * (served.front + served.runner - bare.cpu_per_token))
    lines = [
        f"One client of 110M in 4 bits and the bare loop, {BARE_TOKENS} tokens, {BARE_ROUNDS} "
        "rounds:",
        "| server | served / bare | CPU per token of both processes, less that of the loop, ms |",
        "|---|---|---|",
    ]
    for name in checkouts:
        lines.append(f"| {name} | {format_spread(ratios[name])} | {format_spread(extra[name])} |")
    return "\n".join(lines)
