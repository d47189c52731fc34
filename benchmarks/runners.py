"""The engine on a thread of the server compared with the engine in its own process.

Measurements alternate, so that drift of the machine affects both. HTTP latencies are measured with
real servers, the other figures at the runner.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app import store
from app.bench.metrics import percentile
from app.core.jobs import Job, Token
from app.core.ports import Runner
from app.core.runtime import shorten_switch_interval
from app.core.sampling_params import SamplingParams
from app.core.settings import Settings
from app.engine.model_info import complete_config
from app.runners.process_runner import ProcessRunner
from app.runners.thread_runner import ThreadRunner
from benchmarks import client
from benchmarks.serving import status
from tests.batches import flatten
from tests.server_process import ServerProcess

RUNNERS: dict[str, Callable[[Settings], Runner]] = {
    "thread": ThreadRunner,
    "process": ProcessRunner,
}

ROUNDS, STARTS, TOKENS, STREAMS, FIRSTS = 3, 5, 96, 8, 10


@dataclass(kw_only=True)
class RunnerTimings:
    """Seconds, and tokens per second."""

    ttft: list[float] = field(default_factory=list[float])
    token_latency: list[float] = field(default_factory=list[float])
    alone: list[float] = field(default_factory=list[float])
    together: list[float] = field(default_factory=list[float])


def report(folder: Path) -> str:
    return "\n\n".join([_measure_runners(folder), _measure_servers(folder)])


def _measure_runners(folder: Path) -> str:
    found = {kind: RunnerTimings() for kind in RUNNERS}
    shorten_switch_interval()
    for _ in range(ROUNDS):
        for kind, measured in found.items():
            asyncio.run(_measure(RUNNERS[kind](Settings(parallel=STREAMS)), folder, measured))
    lines = [
        f"runners, {folder.name}, {ROUNDS} rounds of each in turn:",
        "| | first token, ms | token to loop, ms: median | p99 | tokens/s of 1 | of 8 together |",
        "|---|---|---|---|---|---|",
    ]
    for kind, m in found.items():
        lines.append(
            f"| {kind} | {_format_ms(m.ttft)} | {1000 * statistics.median(m.token_latency):.2f} "
            f"| {1000 * percentile(m.token_latency, 99):.2f} "
            f"| {client.format_spread(m.alone)} | {client.format_spread(m.together)} |"
        )
    return "\n".join(lines)


async def _measure(runner: Runner, folder: Path, measured: RunnerTimings) -> None:
    await runner.start(complete_config(store.resolve(str(folder))))
    await _run_job(runner, "warm", [])
    for n in range(FIRSTS):
        measured.ttft.append((await _run_job(runner, f"first {n}", [], tokens=2))[0])
    arrivals = await _run_job(runner, "alone", measured.token_latency)
    measured.alone.append((TOKENS - 1) / (arrivals[-1] - arrivals[0]))
    begun = time.perf_counter()
    await asyncio.gather(*(_run_job(runner, f"of many {n}", []) for n in range(STREAMS)))
    measured.together.append(STREAMS * TOKENS / (time.perf_counter() - begun))
    await runner.stop()


async def _run_job(
    runner: Runner, name: str, hops: list[float], tokens: int = TOKENS
) -> Sequence[float]:
    """Seconds from the submission to each token. hops: receives the times from the engine to this
    task."""
    job = Job(
        id=name,
        prompt_token_ids=tuple(name.encode()),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=tokens,
        stop_token_ids=frozenset(),
    )
    arrivals: list[float] = []
    begun = time.perf_counter()
    async with runner.submit(job) as updates:
        async for update in flatten(updates):
            if isinstance(update, Token):
                arrivals.append(time.perf_counter() - begun)
                hops.append((time.monotonic_ns() - update.timestamp_ns) / 1e9)
    assert len(arrivals) == tokens, runner.status()
    return arrivals


def _measure_servers(folder: Path) -> str:
    starts: dict[str, list[float]] = {kind: [] for kind in RUNNERS}
    for _ in range(STARTS):
        for kind, seconds in starts.items():
            seconds.append(_start(kind))
    lines = [
        "servers; from the command to ready with the built-in model, resident memory then, and "
        f"/v1/status during a long prefill of {folder.name}:",
        "| | ready, s | resident, MiB | /v1/status, ms |",
        "|---|---|---|---|",
    ]
    for kind, seconds in starts.items():
        server = ServerProcess([str(folder), "--runner", kind]).wait_until_ready()
        times = status(server, folder).partition(": ")[2]
        server.stop()
        lines.append(
            f"| {kind} | {client.format_spread(seconds)} | {_measure_rss(kind)} | {times} |"
        )
    return "\n".join(lines)


def _start(kind: str) -> float:
    server = ServerProcess(["--runner", kind]).wait_until_ready()
    seconds = time.monotonic() - server.started
    server.stop()
    return seconds


def _measure_rss(kind: str) -> str:
    """Resident memory of the server and its processes with the built-in model (Linux)."""
    server = ServerProcess(["--runner", kind]).wait_until_ready()
    parent = server.process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    sizes = [client.get_rss(int(pid)) for pid in (parent, *children)]
    server.stop()
    return " + ".join(f"{size / (1 << 20):.0f}" for size in sizes)


def _format_ms(seconds: Sequence[float]) -> str:
    return client.format_spread([1000 * one for one in seconds])
