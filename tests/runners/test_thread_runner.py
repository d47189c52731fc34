"""The runner with its engine on a thread of this process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app import store
from app.core.jobs import Ended, Token
from app.core.ports import RunnerStatus
from app.core.settings import Settings
from app.engine.loop import Loop
from app.runners.thread_runner import ThreadRunner
from tests.batches import flatten
from tests.engine.harness import job
from tests.runners.contract import *  # noqa: F403  # the suite that every runner passes
from tests.runners.contract import PATIENCE, MakeRunner, answer, endless
from tests.waiting import wait_until_async


@pytest.fixture(scope="module")
def runner() -> MakeRunner:
    return lambda: ThreadRunner(Settings(prefill_chunk=8, debug=True))


@asynccontextmanager
async def start_runner(folder: Path, settings: Settings) -> AsyncIterator[ThreadRunner]:
    running = ThreadRunner(settings)
    await running.start(store.resolve(str(folder)))
    try:
        async with asyncio.timeout(PATIENCE):
            yield running
    finally:
        await running.stop()


def test_jobs_end_with_an_error_if_the_engine_fails(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Loop) -> Any:
        raise AssertionError("planted")

    async def run() -> None:
        async with start_runner(tiny_model, Settings()) as running:
            monkeypatch.setattr(Loop, "step", fail)
            async with running.submit(job("a", b"hello")) as submission:
                updates = [update async for update in flatten(submission)]
            assert isinstance(updates[-1], Ended)
            assert updates[-1].reason == "error"
            assert updates[-1].error == "the engine stopped: AssertionError: planted"
            assert (running.status().state, running.status().error) == (
                "failed",
                "AssertionError: planted",
            )

    asyncio.run(run())


def test_status_reports_the_capacity(tiny_model: Path) -> None:
    async def run() -> None:
        settings = Settings(parallel=3, context=512)
        assert ThreadRunner(settings).status().capacity is None
        async with start_runner(tiny_model, settings) as running:
            capacity = running.status().capacity
            assert capacity is not None
            assert (capacity.parallel, capacity.context_length) == (3, 512)
            await answer(running, "a", b"hello")
            assert running.status().capacity == capacity, "a step keeps the capacity"

    asyncio.run(run())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While this is not set, each step of the engine waits after announcing its stage."""
    gate, step = threading.Event(), Loop.step
    gate.set()

    def paused_step(loop: Loop) -> Any:
        if not gate.is_set():
            loop.on_stage("decode, batch size 8")
            assert gate.wait(PATIENCE)
        return step(loop)

    monkeypatch.setattr(Loop, "step", paused_step)
    yield gate
    gate.set()


WATCHDOG_SETTINGS = Settings(parallel=1, watchdog=2.0)


def test_a_hang_and_its_recovery_are_reported(
    long_model: Path, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> tuple[RunnerStatus, RunnerStatus]:
        async with (
            start_runner(long_model, WATCHDOG_SETTINGS) as running,
            running.submit(endless("a")) as submission,
        ):
            gate.clear()
            await wait_until_async(lambda: running.status().state == "stalled")
            stalled = running.status()
            await wait_until_async(lambda: "has made no progress" in caplog.text)
            gate.set()
            async for update in flatten(submission):
                if isinstance(update, Token):
                    break
            await wait_until_async(lambda: "is making progress again" in caplog.text)
            return stalled, running.status()

    stalled, recovered = asyncio.run(run())
    assert stalled.error is not None
    assert stalled.error.startswith("the engine has made no progress for ")
    assert stalled.error.endswith("(decode, batch size 8)")
    assert (stalled.progress, stalled.capacity) == (100, recovered.capacity)
    assert (recovered.state, recovered.error) == ("ready", None)
    assert caplog.text.count("has made no progress") == 1, "it is logged once"


def test_an_idle_engine_does_not_count_as_hanging(tiny_model: Path) -> None:
    async def run() -> None:
        async with start_runner(tiny_model, Settings(watchdog=0.05)) as running:
            await answer(running, "a", b"hello")
            await asyncio.sleep(0.2)  # four times the limit of a hang
            await wait_until_async(lambda: running.status().state == "ready")

    asyncio.run(run())


def test_a_long_answer_does_not_count_as_hanging(long_model: Path) -> None:
    """The watchdog measures one stage of one step, not how long the engine has been busy."""

    async def run() -> None:
        async with (
            start_runner(long_model, Settings(watchdog=2.0)) as running,
            running.submit(endless("a")),
        ):
            states: set[str] = set()
            for _ in range(30):
                await asyncio.sleep(0.1)
                states.add(running.status().state)
            assert states == {"ready"}

    asyncio.run(run())
