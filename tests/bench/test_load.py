"""Arrival times and concurrency."""

import asyncio
import math
import statistics
import threading
from dataclasses import replace
from itertools import pairwise

import pytest

from app.bench.client import make_stream_body
from app.bench.load import LoadGenerator, LoadLevel, ScheduledSession, draw_arrivals
from tests.bench.scripted_server import (
    DONE,
    ScriptedExchange,
    ScriptedServer,
    finish_event,
    text_event,
    usage_event,
)
from tests.bench.test_client import make_pool

PATH = "/v1/completions"
ALL_AT_ONCE = LoadLevel()


def session(*prompts: str, arrival: float | None = None) -> ScheduledSession:
    bodies = tuple(
        make_stream_body({"model": "m", "prompt": prompt, "max_tokens": 1}) for prompt in prompts
    )
    return ScheduledSession(bodies=bodies, arrival=arrival)


class GatedScript:
    """Answers each request after its release. peak: the most requests at the same time."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._released = 0
        self._running = 0
        self.started = 0
        self.peak = 0

    def __call__(self, exchange: ScriptedExchange) -> None:
        with self._condition:
            self.started += 1
            self._running += 1
            self.peak = max(self.peak, self._running)
            self._condition.notify_all()
            assert self._condition.wait_for(lambda: self._released > 0, 30)
            self._released -= 1
            self._running -= 1
        exchange.send_stream([text_event("x"), finish_event(), usage_event(1), DONE])

    def release(self, count: int) -> None:
        with self._condition:
            self._released += count
            self._condition.notify_all()

    def wait_until_started(self, count: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self.started >= count, 30)


def test_without_a_rate_all_requests_arrive_at_once() -> None:
    assert draw_arrivals(3, ALL_AT_ONCE, "seed") == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, math.inf])
def test_arrivals_have_the_rate_exactly(burstiness: float) -> None:
    level = LoadLevel(request_rate=4.0, burstiness=burstiness)
    arrivals = draw_arrivals(100, level, "seed")
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(25.0)
    assert arrivals == draw_arrivals(100, level, "seed")


def test_a_smaller_burstiness_is_burstier() -> None:
    def spread(burstiness: float) -> float:
        level = LoadLevel(request_rate=10.0, burstiness=burstiness)
        gaps = [b - a for a, b in pairwise(draw_arrivals(2000, level, "seed"))]
        return statistics.pstdev(gaps) / statistics.fmean(gaps)

    assert spread(0.25) == pytest.approx(2.0, rel=0.1)
    assert spread(1.0) == pytest.approx(1.0, rel=0.1)
    assert spread(16.0) == pytest.approx(0.25, rel=0.1)
    assert spread(math.inf) == pytest.approx(0.0, abs=1e-9)


def test_levels_have_labels() -> None:
    level = LoadLevel(max_concurrency=8)
    assert level.label == "8"
    assert replace(level, request_rate=2.5).label == "8 at 2.5/s"
    assert LoadLevel(request_rate=2.0).label == "2/s"
    assert LoadLevel().label == "all"


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (3, 3), (None, 7)])
def test_the_concurrency_is_limited_and_used(limit: int | None, expected: int) -> None:
    script = GatedScript()

    async def run(url: str) -> LoadGenerator:
        sessions = [session(f"p{i}") for i in range(7)]
        level = LoadLevel(max_concurrency=limit)
        load = LoadGenerator(make_pool(url), PATH, sessions, level)
        running = asyncio.create_task(load.run())
        await asyncio.to_thread(script.wait_until_started, expected)
        script.release(7)
        await running
        return load

    with ScriptedServer(script).run() as server:
        record = asyncio.run(run(server.url)).make_load_record()
    assert len(record.requests) == 7
    assert all(request.error is None for request in record.requests)
    assert record.duration >= max(request.latency for request in record.requests)
    assert (script.peak, record.cancelled) == (expected, 0)


def test_the_turns_of_a_session_run_one_after_the_other() -> None:
    script = GatedScript()
    script.release(5)
    with ScriptedServer(script).run() as server:
        sessions = [session("a", "b", "c", "d", "e")]
        load = LoadGenerator(make_pool(server.url), PATH, sessions, ALL_AT_ONCE)
        asyncio.run(load.run())
        assert server.list_prompts() == ["a", "b", "c", "d", "e"]
    assert script.peak == 1


def test_recorded_times_are_kept_unless_there_is_a_rate() -> None:
    script = GatedScript()
    script.release(8)
    sessions = [session("late", arrival=0.2), session("early", arrival=0.0)]
    fixed = LoadLevel(request_rate=1000.0, max_concurrency=1, burstiness=math.inf)
    with ScriptedServer(script).run() as server:
        replay = LoadGenerator(make_pool(server.url), PATH, sessions, ALL_AT_ONCE)
        asyncio.run(replay.run())
        assert server.list_prompts() == ["early", "late"]
        # it ends after the late request, which is sent after 0.2 s
        assert replay.make_load_record().duration >= 0.2
        asyncio.run(LoadGenerator(make_pool(server.url), PATH, sessions, fixed).run())
        assert server.list_prompts()[2:] == ["late", "early"]


def test_a_cancelled_load_keeps_the_results_so_far() -> None:
    script = GatedScript()

    async def run(url: str) -> LoadGenerator:
        sessions = [session(f"p{i}") for i in range(6)]
        level = LoadLevel(max_concurrency=2)
        load = LoadGenerator(make_pool(url), PATH, sessions, level)
        running = asyncio.create_task(load.run())
        script.release(2)
        # two have ended, so that two others could start
        await asyncio.to_thread(script.wait_until_started, 4)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return load

    with ScriptedServer(script).run() as server:
        record = asyncio.run(run(server.url)).make_load_record()
        script.release(4)
    assert len(record.requests) == 2
    assert record.cancelled == 2


def test_the_client_measures_its_own_cost() -> None:
    script = GatedScript()

    async def run(url: str) -> LoadGenerator:
        load = LoadGenerator(make_pool(url), PATH, [session("p")], ALL_AT_ONCE)
        running = asyncio.create_task(load.run())
        await asyncio.to_thread(script.wait_until_started, 1)
        await asyncio.sleep(0.1)
        script.release(1)
        await running
        return load

    with ScriptedServer(script).run() as server:
        record = asyncio.run(run(server.url)).make_load_record()
    assert record.cpu_seconds > 0
    assert record.lag
    assert min(record.lag) > -0.01
