"""Runners in processes of their own: started, watched, and looked into."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app import store
from app.core.errors import AppError
from app.core.jobs import Ended, JobUpdate
from app.core.settings import Settings
from app.runners.process_runner import ProcessRunner
from tests.runners.contract import PATIENCE, endless

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")


@asynccontextmanager
async def started(folder: Path, **changes: object) -> AsyncIterator[ProcessRunner]:
    running = ProcessRunner(Settings(**changes))  # type: ignore[arg-type]
    await running.start(store.resolve(str(folder)))
    try:
        async with asyncio.timeout(PATIENCE):
            yield running
    finally:
        await running.stop()


def pid(running: ProcessRunner) -> int:
    found = running.status().pid
    assert found is not None
    return found


def socket_path(running: ProcessRunner) -> Path:
    assert running._process is not None
    return running._process.socket_path


def lives(process: int) -> bool:
    """Whether it does anything any more; one that nobody has buried does not."""
    return _state(process) not in (None, "Z")


def stop(process: int) -> None:
    """Returns when all of its threads are stopped, which is a while after it was told to."""
    os.kill(process, signal.SIGSTOP)
    threads = Path(f"/proc/{process}/task")
    if threads.is_dir():  # elsewhere nothing tells of them
        wait_until(lambda: {_state(int(thread.name)) for thread in threads.iterdir()} == {"T"})


def _state(process: int) -> str | None:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return None


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def end(running: ProcessRunner, name: str) -> Ended:
    """How a job ends that never would by itself, on `long_model`."""
    async with running.submit(endless(name)) as submission:
        last: JobUpdate | None = None
        async for update in submission:
            last = update
    assert isinstance(last, Ended)
    return last


async def refusal(folder: Path, **changes: object) -> AppError:
    running = ProcessRunner(Settings(**changes))  # type: ignore[arg-type]
    with pytest.raises(AppError) as caught:
        await asyncio.wait_for(running.start(store.resolve(str(folder))), PATIENCE)
    assert running.status().state == "failed"
    assert running.status().pid is None
    await running.stop()
    return caught.value


def addressed(process: int) -> int:
    """Bytes of its address space."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")
