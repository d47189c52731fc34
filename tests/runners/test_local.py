"""The runner whose engine is a thread of this process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app import store
from app.core.jobs import Ended
from app.core.settings import Settings
from app.engine.loop import Loop
from app.runners.local import LocalRunner
from tests.engine.driving import job
from tests.runners.contract import *  # noqa: F403  # the suite that every runner passes
from tests.runners.contract import MakeRunner


@pytest.fixture
def runner() -> MakeRunner:
    return lambda: LocalRunner(Settings(prefill_chunk=8))


def test_when_the_engine_dies_its_jobs_end_with_an_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_: Loop) -> Any:
        raise AssertionError("planted")

    async def run() -> None:
        running = LocalRunner(Settings())
        await running.start(store.resolve(str(tiny_model)))
        monkeypatch.setattr(Loop, "step", die)
        async with running.submit(job("a", b"hello")) as submission:
            updates = [update async for update in submission]
        assert isinstance(updates[-1], Ended)
        assert (updates[-1].reason, updates[-1].error) == ("error", "the engine stopped")
        assert (running.status().state, running.status().error) == ("failed", "planted")
        await running.stop()

    asyncio.run(run())
