"""The effect of the interpreter's switch interval on the event loop while the engine decodes.

The graph of a step is built with the GIL held; an event loop that needs it waits up to the
interval.
"""

import asyncio
import statistics
import sys
import time
from pathlib import Path

from app import store
from app.bench.metrics import percentile
from app.core.jobs import Job, Token
from app.core.sampling_params import SamplingParams
from app.core.settings import Settings
from app.runners.thread_runner import ThreadRunner
from benchmarks import client
from tests.batches import flatten

INTERVALS = (0.005, 0.001, 0.0005, 0.0002)
TOKENS, ROUNDS, SLEEP_SECONDS = 128, 5, 0.002


async def _measure(folder: Path) -> str:
    runner = ThreadRunner(Settings())
    await runner.start(store.resolve(str(folder)))
    rates: dict[float, list[float]] = {interval: [] for interval in INTERVALS}
    late: dict[float, list[float]] = {interval: [] for interval in INTERVALS}
    for _ in range(ROUNDS):
        for interval in INTERVALS:
            sys.setswitchinterval(interval)
            watching = asyncio.create_task(_record_timer_delay(late[interval]))
            rates[interval].append(await _measure_rate(runner))
            watching.cancel()
    await runner.stop()
    lines = [
        "an event loop beside a decoding engine:",
        "| switch interval, ms | tokens/s | timer delay, ms: median | p99 |",
        "|---|---|---|---|",
    ]
    for interval in INTERVALS:
        lines.append(
            f"| {1000 * interval:g} | {client.format_spread(rates[interval])} "
            f"| {1000 * statistics.median(late[interval]):.2f} "
            f"| {1000 * percentile(late[interval], 99):.2f} |"
        )
    return "\n".join(lines)


async def _record_timer_delay(late: list[float]) -> None:
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(SLEEP_SECONDS)
        late.append(time.perf_counter() - begun - SLEEP_SECONDS)


async def _measure_rate(runner: ThreadRunner) -> float:
    job = Job(
        id="a",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=TOKENS,
        stop_token_ids=frozenset(),
    )
    async with runner.submit(job) as updates:
        at = [update.timestamp_ns async for update in flatten(updates) if isinstance(update, Token)]
    return 1e9 * (len(at) - 1) / (at[-1] - at[0])


def report(folder: Path) -> str:
    return asyncio.run(_measure(folder))
