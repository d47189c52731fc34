"""The runner whose engine is a thread of this process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
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
from tests.engine.harness import job
from tests.runners.contract import *  # noqa: F403  # the suite that every runner passes
from tests.runners.contract import PATIENCE, MakeRunner, answer, endless


@pytest.fixture
def runner() -> MakeRunner:
    return lambda: ThreadRunner(Settings(prefill_chunk=8, debug=True))


@asynccontextmanager
async def started(folder: Path, settings: Settings) -> AsyncIterator[ThreadRunner]:
    running = ThreadRunner(settings)
    await running.start(store.resolve(str(folder)))
    try:
        async with asyncio.timeout(PATIENCE):
            yield running
    finally:
        await running.stop()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110  # it comes true on another thread
            await asyncio.sleep(0.005)


def test_when_the_engine_dies_its_jobs_end_with_an_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_: Loop) -> Any:
        raise AssertionError("planted")

    async def run() -> None:
        async with started(tiny_model, Settings()) as running:
            monkeypatch.setattr(Loop, "step", die)
            async with running.submit(job("a", b"hello")) as submission:
                updates = [update async for update in submission]
            assert isinstance(updates[-1], Ended)
            assert updates[-1].reason == "error"
            assert updates[-1].error == "the engine stopped: AssertionError: planted"
            assert (running.status().state, running.status().error) == (
                "failed",
                "AssertionError: planted",
            )

    asyncio.run(run())


def test_status_tells_what_the_engine_can_do(tiny_model: Path) -> None:
    async def run() -> None:
        settings = Settings(parallel=3, context=512)
        assert ThreadRunner(settings).status().capacity is None
        async with started(tiny_model, settings) as running:
            capacity = running.status().capacity
            assert capacity is not None
            assert (capacity.parallel, capacity.context_length) == (3, 512)
            await answer(running, "a", b"hello")
            assert running.status().capacity == capacity, "a step does not forget it"

    asyncio.run(run())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every step of the engine waits, amid its work, while this is not set."""
    gate, step = threading.Event(), Loop.step
    gate.set()

    def held(loop: Loop) -> Any:
        if not gate.is_set():
            loop.on_stage("decode of 8 sequences")
            assert gate.wait(PATIENCE)
        return step(loop)

    monkeypatch.setattr(Loop, "step", held)
    yield gate
    gate.set()


WATCHED = Settings(parallel=1, watchdog=2.0)


def test_an_engine_that_hangs_is_reported_and_so_is_its_recovery(
    long_model: Path, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> tuple[RunnerStatus, RunnerStatus]:
        async with (
            started(long_model, WATCHED) as running,
            running.submit(endless("a")) as submission,
        ):
            gate.clear()
            await until(lambda: running.status().state == "stalled")
            hung = running.status()
            await until(lambda: "has made no progress" in caplog.text)
            gate.set()
            async for update in submission:
                if isinstance(update, Token):
                    break
            await until(lambda: "is making progress again" in caplog.text)
            return hung, running.status()

    hung, well = asyncio.run(run())
    assert hung.error is not None
    assert hung.error.startswith("the engine has made no progress for ")
    assert hung.error.endswith("(decode of 8 sequences)")
    assert (hung.progress, hung.capacity) == (100, well.capacity)
    assert (well.state, well.error) == ("ready", None)
    assert caplog.text.count("has made no progress") == 1, "once, however often one looks"


def test_an_engine_with_nothing_to_do_does_not_hang(tiny_model: Path) -> None:
    async def run() -> None:
        async with started(tiny_model, Settings(watchdog=0.05)) as running:
            await answer(running, "a", b"hello")
            await asyncio.sleep(0.2)
            assert running.status().state == "ready"

    asyncio.run(run())


def test_a_long_answer_is_no_hang(long_model: Path) -> None:
    """What counts is one stage of one step, not how long the engine has been busy."""

    async def run() -> None:
        async with (
            started(long_model, Settings(watchdog=2.0)) as running,
            running.submit(endless("a")),
        ):
            states: set[str] = set()
            for _ in range(30):
                await asyncio.sleep(0.1)
                states.add(running.status().state)
            assert states == {"ready"}

    asyncio.run(run())
