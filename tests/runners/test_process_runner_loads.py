"""How a runner's process begins, and how it does not."""

import asyncio
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.runners.process_runner import ProcessRunner
from tests.runners.contract import answer
from tests.runners.spawning import (
    linux,
    lives,
    pid,
    refusal,
    started,
)


def test_a_process_that_ends_before_it_is_ready_is_told_with_its_last_words(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    plant("import os, sys\nsys.stderr.write('libmlx.so: cannot open\\nbye\\n')\nos._exit(3)")
    error = asyncio.run(refusal(tiny_model))
    assert error.kind is ErrorKind.MODEL_FILES
    assert error.message == (
        "tiny could not be loaded: its process ended with exit status 3: "
        "libmlx.so: cannot open; bye"
    )


def test_a_load_that_does_not_get_on_is_given_up(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    plant("import time\nimport app.engine.loader as it\nit.load = lambda *_: time.sleep(3600)")
    error = asyncio.run(refusal(tiny_model, load_timeout=1.5))
    # time counts from the first look, in which the process has to start
    assert re.fullmatch(r"tiny could not be loaded: no progress for \d s at 0 %", error.message), (
        error.message
    )


def test_a_process_that_does_not_even_answer_while_it_loads_is_given_up_sooner(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    """It held the one place to load for five minutes."""
    plant(
        "import os, signal, time\n"
        "import app.engine.loader as it\n"
        "it.load = lambda *_: (time.sleep(1), os.kill(os.getpid(), signal.SIGSTOP))\n"
    )
    began = time.monotonic()
    error = asyncio.run(refusal(tiny_model, load_timeout=600.0, watchdog=2.0))
    assert "no progress for" in error.message
    assert time.monotonic() - began < 60


def test_progress_of_a_load_is_seen_and_buys_time(
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
        seen: set[int] = set()
        while not starting.done():
            status = running.status()
            seen.add(status.progress)
            if status.state == "ready":  # a moment before its start is over
                break
            assert status.state == "loading"
            with pytest.raises(AppError, match="still loading"):
                await answer(running, "a", b"x")
            await asyncio.sleep(0.05)
        await starting
        await running.stop()
        return seen

    assert {20, 40, 60, 80} <= asyncio.run(run())


@pytest.mark.parametrize(
    ("mumbled", "logged"),
    [
        ("b'mumble'", "JSONDecodeError"),
        ("bytes(1 << 25)", "an event is longer than the maximum line length"),
    ],
)
def test_a_process_that_cannot_be_understood_is_ended(
    tiny_model: Path,
    plant: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    mumbled: str,
    logged: str,
) -> None:
    plant(
        "from app.runners import worker_protocol\n"
        "class Mumbling:\n"
        f"    def encode(self, event): return {mumbled}\n"
        "worker_protocol.WORKER_EVENT = Mumbling()\n"
    )

    async def run() -> None:
        async with started(tiny_model) as running:
            loss = await running.wait_for_failure()
            assert loss.message == "the process of tiny sent a message that cannot be decoded"

    asyncio.run(run())
    assert logged in caplog.text


def test_a_process_that_falls_silent_before_its_first_word_is_ended(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    """It says that the model is there, and then nothing at all."""
    plant(
        "import asyncio\n"
        "from app.runners.worker_server import WorkerServer\n"
        "async def silence(self, request): await asyncio.sleep(3600)\n"
        "WorkerServer._stream_events = silence\n"
    )
    error = asyncio.run(refusal(tiny_model, watchdog=5.0))
    assert error.message.startswith("the engine's process has sent nothing for ")


def test_a_process_that_cannot_be_started_is_the_starters_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    error = asyncio.run(refusal(tiny_model))
    assert "the process of tiny could not be started: " in error.message


def test_a_start_that_is_cancelled_leaves_nobody(tiny_model: Path) -> None:
    async def run() -> None:
        running = ProcessRunner(Settings())
        starting = asyncio.create_task(running.start(store.resolve(str(tiny_model))))
        while running.status().pid is None:  # noqa: ASYNC110  # no event tells of it
            await asyncio.sleep(0.01)
        process = pid(running)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert not lives(process)
        await running.stop()

    asyncio.run(run())


@linux
def test_a_process_that_gets_no_memory_to_begin_with_says_so(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    plant("import resource as it\nit.setrlimit(it.RLIMIT_AS, (100 << 20, 100 << 20))")
    error = asyncio.run(refusal(tiny_model))
    assert error.kind is ErrorKind.MODEL_FILES
    # in the words of whoever finds none: Python, a library, or who loads libraries
    assert re.search("emory|failed to map segment", error.message)
