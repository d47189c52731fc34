"""Model processes that die, hang, flood the log, or lose their parent."""

import asyncio
import contextlib
import errno
import logging
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from httpcore2._backends.anyio import AnyIOStream

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.jobs import Ended
from app.core.model_files import ModelFiles
from app.core.model_state import ServedModel
from app.core.ports import RunnerFailure
from app.core.settings import Settings
from app.runners.child_process import count_oom_kills
from app.runners.pool import ModelPool
from app.runners.process_runner import ProcessRunner
from app.runners.worker_client import WorkerClient
from tests.batches import flatten
from tests.descriptors import exhaust_descriptors
from tests.engine.harness import job
from tests.runners.contract import answer, ids
from tests.runners.spawning import (
    address_space_bytes,
    is_alive,
    linux,
    pid,
    socket_path,
    start_runner,
    suspend,
    wait_for_end,
)
from tests.server_process import ROOT
from tests.waiting import wait_until

# seconds: more than an import of MLX takes on a busy machine
WATCHDOG = 5.0


# the cause of a SIGKILL by a test: external if the system counts its own OOM kills
SENT = "unknown" if count_oom_kills() is None else "outside"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_all_waiting_calls_end_when_the_process_dies(long_model: Path, how: signal.Signals) -> None:
    async def run() -> None:
        async with start_runner(long_model) as running:
            process = pid(running)
            waiting = asyncio.gather(*(wait_for_end(running, f"job {i}") for i in range(3)))
            watching = asyncio.gather(*(running.wait_for_failure() for _ in range(3)))
            while running.status().stats.running < 3:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.01)
            os.kill(process, how)
            for ended in await waiting:
                assert ended.reason == "error"
                assert ended.error is not None
                assert ended.error.startswith("the engine stopped: its process was killed by SIG")
            [failure, *others] = await watching
            assert others == [failure, failure]
            assert failure.message.startswith(f"the tiny process was killed by {how.name}")
            assert ("memory" in failure.message) == (how is signal.SIGKILL)
            assert ("Segmentation" in failure.message) == (how is signal.SIGSEGV)
            assert failure.cause == ("fault" if how is signal.SIGSEGV else SENT)
            status = running.status()
            assert (status.state, status.error, status.pid) == ("failed", failure.message, None)
            with pytest.raises(AppError, match="the engine is not running") as caught:
                await answer(running, "b", b"x")
            assert caught.value.kind is ErrorKind.ENGINE
            assert not is_alive(process)

    asyncio.run(run())


def test_a_silent_process_is_reported_and_can_be_stopped(long_model: Path) -> None:
    async def run() -> None:
        async with start_runner(long_model, watchdog=WATCHDOG) as running:
            process = pid(running)
            waiting = asyncio.create_task(wait_for_end(running, "a"))
            while not running.status().stats.running:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.01)
            os.kill(process, signal.SIGSTOP)
            message = (await running.wait_for_failure()).message
            assert message.startswith("the engine process has sent nothing for ")
            assert (await waiting).error == f"the engine stopped: {message}"
            await running.stop()
            assert not is_alive(process)

    asyncio.run(run())


def test_a_prompt_sent_to_a_stopped_process_is_answered_by_the_next_one(tiny_model: Path) -> None:
    """It was refused after the second time, although no process had run it."""
    served = ServedModel(
        name="tiny",
        source=str(tiny_model),
        settings=Settings(watchdog=WATCHDOG),
        keep_alive=math.inf,
    )

    async def read_files(_: ServedModel) -> ModelFiles:
        return store.resolve(str(tiny_model))

    async def run() -> None:
        pool = ModelPool(ProcessRunner, read_files)
        await pool.start()
        async with pool.lease(served) as lease:
            await lease.wait()
            handle = pool.get_handle(served)
            for _ in range(3):
                process = pool.model_state(served).pid
                assert process is not None
                suspend(process)
                async with handle.submit(job("a", b"abc", max_tokens=2)) as submission:
                    last = [update async for update in flatten(submission)][-1]
                assert isinstance(last, Ended)
                assert last.reason == "length"
                assert pool.model_state(served).pid != process
        await pool.stop()

    asyncio.run(run())


def test_a_process_that_closes_its_connection_without_an_exit_is_reported(
    long_model: Path, plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runners.process_runner._EXIT_TIMEOUT", 0.3)
    plant(
        "from app.runners.event_pipe import EventWriter\n"
        "write = EventWriter.write\n"
        "def write_and_close(self, events):\n"
        "    write(self, events)\n"
        "    if events:\n"
        "        self.close()\n"
        "EventWriter.write = write_and_close\n"
        "EventWriter.connection_lost = lambda self, error: None\n"
    )

    async def run() -> None:
        async with start_runner(long_model) as running:
            process = pid(running)
            failure = await running.wait_for_failure()
            assert failure == RunnerFailure(
                message="the tiny process closed its connection but did not exit"
            )
            await running.stop()
            assert not is_alive(process)

    asyncio.run(run())


def test_a_process_that_breaks_off_a_response_is_killed(
    long_model: Path, plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats continue, but each request would wait in vain."""
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
        async with start_runner(long_model) as running:
            process = pid(running)
            with pytest.raises(AppError) as caught:
                await wait_for_end(running, "a")
            assert caught.value.message == "the engine stopped: its process closed its connection"
            message = (await running.wait_for_failure()).message
            assert message.startswith("the tiny process closed its connection but did not exit: ")
            assert "RuntimeError: planted" in message
            await running.stop()
            assert not is_alive(process)

    asyncio.run(run())


# memory runs out in the handler of a request, or in a callback of asyncio
OOM_CODE = {
    "answering": "raise MemoryError\n",
    "reading": "it.asyncio.get_running_loop().call_soon(exhaust)\n    await it.asyncio.sleep(60)\n",
}


@pytest.mark.parametrize("code", OOM_CODE.values(), ids=OOM_CODE)
def test_a_process_without_memory_for_a_request_exits(
    long_model: Path, plant: Callable[[str], None], code: str
) -> None:
    plant(
        "from app.runners import worker_server as it\n"
        "def exhaust():\n"
        "    raise MemoryError\n"
        "async def submit(self, request):\n"
        f"    {code}"
        "it.WorkerServer._submit = submit\n"
    )

    async def run() -> None:
        async with start_runner(long_model) as running:
            with pytest.raises(AppError) as caught:
                await wait_for_end(running, "a")
            ended = "the engine stopped: its process ended with exit status 1"
            assert caught.value.message == ended
            assert "MemoryError" in (await running.wait_for_failure()).message

    asyncio.run(run())


def test_a_dead_process_leaves_no_connection_open(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One idle connection is kept for each concurrent request. To close them takes iterations of
    the event loop, which are long under load."""
    close = AnyIOStream.aclose

    async def close_late(stream: AnyIOStream) -> None:
        await asyncio.sleep(0.02)
        await close(stream)

    monkeypatch.setattr(AnyIOStream, "aclose", close_late)

    async def run() -> None:
        async with start_runner(long_model) as running:
            jobs = (answer(running, f"job {i}", b"x", max_tokens=2) for i in range(12))
            await asyncio.gather(*jobs)
            address = str(socket_path(running))
            assert address in _peers()
            os.kill(pid(running), signal.SIGKILL)
            await running.wait_for_failure()
        assert address not in _peers()

    asyncio.run(run())


def _peers() -> set[str]:
    """The peer addresses of the sockets of this process."""
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
    loop.on_stage("decode, batch size 8")
    time.sleep(3600)

Loop.step = step
"""


def test_a_hanging_engine_is_killed(long_model: Path, plant: Callable[[str], None]) -> None:
    plant(HANG)

    async def run() -> None:
        async with start_runner(long_model, watchdog=WATCHDOG) as running:
            process = pid(running)
            ended, failure = await asyncio.gather(
                wait_for_end(running, "a"), running.wait_for_failure()
            )
            message = failure.message
            assert failure.cause == "fault"
            assert message.startswith("the engine has made no progress for ")
            assert message.endswith("(decode, batch size 8)")
            assert ended.error == f"the engine stopped: {message}"
            assert running.status().state in ("stalled", "failed")
            await running.stop()
            assert not is_alive(process)

    asyncio.run(run())


DEAF = """
import asyncio
from app.runners.worker_server import WorkerServer

async def deaf(self, request):
    await asyncio.Event().wait()

WorkerServer._submit = WorkerServer._probe = deaf
"""


def test_a_process_that_accepts_no_requests_is_killed(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    """Its heartbeats continued, `/health` was ok, and no request was answered."""
    plant(DEAF)

    async def run() -> None:
        async with start_runner(tiny_model, watchdog=1.0) as running:
            process = pid(running)
            waiting = asyncio.create_task(wait_for_end(running, "a"))
            failure = await running.wait_for_failure()
            assert failure.message == "the tiny process has accepted no requests for 2 s"
            with pytest.raises(AppError, match="the engine stopped: the tiny process has accepted"):
                await waiting
            await running.stop()
            assert not is_alive(process)

    asyncio.run(run())


def test_a_process_that_cannot_be_reached_is_not_reported_as_healthy(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server is out of descriptors, for example: the process is not replaced, and serves
    again when descriptors are free."""
    monkeypatch.setattr("app.runners.process_runner._PROBE_INTERVAL", 0.01)
    monkeypatch.setattr("app.runners.process_runner._PROBE_RETRY_DELAY", 0.01)
    # a failed connection would count for longer
    monkeypatch.setattr("app.runners.process_runner._MAX_MISSED_PROBES", 1e-4)
    broken, probes = True, 0
    real = WorkerClient.probe

    async def probe(client: WorkerClient) -> None:
        nonlocal probes
        probes += 1
        if broken:
            raise OSError(errno.EMFILE, "Too many open files")
        await real(client)

    monkeypatch.setattr(WorkerClient, "probe", probe)

    async def run() -> None:
        nonlocal broken
        async with start_runner(tiny_model) as running:
            while probes < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            status = running.status()
            assert status.state == "stalled"
            assert status.error is not None
            assert status.error.startswith("the tiny process cannot be reached: ")
            assert status.error.endswith("Too many open files")
            broken = False
            while running.status().state != "ready":  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            assert await answer(running, "a", b"x", max_tokens=2)

    asyncio.run(run())


def test_a_process_whose_socket_is_removed_is_killed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that cleans up temporary files removed it. The probes used an open connection, and
    the errors of others were not counted, so jobs failed until the server restarted."""
    monkeypatch.setattr("app.runners.process_runner._PROBE_INTERVAL", 0.01)
    monkeypatch.setattr("app.runners.process_runner._PROBE_RETRY_DELAY", 0.1)
    monkeypatch.setattr("app.runners.process_runner._MAX_MISSED_PROBES", 0.3 / 60)

    async def run() -> None:
        async with start_runner(tiny_model, watchdog=60.0) as running:
            process = pid(running)
            assert await answer(running, "a", b"x", max_tokens=2)
            shutil.rmtree(socket_path(running).parent)
            failure = await running.wait_for_failure()
            assert failure.cause == "fault"
            assert failure.message.startswith("the tiny process has accepted no requests for 0 s: ")
            assert "No such file or directory" in failure.message
            await running.stop()
            assert not is_alive(process)

    asyncio.run(run())


def test_a_probe_without_a_free_descriptor_gives_another_error_than_a_failed_connection(
    tiny_model: Path,
) -> None:
    """It was retried until it counted as missed, which ended the process."""

    async def run() -> None:
        async with start_runner(tiny_model) as running:
            client = running._dispatcher.engine
            assert isinstance(client, WorkerClient)
            with exhaust_descriptors(), pytest.raises(OSError, match="Too many open") as caught:
                await client.probe()
            assert caught.value.errno == errno.EMFILE
            assert not isinstance(caught.value, ConnectionError)
            await client.probe()

    asyncio.run(run())


def test_a_failing_engine_reports_the_reason_before_its_exit(
    long_model: Path, plant: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    plant(
        "from app.engine.loop import Loop\n"
        "real = Loop.step\n"
        "def step(loop):\n"
        "    if loop.idle:\n"  # a probe may precede the job
        "        return real(loop)\n"
        "    raise AssertionError('planted')\n"
        "Loop.step = step\n"
    )

    async def run() -> None:
        async with start_runner(long_model) as running:
            process = pid(running)
            ended, failure = await asyncio.gather(
                wait_for_end(running, "a"), running.wait_for_failure()
            )
            assert failure == RunnerFailure(message="AssertionError: planted")
            assert ended.error == f"the engine stopped: {failure.message}"
            await running.stop()
            assert not is_alive(process)

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
def test_a_process_that_runs_out_of_memory_affects_only_itself(
    long_model: Path, plant: Callable[[str], None]
) -> None:
    plant(HUNGRY)

    async def run() -> None:
        async with start_runner(long_model) as running:
            limit = address_space_bytes(pid(running)) + (128 << 20)
            resource.prlimit(pid(running), resource.RLIMIT_AS, (limit, limit))
            for ended in await asyncio.gather(
                *(wait_for_end(running, f"job {i}") for i in range(4))
            ):
                assert ended.error is not None
                assert ended.error.startswith("the engine stopped")
            assert "emory" in (await running.wait_for_failure()).message

    asyncio.run(run())


def test_endless_output_blocks_no_request(
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
        async with start_runner(long_model) as running:
            request = job("a", b"hello", max_tokens=40, stop_token_ids=frozenset[int]())
            async with running.submit(request) as submission:
                updates = [update async for update in flatten(submission)]
            assert len(ids(updates)) == 40

    asyncio.run(run())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) < 500
    assert max(map(len, messages)) < 2100


def test_output_without_a_logger_is_a_warning(
    long_model: Path, plant: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the last output of a process would be one of many lines with `--log-level info`,
    and would be lost with `--log-level warning`."""
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
            async with start_runner(long_model):
                pass

    asyncio.run(run())
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels["tiny: x: fine"] == levels["tiny:   more of it"] == "INFO"
    assert levels["tiny: terminating: no reason"] == levels["tiny:   at 0x0"] == "WARNING"


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
@pytest.mark.parametrize("kernel_kills", [False, pytest.param(True, marks=linux)])
def test_the_process_exits_when_its_parent_is_killed(
    long_model: Path, plant: Callable[[str], None], stopped: bool, kernel_kills: bool
) -> None:
    """kernel_kills: whether the kernel kills processes whose parent has exited, as Linux does."""
    if not kernel_kills:
        plant("import app.runners.parent_watch as it\nit.tie_to_parent = lambda: None")
    command = [sys.executable, "-c", PARENT, str(long_model)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        if stopped:
            # a thread that stops only after the exit of the parent would stay stopped: the kernel
            # does not check later
            suspend(process)
        parent.kill()
    wait_until(lambda: not is_alive(process))
