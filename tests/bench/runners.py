"""The engine on a thread of the server against the engine in a process of its own.

Both in turns, so that a machine that drifts drifts under both. What a client sees through HTTP is
measured with real servers, the rest at the runner itself.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app import store
from app.core.jobs import Job, Token
from app.core.ports import Runner
from app.core.requests import Sampling
from app.core.settings import Settings
from app.engine.describe import complete
from app.runners.local import LocalRunner
from app.runners.process import ProcessRunner
from tests.bench import client
from tests.bench.serving import status
from tests.serving import Served

KINDS: dict[str, Callable[[Settings], Runner]] = {"thread": LocalRunner, "process": ProcessRunner}

# of app/server.py
SWITCH_INTERVAL = 0.0005
ROUNDS, STARTS, TOKENS, STREAMS, FIRSTS = 3, 5, 96, 8, 10


@dataclass(kw_only=True)
class Measured:
    """Seconds, and tokens per second."""

    first: list[float] = field(default_factory=list[float])
    hops: list[float] = field(default_factory=list[float])
    alone: list[float] = field(default_factory=list[float])
    together: list[float] = field(default_factory=list[float])


def report(folder: Path) -> str:
    return "\n\n".join([_at_the_runner(folder), _through_http(folder)])


def _at_the_runner(folder: Path) -> str:
    found = {kind: Measured() for kind in KINDS}
    sys.setswitchinterval(SWITCH_INTERVAL)
    for _ in range(ROUNDS):
        for kind, measured in found.items():
            asyncio.run(_measure(KINDS[kind](Settings(parallel=STREAMS)), folder, measured))
    lines = [
        f"runners, {folder.name}, {ROUNDS} rounds of each in turn:",
        "| | first token, ms | token to loop, ms: median | p99 | tokens/s of 1 | of 8 together |",
        "|---|---|---|---|---|---|",
    ]
    for kind, m in found.items():
        lines.append(
            f"| {kind} | {_ms(m.first)} | {1000 * statistics.median(m.hops):.2f} "
            f"| {1000 * client.percentile(m.hops, 0.99):.2f} "
            f"| {client.spread(m.alone)} | {client.spread(m.together)} |"
        )
    return "\n".join(lines)


async def _measure(runner: Runner, folder: Path, measured: Measured) -> None:
    await runner.start(complete(store.resolve(str(folder))))
    await _answer(runner, "warm", [])
    for n in range(FIRSTS):
        measured.first.append((await _answer(runner, f"first {n}", [], tokens=2))[0])
    arrivals = await _answer(runner, "alone", measured.hops)
    measured.alone.append((TOKENS - 1) / (arrivals[-1] - arrivals[0]))
    begun = time.perf_counter()
    await asyncio.gather(*(_answer(runner, f"of many {n}", []) for n in range(STREAMS)))
    measured.together.append(STREAMS * TOKENS / (time.perf_counter() - begun))
    await runner.stop()


async def _answer(
    runner: Runner, name: str, hops: list[float], tokens: int = TOKENS
) -> Sequence[float]:
    """Seconds from submitting to each token. hops: gets those from the engine to here."""
    job = Job(
        id=name,
        ids=tuple(name.encode()),
        sampling=Sampling(temperature=0.0),
        max_tokens=tokens,
        stop_ids=frozenset(),
    )
    arrivals: list[float] = []
    begun = time.perf_counter()
    async with runner.submit(job) as updates:
        async for update in updates:
            if isinstance(update, Token):
                arrivals.append(time.perf_counter() - begun)
                hops.append((time.monotonic_ns() - update.at) / 1e9)
    assert len(arrivals) == tokens, runner.status()
    return arrivals


def _through_http(folder: Path) -> str:
    starts: dict[str, list[float]] = {kind: [] for kind in KINDS}
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
        server = Served([str(folder), "--runner", kind]).ready()
        told = status(server, folder).partition(": ")[2]
        server.stop()
        lines.append(f"| {kind} | {client.spread(seconds)} | {_resident(kind)} | {told} |")
    return "\n".join(lines)


def _start(kind: str) -> float:
    server = Served(["--runner", kind]).ready()
    seconds = time.monotonic() - server.started
    server.stop()
    return seconds


def _resident(kind: str) -> str:
    """Of the server and its processes, with the built-in model (Linux)."""
    server = Served(["--runner", kind]).ready()
    parent = server.process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    sizes = [client.resident(int(pid)) for pid in (parent, *children)]
    server.stop()
    return " + ".join(f"{size / (1 << 20):.0f}" for size in sizes)


def _ms(seconds: Sequence[float]) -> str:
    return client.spread([1000 * one for one in seconds])
