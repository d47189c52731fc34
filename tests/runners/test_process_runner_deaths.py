"""What happens when a runner's process dies, hangs, runs wild, or loses its parent."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from httpcore2._backends.anyio import AnyIOStream

from app.core.errors import AppError, ErrorKind
from app.core.ports import RunnerFailure
from app.runners.child_process import count_oom_kills
from app.runners.worker_client import WorkerClient
from tests.engine.harness import job
from tests.runners.contract import answer, ids
from tests.runners.spawning import (
    addressed,
    end,
    linux,
    lives,
    pid,
    socket_path,
    started,
    stop,
    wait_until,
)
from tests.server_process import ROOT

# seconds: more than a process is silent that has to import MLX on a busy machine
WATCHDOG = 5.0


# a SIGKILL that a test sends, where the system counts those that it sends itself
SENT = "unknown" if count_oom_kills() is None else "outside"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_everybody_who_waits_hears_of_a_death(long_model: Path, how: signal.Signals) -> None:
    async def run() -> None:
        async with started(long_model) as running:
            process = pid(running)
            waiting = asyncio.gather(*(end(running, f"job {i}") for i in range(3)))
            watching = asyncio.gather(*(running.wait_for_failure() for _ in range(3)))
            while running.status().stats.running < 3:  # noqa: ASYNC110  # the engine says so
                await asyncio.sleep(0.01)
            os.kill(process, how)
            for ended in await waiting:
                assert ended.reason == "error"
                assert ended.error is not None
                assert ended.error.startswith("the engine stopped: its process was killed by SIG")
            [loss, *others] = await watching
            assert others == [loss, loss]
            assert loss.message.startswith(f"the process of tiny was killed by {how.name}")
            assert ("memory" in loss.message) == (how is signal.SIGKILL)
            assert ("Segmentation" in loss.message) == (how is signal.SIGSEGV)
            assert loss.cause == ("fault" if how is signal.SIGSEGV else SENT)
            status = running.status()
            assert (status.state, status.error, status.pid) == ("failed", loss.message, None)
            with pytest.raises(AppError, match="the engine is not running") as caught:
                await answer(running, "b", b"x")
            assert caught.value.kind is ErrorKind.ENGINE
            assert not lives(process)

    asyncio.run(run())


def test_a_process_that_says_nothing_any_more_is_replaceable(long_model: Path) -> None:
    async def run() -> None:
        async with started(long_model, watchdog=WATCHDOG) as running:
            process = pid(running)
            waiting = asyncio.create_task(end(running, "a"))
            while not running.status().stats.running:  # noqa: ASYNC110  # the engine says so
                await asyncio.sleep(0.01)
            os.kill(process, signal.SIGSTOP)
            said = (await running.wait_for_failure()).message
            assert said.startswith("the engine's process has sent nothing for ")
            assert (await waiting).error == f"the engine stopped: {said}"
            await running.stop()
            assert not lives(process)

    asyncio.run(run())


def test_a_process_that_hangs_up_and_does_not_end_was_not_killed_by_the_system(
    long_model: Path, plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runners.process_runner._EXIT_TIMEOUT", 0.3)
    plant(
        "from app.runners import worker_server as it\n"
        "async def lines(self):\n"
        "    yield it.worker_protocol.WORKER_EVENT.encode(self._thread.heartbeat()) + b'\\n'\n"
        "it.WorkerServer._event_lines = lines\n"
    )

    async def run() -> None:
        async with started(long_model) as running:
            process = pid(running)
            loss = await running.wait_for_failure()
            assert loss == RunnerFailure(
                message="the process of tiny closed its connection and did not exit"
            )
            await running.stop()
            assert not lives(process)

    asyncio.run(run())


def test_a_process_that_hangs_up_on_a_request_is_ended(
    long_model: Path, plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats go on, but who asks it something would wait in vain, one after the other."""
    monkeypatch.setattr("app.runners.process_runner._EXIT_TIMEOUT", 0.3)
    plant(
        "from starlette.responses import StreamingResponse\n"
        "from app.runners import worker_server as it\n"
        "async def nothing():\n"
        "    yield b'a'\n"
        "    raise RuntimeError('planted')\n"
        "async def submit(self, request):\n"
        "    return StreamingResponse(nothing(), headers={'content-length': '9'})\n"
        "it.WorkerServer._submit = submit\n"
    )

    async def run() -> None:
        async with started(long_model) as running:
            process = pid(running)
            with pytest.raises(AppError) as caught:
                await end(running, "a")
            assert caught.value.message == "the engine stopped: its process closed its connection"
            said = (await running.wait_for_failure()).message
            assert said.startswith("the process of tiny closed its connection and did not exit: ")
            assert "RuntimeError: planted" in said
            await running.stop()
            assert not lives(process)

    asyncio.run(run())


# where want of memory shows itself: in what answers a request, and in what asyncio does by itself
WANTS = {
    "answering": "raise MemoryError\n",
    "reading": "it.asyncio.get_running_loop().call_soon(want)\n    await it.asyncio.sleep(60)\n",
}


@pytest.mark.parametrize("want", WANTS.values(), ids=WANTS)
def test_a_process_without_memory_for_what_it_is_asked_ends(
    long_model: Path, plant: Callable[[str], None], want: str
) -> None:
    plant(
        "from app.runners import worker_server as it\n"
        "def want():\n"
        "    raise MemoryError\n"
        "async def submit(self, request):\n"
        f"    {want}"
        "it.WorkerServer._submit = submit\n"
    )

    async def run() -> None:
        async with started(long_model) as running:
            with pytest.raises(AppError) as caught:
                await end(running, "a")
            ended = "the engine stopped: its process ended with exit status 1"
            assert caught.value.message == ended
            assert "MemoryError" in (await running.wait_for_failure()).message

    asyncio.run(run())


def test_a_process_that_dies_leaves_no_connection_open(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those kept for the next requests: as many as there were requests at the same time. To close
    them takes turns of the event loop, which are long where it is busy."""
    close = AnyIOStream.aclose

    async def closed_late(stream: AnyIOStream) -> None:
        await asyncio.sleep(0.02)
        await close(stream)

    monkeypatch.setattr(AnyIOStream, "aclose", closed_late)

    async def run() -> None:
        async with started(long_model) as running:
            jobs = (answer(running, f"job {i}", b"x", max_tokens=2) for i in range(12))
            await asyncio.gather(*jobs)
            address = str(socket_path(running))
            assert address in _peers()
            os.kill(pid(running), signal.SIGKILL)
            await running.wait_for_failure()
        assert address not in _peers()

    asyncio.run(run())


def _peers() -> set[str]:
    """Where the sockets of this process lead."""
    found: set[str] = set()
    for descriptor in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as one:
            if one.family == socket.AF_UNIX:
                found.add(one.getpeername())
    return found


HANG = """
import time
from app.engine.loop import Loop

def step(loop):
    loop.on_stage("decode of 8 sequences")
    time.sleep(3600)

Loop.step = step
"""


def test_an_engine_that_hangs_is_killed(long_model: Path, plant: Callable[[str], None]) -> None:
    plant(HANG)

    async def run() -> None:
        async with started(long_model, watchdog=WATCHDOG) as running:
            process = pid(running)
            ended, loss = await asyncio.gather(end(running, "a"), running.wait_for_failure())
            said = loss.message
            assert loss.cause == "fault"
            assert said.startswith("the engine has made no progress for ")
            assert said.endswith("(decode of 8 sequences)")
            assert ended.error == f"the engine stopped: {said}"
            assert running.status().state in ("stalled", "failed")
            await running.stop()
            assert not lives(process)

    asyncio.run(run())


DEAF = """
import asyncio
from app.runners.worker_server import WorkerServer

async def deaf(self, request):
    await asyncio.Event().wait()

WorkerServer._submit = WorkerServer._probe = deaf
"""


def test_a_process_that_takes_no_requests_is_killed_though_its_engine_runs(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    """Its heartbeats went on, `/health` said ok, and no request was answered."""
    plant(DEAF)

    async def run() -> None:
        async with started(tiny_model, watchdog=1.0) as running:
            process = pid(running)
            waiting = asyncio.create_task(end(running, "a"))
            loss = await running.wait_for_failure()
            assert loss.message == "the process of tiny has accepted no requests for 2 s"
            with pytest.raises(
                AppError, match="the engine stopped: the process of tiny has accepted"
            ):
                await waiting
            await running.stop()
            assert not lives(process)

    asyncio.run(run())


def test_a_process_that_cannot_be_reached_is_not_reported_as_healthy(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For lack of descriptors on this side, say: it is not replaced, and goes on when they are
    back."""
    monkeypatch.setattr("app.runners.process_runner._PROBE_INTERVAL", 0.01)
    monkeypatch.setattr("app.runners.process_runner._PROBE_RETRY_DELAY", 0.01)
    broken = True
    real = WorkerClient.probe

    async def probe(line: WorkerClient) -> None:
        if broken:
            raise ConnectionError("Too many open files")
        await real(line)

    monkeypatch.setattr(WorkerClient, "probe", probe)

    async def run() -> None:
        nonlocal broken
        async with started(tiny_model) as running:
            while running.status().state == "ready":  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            status = running.status()
            assert status.state == "stalled"
            assert status.error == "the process of tiny cannot be reached: Too many open files"
            broken = False
            while running.status().state != "ready":  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            assert await answer(running, "a", b"x", max_tokens=2)

    asyncio.run(run())


def test_an_engine_that_breaks_tells_why_before_it_ends(
    long_model: Path, plant: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    plant(
        "from app.engine.loop import Loop\n"
        "def step(loop): raise AssertionError('planted')\n"
        "Loop.step = step\n"
    )

    async def run() -> None:
        async with started(long_model) as running:
            process = pid(running)
            ended, loss = await asyncio.gather(end(running, "a"), running.wait_for_failure())
            assert loss == RunnerFailure(message="AssertionError: planted")
            assert ended.error == f"the engine stopped: {loss.message}"
            await running.stop()
            assert not lives(process)

    asyncio.run(run())
    assert "in step" in caplog.text, "its traceback is in our log"


HUNGRY = """
from app.engine.loop import Loop
held, real = [], Loop.step

def step(loop):
    held.append(bytearray(8 << 20))
    return real(loop)

Loop.step = step
"""


@linux
def test_a_process_that_runs_out_of_memory_harms_only_itself(
    long_model: Path, plant: Callable[[str], None]
) -> None:
    plant(HUNGRY)

    async def run() -> None:
        async with started(long_model) as running:
            limit = addressed(pid(running)) + (128 << 20)
            resource.prlimit(pid(running), resource.RLIMIT_AS, (limit, limit))
            for ended in await asyncio.gather(*(end(running, f"job {i}") for i in range(4))):
                assert ended.error is not None
                assert ended.error.startswith("the engine stopped")
            assert "emory" in (await running.wait_for_failure()).message

    asyncio.run(run())


def test_a_flood_of_words_without_an_end_blocks_nobody(
    long_model: Path, plant: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    plant(
        "import sys\n"
        "from app.engine.loop import Loop\n"
        "real = Loop.step\n"
        "def step(loop):\n"
        "    sys.stderr.write('x' * 100_000)\n"
        "    sys.stderr.write('\\ny' * 1000)\n"
        "    return real(loop)\n"
        "Loop.step = step\n"
    )
    caplog.set_level(logging.INFO)

    async def run() -> None:
        async with started(long_model) as running:
            asked = job("a", b"hello", max_tokens=40, stop_token_ids=frozenset[int]())
            async with running.submit(asked) as submission:
                updates = [update async for update in submission]
            assert len(ids(updates)) == 40

    asyncio.run(run())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) < 500
    assert max(map(len, said)) < 2100


def test_what_no_logger_wrote_is_a_warning_at_least(
    long_model: Path, plant: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Or the last words of a process would go with `--log-level info` among other news, and with
    `--log-level warning` nowhere."""
    plant(
        "import logging, sys\n"
        "from app.runners import worker_server\n"
        "def load(files, settings, report):\n"
        "    logging.getLogger('x').info('fine\\n  more of it')\n"
        "    sys.stderr.write('terminating: no reason\\n  at 0x0\\n')\n"
        "    sys.exit(3)\n"
        "worker_server.load = load\n"
    )
    caplog.set_level(logging.INFO)

    async def run() -> None:
        with pytest.raises(AppError):
            async with started(long_model):
                pass

    asyncio.run(run())
    said = {record.getMessage(): record.levelname for record in caplog.records}
    assert said["tiny: x: fine"] == said["tiny:   more of it"] == "INFO"
    assert said["tiny: terminating: no reason"] == said["tiny:   at 0x0"] == "WARNING"


PARENT = """
import asyncio, sys
from app import store
from app.core.settings import Settings
from app.runners.process_runner import ProcessRunner
from tests.engine.harness import job

async def main():
    running = ProcessRunner(Settings())
    await running.start(store.resolve(sys.argv[1]))
    async with running.submit(job("a", b"hello", max_tokens=1 << 19, stop_token_ids=frozenset())):
        print(running.status().pid, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("helps", [False, pytest.param(True, marks=linux)])
def test_nobody_is_left_behind_by_a_parent_that_was_killed(
    long_model: Path, plant: Callable[[str], None], stopped: bool, helps: bool
) -> None:
    """helps: whether the kernel kills whose parent is gone. Not all of them do."""
    if not helps:
        plant("import app.runners.parent_watch as it\nit.tie_to_parent = lambda: None")
    command = [sys.executable, "-c", PARENT, str(long_model)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        if stopped:
            # whoever is still on its way into it when its parent goes stays there: no kernel looks
            # after that moment
            stop(process)
        parent.kill()
    wait_until(lambda: not lives(process))
