"""A Mac does not sleep while a request runs: a program runs meanwhile.

caffeinate exists only on macOS. A real process takes its place, which writes its state to a file.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import cast

import pytest

from app.core.requests import GenerateRequest
from app.core.settings import Settings
from app.serving.keep_awake import KeepAwake, create_keep_awake
from tests.waiting import wait_until_async

REQUEST = cast(GenerateRequest, object())  # only counted
SCRIPT = """
import os, signal, sys, time
# Python's files cannot be written by a signal handler that interrupts a write
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
def stop(*_):
    os.write(log, b"stopped\\n")
    sys.exit()
signal.signal(signal.SIGTERM, stop)
os.write(log, b"started\\n")
time.sleep(60)
"""


def make(file: Path, *, linger: float) -> KeepAwake:
    file.touch()
    return KeepAwake([sys.executable, "-c", SCRIPT, str(file)], linger=linger)


def read(file: Path) -> list[str]:
    return file.read_text().split()


async def wait_for_content(file: Path, *expected: list[str]) -> None:
    """Waits until the file has one of the expected contents."""
    await wait_until_async(lambda: read(file) in expected, limit=60)


def test_the_program_runs_from_the_first_request_to_the_end_of_the_last(tmp_path: Path) -> None:
    file = tmp_path / "log"
    awake = make(file, linger=0.0)

    async def drive() -> None:
        async with awake.run():
            first = awake.observe(REQUEST)
            await wait_for_content(file, ["started"])
            second = awake.observe(REQUEST)
            first.on_end(complete=True)
            await asyncio.sleep(0.2)  # a shorter sleep could only miss that it stops
            await wait_for_content(file, ["started"])  # a request is still running
            second.on_end(complete=False)
            await wait_for_content(file, ["started", "stopped"])
            third = awake.observe(REQUEST)
            await wait_for_content(file, ["started", "stopped", "started"])
            third.on_end(complete=True)
            await wait_for_content(file, ["started", "stopped"] * 2)

    asyncio.run(drive())


def test_a_request_that_follows_soon_keeps_the_program_running(tmp_path: Path) -> None:
    file = tmp_path / "log"
    awake = make(file, linger=3600.0)

    async def drive() -> None:
        async with awake.run():
            awake.observe(REQUEST).on_end(complete=True)
            # a request that ended before the program could start needs no program
            request = awake.observe(REQUEST)
            await wait_for_content(file, ["started"])
            request.on_end(complete=True)
            for _ in range(3):
                await asyncio.sleep(0.05)
                awake.observe(REQUEST).on_end(complete=True)
            await wait_for_content(file, ["started"])

    asyncio.run(drive())
    # the end of the server ends it, too
    assert read(file) == ["started", "stopped"]


def test_the_program_has_exited_at_the_end_of_the_server_also_if_it_is_slow(tmp_path: Path) -> None:
    """A cancelled wait for the exit left the process behind, and a warning in another test."""
    file = tmp_path / "log"
    file.touch()
    slow = SCRIPT.replace("sys.exit()", 'time.sleep(0.5); os.write(log, b"exited\\n"); sys.exit()')
    awake = KeepAwake([sys.executable, "-c", slow, str(file)], linger=0.0)

    async def drive() -> None:
        async with awake.run():
            request = awake.observe(REQUEST)
            await wait_for_content(file, ["started"])
            request.on_end(complete=True)
            # it still runs, unless this process had to wait for a core meanwhile
            await wait_for_content(file, ["started", "stopped"], ["started", "stopped", "exited"])

    asyncio.run(drive())
    assert read(file) == ["started", "stopped", "exited"]


def test_a_missing_program_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def drive() -> None:
        awake = KeepAwake(["/nowhere/caffeinate"])
        async with awake.run():
            for _ in range(3):
                request = awake.observe(REQUEST)
                await asyncio.sleep(0.05)
                request.on_end(complete=True)

    asyncio.run(drive())
    assert len([record for record in caplog.records if "may sleep" in record.message]) == 1


def test_the_option_and_the_system_decide() -> None:
    assert create_keep_awake(Settings(keep_awake=True), system="linux") is None
    assert create_keep_awake(Settings(), system="darwin") is None


def test_the_command_ends_with_the_server() -> None:
    awake = create_keep_awake(Settings(keep_awake=True), system="darwin")
    assert awake is not None
    assert awake._command == ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]
