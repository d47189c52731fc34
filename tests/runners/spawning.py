"""Helpers for runners in separate processes."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app import store
from app.core.errors import AppError
from app.core.jobs import Ended, JobUpdate
from app.core.settings import Settings
from app.runners.process_runner import ProcessRunner
from tests.batches import flatten
from tests.runners.contract import PATIENCE, endless
from tests.waiting import wait_until

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs the Linux kernel")


@asynccontextmanager
async def start_runner(folder: Path, **changes: object) -> AsyncIterator[ProcessRunner]:
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


def is_alive(process: int) -> bool:
    """Whether the process runs; a zombie does not."""
    return _state(process) not in (None, "Z")


def suspend(process: int) -> None:
    """Returns when all threads of the process have stopped, some time after the signal."""
    os.kill(process, signal.SIGSTOP)
    threads = Path(f"/proc/{process}/task")
    if threads.is_dir():  # other systems do not list threads
        wait_until(lambda: {_state(int(thread.name)) for thread in threads.iterdir()} == {"T"})


def _state(process: int) -> str | None:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return None


async def wait_for_end(running: ProcessRunner, name: str) -> Ended:
    """The end of a job that does not end by itself, on `long_model`."""
    async with running.submit(endless(name)) as submission:
        last: JobUpdate | None = None
        async for update in flatten(submission):
            last = update
    assert isinstance(last, Ended)
    return last


async def start_error(folder: Path, **changes: object) -> AppError:
    running = ProcessRunner(Settings(**changes))  # type: ignore[arg-type]
    with pytest.raises(AppError) as caught:
        await asyncio.wait_for(running.start(store.resolve(str(folder))), PATIENCE)
    assert running.status().state == "failed"
    assert running.status().pid is None
    await running.stop()
    return caught.value


def address_space_bytes(process: int) -> int:
    """The size of the address space of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")
