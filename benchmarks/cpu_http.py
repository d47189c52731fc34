"""Compare servers: ours, our older commits, llama-server, mlx-lm's as installed and with a BLAS.

Knows: how to start each server, the table of scenarios. Must not know: the kernels. All servers of
a format run at the same time, and the measurements alternate.
"""

import asyncio
import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from app.core.units import pluralize
from benchmarks import cpu_gguf, cpu_llama, cpu_plot
from benchmarks.cpu_backends import ROOT, make_environment
from benchmarks.cpu_cells import FORMATS, PUBLISHED, SHAPES
from benchmarks.cpu_llama import LlamaPrograms
from benchmarks.cpu_scenarios import (
    GAP_P99,
    SCENARIOS,
    SECONDS,
    TOKENS,
    TTFT_P50,
    Figures,
    HttpServer,
    Scenario,
    describe_scenarios,
    is_rate,
    warm_up,
)
from benchmarks.cpu_tables import format_number
from benchmarks.cpu_weights import StoredWeights
from tests.ports import find_free_port
from tests.server_process import run_server

SERVED_FORMATS = ("f32", "q4", PUBLISHED)
# the positions of all slots of llama-server together
SLOTS, POSITIONS = 32, 65536
OURS, LLAMA_SERVER, MLX_LM = "mlxrunner", "llama-server", "mlx-lm"
READY = 120.0
# a scenario that takes longer is cancelled, and the server is not measured in the next ones
PATIENCE = 180.0
BLAS = "BLAS"
PRELOADABLE = "/usr/lib/*-linux-gnu/openblas*/libopenblas.so.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpPlan:
    """checkouts: the folders of older commits, by commit. plot: a file for a chart."""

    size: str
    formats: Sequence[str]
    threads: int
    rounds: int
    llama: LlamaPrograms | None
    checkouts: Mapping[str, Path]
    plot: Path | None


@dataclass(slots=True)
class ScenarioRounds:
    """The figures of a server in a scenario, by round."""

    rounds: list[Figures] = field(default_factory=list[Figures])

    def values(self, figure: str) -> list[float]:
        return [figures[figure] for figures in self.rounds]


# by format, scenario, server
HttpResults = Mapping[tuple[str, str, str], ScenarioRounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTarget:
    """limit: the least ratio of rates, or the largest ratio of times, of ours to a server."""

    scenario: str
    figure: str
    server: str
    limit: float


_BLAS_SERVER = f"{MLX_LM}, OpenBLAS preloaded"
HTTP_TARGETS = (
    HttpTarget(scenario="8 clients", figure=TOKENS, server=LLAMA_SERVER, limit=1.2),
    HttpTarget(scenario="8 clients, top_p, seeds", figure=TOKENS, server=LLAMA_SERVER, limit=1.2),
    HttpTarget(scenario="32 clients", figure=TOKENS, server=LLAMA_SERVER, limit=1.1),
    HttpTarget(scenario="mixed load", figure=TTFT_P50, server=LLAMA_SERVER, limit=1.0),
    HttpTarget(scenario="mixed load", figure=GAP_P99, server=LLAMA_SERVER, limit=0.5),
    HttpTarget(scenario="agent", figure=SECONDS, server=LLAMA_SERVER, limit=0.5),
    HttpTarget(scenario="1 client", figure=TOKENS, server=_BLAS_SERVER, limit=2.5),
    HttpTarget(scenario="8 clients", figure=TOKENS, server=_BLAS_SERVER, limit=2.2),
    HttpTarget(scenario="8 clients, top_p, seeds", figure=TOKENS, server=_BLAS_SERVER, limit=2.2),
    HttpTarget(scenario="32 clients", figure=TOKENS, server=_BLAS_SERVER, limit=2.2),
    HttpTarget(scenario="agent", figure=SECONDS, server=_BLAS_SERVER, limit=1 / 2.2),
)


def report(plan: HttpPlan) -> str:
    """The table of results and the targets; draws the chart."""
    found: dict[tuple[str, str, str], ScenarioRounds] = {}
    for form in plan.formats:
        for (scenario, name), rounds in measure_format(form, plan).items():
            found[form, scenario, name] = rounds
    if plan.plot is not None:
        plan.plot.parent.mkdir(parents=True, exist_ok=True)
        plan.plot.write_text(draw_chart(found, plan.size))
    summary = (
        f"{plan.size}, {pluralize(plan.threads, 'thread')}, {pluralize(plan.rounds, 'round')}, "
        f"{SLOTS} slots: median "
        f"(range), and the median **ratio** of ours to the server. Times and their ratios are "
        f"better if they are smaller. {describe_scenarios()}"
    )
    chart = [] if plan.plot is None else ["", f"![Tokens per second]({plan.plot.name})"]
    verdicts = ["", "Targets:", *format_verdicts(found)]
    return "\n".join(["### Through HTTP", "", summary, "", *format_table(found), *chart, *verdicts])


def measure_format(
    form: str, plan: HttpPlan, scenarios: Sequence[Scenario] = SCENARIOS
) -> Mapping[tuple[str, str], ScenarioRounds]:
    """Starts all servers, and measures them. Results are by scenario and server."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [stack.enter_context(server) for server in _start_servers(place, form, plan)]
        return asyncio.run(measure(servers, plan.rounds, scenarios))


def format_table(found: HttpResults) -> list[str]:
    """A row for each figure of a scenario, a column for each server."""
    servers = list(dict.fromkeys(name for _, _, name in found))
    lines = [
        f"| format | scenario | figure | {' | '.join(servers)} |",
        "|---|---|---|" + "---|" * len(servers),
    ]
    for form, scenario in dict.fromkeys((form, scenario) for form, scenario, _ in found):
        by_server = {name: found.get((form, scenario, name)) for name in servers}
        figures = next(rounds for rounds in by_server.values() if rounds is not None).rounds[0]
        for figure in figures:
            cells = [_format_cell(by_server, name, figure) for name in servers]
            lines.append(f"| {form} | {scenario} | {figure} | {' | '.join(cells)} |")
    return lines


def _format_cell(by_server: Mapping[str, ScenarioRounds | None], name: str, figure: str) -> str:
    rounds, mine = by_server[name], by_server.get(OURS)
    if rounds is None:
        return ""
    values = rounds.values(figure)
    spread = format_number(statistics.median(values))
    if len(values) > 1:
        spread += f" ({format_number(min(values))} to {format_number(max(values))})"
    if mine is None or name == OURS:
        return spread
    return f"{spread}, **{_compute_ratio(mine, rounds, figure):.3g}**"


def _compute_ratio(mine: ScenarioRounds, theirs: ScenarioRounds, figure: str) -> float:
    pairs = zip(mine.values(figure), theirs.values(figure), strict=False)
    return statistics.median(a / b for a, b in pairs)


def format_verdicts(found: HttpResults, targets: Iterable[HttpTarget] = HTTP_TARGETS) -> list[str]:
    """A line for each measured target and format."""
    lines: list[str] = []
    for target in targets:
        for form in dict.fromkeys(form for form, _, _ in found):
            mine = found.get((form, target.scenario, OURS))
            theirs = found.get((form, target.scenario, target.server))
            if mine is None or theirs is None:
                continue
            ratio = _compute_ratio(mine, theirs, target.figure)
            larger = is_rate(target.figure)
            met = ratio >= target.limit if larger else ratio <= target.limit
            bound = f"at {'least' if larger else 'most'} {target.limit:.3g}"
            lines.append(
                f"- {form}, {target.scenario}, {target.figure}: {ratio:.3g} of {target.server}, "
                f"{bound}: {'met' if met else 'short'}"
            )
    return lines


def draw_chart(found: HttpResults, size: str) -> str:
    """Tokens per second of all servers: a panel for each format and scenario."""
    panels: list[cpu_plot.Panel] = []
    for form, scenario in dict.fromkeys((form, scenario) for form, scenario, _ in found):
        values = {
            name: statistics.median(rounds.values(TOKENS))
            for (other, same, name), rounds in found.items()
            if (other, same) == (form, scenario) and TOKENS in rounds.rounds[0]
        }
        if values:
            panels.append(cpu_plot.Panel(title=f"{form}, {scenario}", values=values))
    return cpu_plot.draw_bars(f"{size} on a CPU through HTTP, tokens/s", panels)


async def measure(
    servers: Sequence[HttpServer], rounds: int, scenarios: Sequence[Scenario] = SCENARIOS
) -> dict[tuple[str, str], ScenarioRounds]:
    """The rounds of each scenario and server. Servers alternate, in reverse order every other
    round. A server that takes too long is skipped from then on."""
    found: dict[tuple[str, str], ScenarioRounds] = {}
    slow: set[str] = set()
    for server in servers:
        await warm_up(server)
    for turn in range(rounds):
        for scenario in scenarios:
            for server in servers if turn % 2 == 0 else reversed(servers):
                if server.name in slow:
                    continue
                try:
                    async with asyncio.timeout(PATIENCE):
                        figures = await scenario.measure(server, f"{scenario.name}/{turn}")
                except TimeoutError:
                    print(f"{server.name}, {scenario.name}: too slow", file=sys.stderr)
                    slow.add(server.name)
                    continue
                key = scenario.name, server.name
                found.setdefault(key, ScenarioRounds()).rounds.append(figures)
                shown = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
                print(f"{server.name}, {scenario.name}, round {turn}: {shown}", file=sys.stderr)
    return found


def _start_servers(
    place: Path, form: str, plan: HttpPlan
) -> Iterator[contextlib.AbstractContextManager[HttpServer]]:
    folder = place / plan.size
    write = [sys.executable, "-m", "benchmarks.cpu_models", str(folder), plan.size, form, "served"]
    subprocess.run(write, cwd=ROOT, env=make_environment({}), check=True)
    yield _run_ours(OURS, folder, plan.threads, None)
    for commit, checkout in plan.checkouts.items():
        yield _run_ours(commit, folder, plan.threads, checkout)
    if plan.llama is not None:
        gguf = place / f"{plan.size}.gguf"
        cpu_gguf.write(gguf, StoredWeights(folder, SHAPES[plan.size], FORMATS[form]))
        yield run_llama_server(plan.llama, gguf, plan.threads)
    python = os.environ.get("MLX_LM", sys.executable)
    if python == sys.executable and not importlib.util.find_spec("mlx_lm"):
        python = ""
    if python:
        yield _run_mlx_lm(MLX_LM, python, folder, {})
        if (blas := find_blas()) is not None:
            variables = {"LD_PRELOAD": blas, "OPENBLAS_NUM_THREADS": str(plan.threads)}
            yield _run_mlx_lm(_BLAS_SERVER, python, folder, variables)


@contextlib.contextmanager
def _run_ours(name: str, folder: Path, threads: int, checkout: Path | None) -> Iterator[HttpServer]:
    variables = {"MLXRUNNER_THREADS": str(threads)}
    options = ["--parallel", str(SLOTS)]
    with run_server(str(folder), *options, environ=variables, checkout=checkout) as server:
        yield HttpServer(name=name, port=server.port, model=folder.name)


@contextlib.contextmanager
def run_llama_server(programs: LlamaPrograms, gguf: Path, threads: int) -> Iterator[HttpServer]:
    port = find_free_port()
    command = cpu_llama.make_server_command(
        programs, gguf, port, threads=threads, slots=SLOTS, positions=POSITIONS
    )
    with _run_command(command, {}, f"http://127.0.0.1:{port}/health"):
        yield HttpServer(name=LLAMA_SERVER, port=port, model=gguf.stem, fields={"ignore_eos": True})


@contextlib.contextmanager
def _run_mlx_lm(
    name: str, python: str, folder: Path, variables: Mapping[str, str]
) -> Iterator[HttpServer]:
    port = find_free_port()
    command = [python, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port)]
    with _run_command(
        command, {"HF_HUB_OFFLINE": "1", **variables}, f"http://127.0.0.1:{port}/health"
    ):
        yield HttpServer(name=name, port=port, model=str(folder))


@contextlib.contextmanager
def _run_command(command: Sequence[str], variables: Mapping[str, str], url: str) -> Iterator[None]:
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=make_environment(variables), stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + READY
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{' '.join(command)} does not serve:\n{log.read()[-2000:]}")
                time.sleep(0.1)
            yield
        finally:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=READY).status_code == httpx.codes.OK
    return False


def find_blas() -> str | None:
    """The library that BLAS names, or the system's OpenBLAS."""
    named = os.environ.get(BLAS)
    found = [named] if named else [str(path) for path in sorted(Path("/").glob(PRELOADABLE[1:]))]
    return found[0] if found else None
