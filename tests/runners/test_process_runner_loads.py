"""The start of a model process, and its failures."""

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.runners.process_runner import ProcessRunner
from tests.runners.contract import answer
from tests.runners.spawning import (
    is_alive,
    linux,
    pid,
    start_error,
)
from tests.server_process import TIMEOUT


def test_an_exit_before_ready_is_reported_with_the_last_output(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    plant("import os, sys\nsys.stderr.write('libmlx.so: cannot open\\nbye\\n')\nos._exit(3)")
    error = asyncio.run(start_error(tiny_model))
    assert error.kind is ErrorKind.MODEL_FILES
    assert error.message == (
        "tiny could not be loaded: its process ended with exit status 3: "
        "libmlx.so: cannot open; bye"
    )


def test_a_load_without_progress_is_aborted(tiny_model: Path, plant: Callable[[str], None]) -> None:
    plant("import time\nimport app.engine.loader as it\nit.load = lambda *_: time.sleep(3600)")
    error = asyncio.run(start_error(tiny_model, load_timeout=1.5))
    # the time counts from the first check, and includes the start of the process
    assert re.fullmatch(r"tiny could not be loaded: no progress for \d+ s at 0 %", error.message), (
        error.message
    )


def test_a_silent_process_is_aborted_sooner_during_a_load(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    """It blocked all other loads for five minutes."""
    plant(
        "import os, signal, time\n"
        "import app.engine.loader as it\n"
        "it.load = lambda *_: (time.sleep(1), os.kill(os.getpid(), signal.SIGSTOP))\n"
    )
    starting = start_error(tiny_model, load_timeout=100 * TIMEOUT, watchdog=2.0)
    error = asyncio.run(asyncio.wait_for(starting, TIMEOUT))
    assert "no progress for" in error.message


def test_progress_of_a_load_is_reported_and_resets_the_timeout(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    plant(
        "import time\n"
        "import app.engine.loader as it\n"
        "real = it.load\n"
        "def load(files, settings, report):\n"
        "    for percent in range(0, 100, 20):\n"
        "        report(percent, percent)\n"
        "        time.sleep(3)\n"
        "    return real(files, settings, report)\n"
        "it.load = load\n"
    )

    async def run() -> set[int]:
        # less than the load takes, and more than a process takes to start on a busy machine
        running = ProcessRunner(Settings(load_timeout=12.0))
        starting = asyncio.create_task(running.start(store.resolve(str(tiny_model))))
        progress: set[int] = set()
        while not starting.done():
            status = running.status()
            progress.add(status.progress)
            if status.state == "ready":  # shortly before start() returns
                break
            assert status.state == "loading"
            with pytest.raises(AppError, match="still loading"):
                await answer(running, "a", b"x")
            await asyncio.sleep(0.05)
        await starting
        await running.stop()
        return progress

    assert {20, 40, 60, 80} <= asyncio.run(run())


@pytest.mark.parametrize(
    ("encoded", "logged"),
    [
        ("b'\\0\\0\\0\\6mumble'", "Expected `array`"),
        ("encode(['Unknown', 1])", "Invalid value 'Unknown'"),
        ("b'\\x7f\\0\\0\\0'", "MessageTooLargeError"),
    ],
)
def test_a_process_with_undecodable_messages_is_killed(
    tiny_model: Path,
    plant: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    encoded: str,
    logged: str,
) -> None:
    plant(
        "from app.runners import channel\n"
        "encode = channel.encode_frame\n"
        f"channel.encode_frame = lambda message: {encoded}\n"
    )

    error = asyncio.run(start_error(tiny_model))
    assert error.message == "the tiny process sent a message that cannot be decoded"
    assert logged in caplog.text


def test_a_process_that_sends_nothing_from_its_start_is_killed(
    tiny_model: Path, plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runners.process_runner._STARTUP_TIMEOUT", 1.0)
    plant("from app.runners.channel import Channel\nChannel.send = lambda self, *messages: None\n")
    error = asyncio.run(start_error(tiny_model, watchdog=1.0))
    assert re.fullmatch(r"tiny could not be loaded: no progress for \d+ s at 0 %", error.message)


def test_an_undecodable_command_ends_the_process_with_its_reason(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runners.process_runner.Probe", lambda: ["Unknown"])
    error = asyncio.run(start_error(tiny_model))
    assert "its process ended with exit status 1: " in error.message
    assert "Invalid value 'Unknown'" in error.message


def test_a_process_that_cannot_be_started_is_an_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    error = asyncio.run(start_error(tiny_model))
    assert "the tiny process could not be started: " in error.message


def test_a_cancelled_start_leaves_no_process(tiny_model: Path) -> None:
    async def run() -> None:
        running = ProcessRunner(Settings())
        starting = asyncio.create_task(running.start(store.resolve(str(tiny_model))))
        while running.status().pid is None:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.01)
        process = pid(running)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert not is_alive(process)
        await running.stop()

    asyncio.run(run())


@linux
def test_a_process_that_starts_without_memory_is_an_error(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    plant("import resource as it\nit.setrlimit(it.RLIMIT_AS, (100 << 20, 100 << 20))")
    error = asyncio.run(start_error(tiny_model))
    assert error.kind is ErrorKind.MODEL_FILES
    # a message of Python, a library or the dynamic loader
    assert re.search("emory|failed to map segment", error.message)
