"""The watchdog of the event loop: it measures lag, and reports a blocked loop."""

import asyncio
import gc
import logging
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from app.core.usage import LAG_BUCKETS, EventLoopLag
from app.observability.event_loop_watchdog import EventLoopWatchdog
from tests.waiting import wait_until_async

PATIENCE = 30.0
NAME = "app.observability.event_loop_watchdog"


def block(event: threading.Event) -> None:
    assert event.wait(PATIENCE)


@pytest.fixture(autouse=True)
def joined() -> Iterator[None]:
    """The thread of a watchdog may outlive it, and would report to the next test."""
    yield
    for thread in threading.enumerate():
        if thread.name == "loop-watchdog":
            thread.join()


@pytest.fixture
def reported() -> Iterator[threading.Event]:
    """Set when a watchdog reports something."""
    event = threading.Event()

    class ReportedHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            event.set()

    handler = ReportedHandler()
    logging.getLogger(NAME).addHandler(handler)
    yield event
    logging.getLogger(NAME).removeHandler(handler)


def test_blocking_code_is_measured_and_logged_with_its_name(
    caplog: pytest.LogCaptureFixture, reported: threading.Event
):
    lag = EventLoopLag()

    async def run() -> None:
        async with EventLoopWatchdog(lag, watchdog=60).run(), asyncio.timeout(60):
            await asyncio.sleep(0.2)
            reported.clear()  # a busy machine may have blocked the loop before
            block(reported)  # blocks the loop until the watchdog has logged it
            while lag.latest >= 0.9 or "resumed" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    asyncio.run(run())
    assert lag.worst >= 0.9
    assert lag.latest < 0.9
    assert sum(lag.bucket_counts[LAG_BUCKETS.index(0.5) + 1 :]) >= 1
    assert "the event loop has been blocked for" in caplog.text
    stacks = [line.stack_info for line in caplog.records if "has been blocked" in line.message]
    assert any("in block" in stack for stack in stacks if stack)
    assert "the event loop resumed after" in caplog.text


def test_garbage_is_not_collected_while_stacks_are_read(
    monkeypatch: pytest.MonkeyPatch, reported: threading.Event
):
    """A collection that freed a threading.local stopped the process, watchdog included."""
    collected: list[bool] = []
    read = sys._current_frames

    def read_frames() -> dict[int, FrameType]:
        collected.append(gc.isenabled())
        return read()

    monkeypatch.setattr("sys._current_frames", read_frames)

    async def run() -> None:
        async with EventLoopWatchdog(EventLoopLag(), watchdog=60).run():
            await asyncio.sleep(0.1)
            block(reported)

    asyncio.run(run())
    assert collected[:1] == [False]
    assert gc.isenabled()


def test_a_hung_loop_ends_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.observability.event_loop_watchdog._MIN_TIMEOUT", 0.0)
    hung = threading.Event()

    async def run() -> None:
        async with EventLoopWatchdog(EventLoopLag(), watchdog=0.5, on_hang=hung.set).run():
            await asyncio.sleep(0.1)
            block(hung)

    asyncio.run(run())
    assert hung.is_set()


def test_an_idle_loop_does_not_count_as_hung():
    """The counter that the thread checks changes while the loop only waits."""

    async def run() -> None:
        monitor = EventLoopWatchdog(EventLoopLag(), watchdog=60)
        async with monitor.run():
            waiting = asyncio.create_task(asyncio.Event().wait())
            for _ in range(3):
                before = monitor._ticks
                await wait_until_async(lambda before=before: monitor._ticks > before)
            assert not waiting.done()
            waiting.cancel()

    asyncio.run(run())


def test_the_worst_lag_is_that_of_the_last_minute():
    lag = EventLoopLag()
    lag.observe(3.0)
    assert (lag.latest, lag.worst) == (3.0, 3.0)
    for _ in range(1200):
        lag.observe(0.002)
    assert (lag.latest, lag.worst) == (0.002, 0.002)
    assert sum(lag.bucket_counts) == 1201
    assert lag.sum_seconds == pytest.approx(3.0 + 1200 * 0.002)
