"""The load: when requests start and how many run at the same time.

Knows: arrival processes, concurrency, the cost of this client. Must not know: prompts, metrics.
"""

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.client import RequestRecord, StreamedRequest
from app.bench.http_client import ConnectionPool
from app.bench.metrics import LoadRecord

# seconds between two measurements of the delay of the event loop
_LAG_INTERVAL = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLevel:
    """max_concurrency: None for no limit. request_rate: requests per second; infinite to start all
    requests at once. burstiness: the shape of the gamma distribution of the intervals; 1 is a
    Poisson process, less is burstier, more is more uniform."""

    max_concurrency: int | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0

    @property
    def label(self) -> str:
        """The level in a report."""
        rate = f"{self.request_rate:g}/s"
        if self.max_concurrency is None:
            return rate if math.isfinite(self.request_rate) else "all"
        if math.isfinite(self.request_rate):
            return f"{self.max_concurrency} at {rate}"
        return str(self.max_concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSession:
    """Requests that run one after the other, such as the turns of a conversation. bodies: the
    bodies of the requests. arrival: seconds after the start of the load; None if the level
    decides."""

    bodies: tuple[Mapping[str, Any], ...]
    arrival: float | None = None


def draw_arrivals(count: int, level: LoadLevel, seed: str) -> list[float]:
    """Returns the start of each session in seconds. The intervals are scaled so that all sessions
    arrive within count / request_rate seconds, as in vLLM."""
    if math.isinf(level.request_rate):
        return [0.0] * count
    if math.isinf(level.burstiness):
        intervals = [1 / level.request_rate] * count
    else:
        rng = random.Random(seed)
        scale = 1 / (level.request_rate * level.burstiness)
        intervals = [rng.gammavariate(level.burstiness, scale) for _ in range(count)]
    total, arrivals = 0.0, list[float]()
    for interval in intervals:
        total += interval
        arrivals.append(total)
    factor = count / level.request_rate / total if total else 1.0
    return [arrival * factor for arrival in arrivals]


class LoadGenerator:
    """Sends sessions to one server.

    records: the requests that have ended. seed: the seed of the arrival times. time_limit: the
    timeout of one request, in seconds.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        path: str,
        sessions: Sequence[ScheduledSession],
        level: LoadLevel,
        *,
        seed: str = "",
        time_limit: float | None = None,
    ) -> None:
        self._time_limit = time_limit
        limit = level.max_concurrency
        self._slots = None if limit is None else asyncio.Semaphore(limit)
        drawn = draw_arrivals(len(sessions), level, seed)
        replays = math.isinf(level.request_rate)
        # requests are encoded before the load starts
        self._sessions = [
            (
                session.arrival if replays and session.arrival is not None else arrival,
                [StreamedRequest(pool, path, body) for body in session.bodies],
            )
            for session, arrival in zip(sessions, drawn, strict=True)
        ]
        self._running = 0
        self._begun = self._cpu_begun = 0.0
        self._duration: float | None = None
        self._lag: list[float] = []
        self.records: list[RequestRecord] = []

    async def run(self) -> None:
        """Sends all requests. On cancellation, disconnects those that are running; the records of
        the others remain."""
        self._cpu_begun = time.process_time()
        self._begun = time.perf_counter()
        tasks = [
            asyncio.create_task(self._run_session(arrival, requests))
            for arrival, requests in self._sessions
        ]
        ticker = asyncio.create_task(self._measure_lag())
        try:
            await asyncio.gather(*tasks)
        finally:
            self._duration = time.perf_counter() - self._begun
            for task in (ticker, *tasks):
                task.cancel()
            await asyncio.gather(ticker, *tasks, return_exceptions=True)

    def make_load_record(self) -> LoadRecord:
        """Returns the measurements of a load that has ended or was cancelled."""
        assert self._duration is not None
        return LoadRecord(
            requests=tuple(self.records),
            duration=self._duration,
            cancelled=self._running,
            cpu_seconds=time.process_time() - self._cpu_begun,
            lag=tuple(self._lag),
        )

    async def _run_session(self, arrival: float, requests: Sequence[StreamedRequest]) -> None:
        delay = self._begun + arrival - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        if self._slots is None:
            await self._send(requests)
        else:
            async with self._slots:
                await self._send(requests)

    async def _send(self, requests: Sequence[StreamedRequest]) -> None:
        for request in requests:
            self._running += 1
            self.records.append(await request.run(self._time_limit))
            # not reached if the request was cancelled
            self._running -= 1

    async def _measure_lag(self) -> None:
        while True:
            due = time.perf_counter() + _LAG_INTERVAL
            await asyncio.sleep(_LAG_INTERVAL)
            self._lag.append(time.perf_counter() - due)
