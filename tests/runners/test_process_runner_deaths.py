"""Model processes that die, hang, flood the log, or lose their parent."""

import asyncio
import logging
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.jobs import Ended
from app.core.model_files import ModelFiles
from app.core.models import ServedModel
from app.core.ports import RunnerFailure
from app.core.settings import Settings
from app.runners.child_process import count_oom_kills
from app.runners.pool import ModelPool
from app.runners.process_runner import ProcessRunner
from tests.batches import flatten
from tests.engine.harness import job
from tests.runners.contract import answer, ids
from tests.runners.spawning import (
    address_space_bytes,
    is_alive,
    linux,
    pid,
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
        "import socket, time\n"
        "from app.core.jobs import EngineReady\n"
        "from app.runners.worker import Worker\n"
        "receive = Worker._receive\n"
        "def close(end):\n"
        "    end.shutdown(socket.SHUT_WR)\n"
        "    time.sleep(600)  # otherwise it would exit when the parent closes its end\n"
        "def receive_and_close(self, message):\n"
        "    if isinstance(message, EngineReady):\n"
        "        self._loop.call_later(0.1, close, self._end)\n"
        "    return receive(self, message)\n"
        "Worker._receive = receive_and_close\n"
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


# memory runs out while a command is handled, in a task, or in a callback of asyncio
OOM_CODE = {
    "command": "exhaust()",
    "task": "self._start_task(exhaust_later())",
    "callback": "self._loop.call_soon(exhaust)",
}


@pytest.mark.parametrize("code", OOM_CODE.values(), ids=OOM_CODE)
def test_a_process_without_memory_for_a_request_exits(
    long_model: Path, plant: Callable[[str], None], code: str
) -> None:
    plant(
        "from app.runners.worker import Worker\n"
        "def exhaust():\n"
        "    raise MemoryError\n"
        "async def exhaust_later():\n"
        "    raise MemoryError\n"
        "def submit(self, job):\n"
        f"    {code}\n"
        "Worker._submit = submit\n"
    )

    async def run() -> None:
        async with start_runner(long_model) as running:
            with pytest.raises(AppError) as caught:
                await wait_for_end(running, "a")
            ended = "the engine stopped: its process ended with exit status 1"
            assert caught.value.message == ended
            assert "MemoryError" in (await running.wait_for_failure()).message

    asyncio.run(run())


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


# The engine does not take commands. Its process answers probes.
DEAF = """
from app.engine.thread import EngineThread
EngineThread.submit = EngineThread.probe = lambda self, *_: None
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
            ended = await waiting
            assert ended.error == f"the engine stopped: {failure.message}"
            await running.stop()
            assert not is_alive(process)

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
        "from app.runners import worker\n"
        "def load(files, settings, report):\n"
        "    logging.getLogger('x').info('fine\\n  more of it')\n"
        "    sys.stderr.write('terminating: no reason\\n  at 0x0\\n')\n"
        "    sys.exit(3)\n"
        "worker.load_engine = load\n"
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
