"""The runner whose engine lives in a process of its own: what is said of all runners, and what may
befall a process."""

import asyncio
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx2
import pytest

from app import store
from app.core.errors import AppError, Kind
from app.core.jobs import Ended, Job, Update
from app.core.settings import Settings
from app.runners.process import ProcessRunner
from tests.engine.driving import job
from tests.runners.contract import *  # noqa: F403  # the suite that every runner passes
from tests.runners.contract import PATIENCE, MakeRunner, answer, ids
from tests.serving import ROOT

Healthy = Callable[[Callable[[ProcessRunner], Awaitable[None]]], None]

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")


@pytest.fixture
def runner() -> MakeRunner:
    return lambda: ProcessRunner(Settings(prefill_chunk=8, debug=True))


@asynccontextmanager
async def started(folder: Path, **changes: object) -> AsyncIterator[ProcessRunner]:
    running = ProcessRunner(Settings(**changes))  # type: ignore[arg-type]
    await running.start(store.resolve(str(folder)))
    try:
        async with asyncio.timeout(PATIENCE):
            yield running
    finally:
        await running.stop()


def endless(name: str) -> Job:
    return job(name, b"hello", max_tokens=4000, stop_ids=frozenset[int]())


def pid(running: ProcessRunner) -> int:
    found = running.status().pid
    assert found is not None
    return found


def port(running: ProcessRunner) -> int:
    assert running._spawned is not None
    return running._spawned.port


def lives(process: int) -> bool:
    """Whether it does anything any more; one that nobody has buried does not."""
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that plants code into every process that is started: it runs before all else."""

    def planted(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return planted


async def end(running: ProcessRunner, name: str) -> Ended:
    """How a job ends that would go on for long."""
    async with running.submit(endless(name)) as submission:
        last: Update | None = None
        async for update in submission:
            last = update
    assert isinstance(last, Ended)
    return last


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_everybody_who_waits_hears_of_a_death(tiny_model: Path, how: signal.Signals) -> None:
    async def run() -> None:
        async with started(tiny_model) as running:
            process = pid(running)
            waiting = asyncio.gather(*(end(running, f"job {i}") for i in range(3)))
            watching = asyncio.gather(*(running.over() for _ in range(3)))
            while running.status().stats.running < 3:  # noqa: ASYNC110  # the engine says so
                await asyncio.sleep(0.01)
            os.kill(process, how)
            for ended in await waiting:
                assert ended.reason == "error"
                assert ended.error is not None
                assert ended.error.startswith("the engine stopped: its process was killed by SIG")
            for said in await watching:
                assert said.startswith(f"the process of tiny was killed by {how.name}")
            assert ("memory" in said) == (how is signal.SIGKILL)
            assert ("Segmentation" in said) == (how is signal.SIGSEGV)
            status = running.status()
            assert (status.state, status.error, status.pid) == ("failed", said, None)
            with pytest.raises(AppError, match="the engine is not running") as caught:
                await answer(running, "b", b"x")
            assert caught.value.kind is Kind.ENGINE
            assert not lives(process)

    asyncio.run(run())


def test_a_process_that_says_nothing_any_more_is_replaceable(tiny_model: Path) -> None:
    async def run() -> None:
        async with started(tiny_model, watchdog=0.5) as running:
            process = pid(running)
            waiting = asyncio.create_task(end(running, "a"))
            while not running.status().stats.running:  # noqa: ASYNC110  # the engine says so
                await asyncio.sleep(0.01)
            os.kill(process, signal.SIGSTOP)
            said = await running.over()
            assert said.startswith("the engine's process has said nothing for ")
            assert (await waiting).error == f"the engine stopped: {said}"
            await running.stop()
            assert not lives(process)

    asyncio.run(run())


HANG = """
import time
from app.engine.loop import Loop

def step(loop):
    loop.on_stage("decode of 8 sequences")
    time.sleep(3600)

Loop.step = step
"""


def test_an_engine_that_hangs_is_killed(tiny_model: Path, plant: Callable[[str], None]) -> None:
    plant(HANG)

    async def run() -> None:
        async with started(tiny_model, watchdog=0.5) as running:
            process = pid(running)
            ended, said = await asyncio.gather(end(running, "a"), running.over())
            assert said.startswith("the engine has not moved for ")
            assert said.endswith("(decode of 8 sequences)")
            assert ended.error == f"the engine stopped: {said}"
            assert running.status().state in ("stalled", "failed")
            await running.stop()
            assert not lives(process)

    asyncio.run(run())


def test_an_engine_that_breaks_tells_why_before_it_ends(
    tiny_model: Path, plant: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    plant(
        "from app.engine.loop import Loop\n"
        "def step(loop): raise AssertionError('planted')\n"
        "Loop.step = step\n"
    )

    async def run() -> None:
        async with started(tiny_model) as running:
            process = pid(running)
            ended, said = await asyncio.gather(end(running, "a"), running.over())
            assert said == "AssertionError: planted"
            assert ended.error == f"the engine stopped: {said}"
            await running.stop()
            assert not lives(process)

    asyncio.run(run())
    assert "in step" in caplog.text, "its traceback is in our log"


async def refusal(folder: Path, **changes: object) -> AppError:
    running = ProcessRunner(Settings(**changes))  # type: ignore[arg-type]
    with pytest.raises(AppError) as caught:
        await asyncio.wait_for(running.start(store.resolve(str(folder))), PATIENCE)
    assert running.status().state == "failed"
    assert running.status().pid is None
    await running.stop()
    return caught.value


def test_a_process_that_ends_before_it_is_ready_is_told_with_its_last_words(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    plant("import os, sys\nsys.stderr.write('libmlx.so: cannot open\\nbye\\n')\nos._exit(3)")
    error = asyncio.run(refusal(tiny_model))
    assert error.kind is Kind.MODEL_FILES
    assert error.message == (
        "tiny could not be loaded: its process ended with exit status 3: "
        "libmlx.so: cannot open; bye"
    )


def test_a_load_that_does_not_get_on_is_given_up(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    plant("import time\nimport app.engine.load as it\nit.load = lambda *_: time.sleep(3600)")
    error = asyncio.run(refusal(tiny_model, load_timeout=1.5))
    assert error.message == "tiny could not be loaded: nothing moved for 2 s at 0 %"


def test_progress_of_a_load_is_seen_and_buys_time(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    plant(
        "import time\n"
        "import app.engine.load as it\n"
        "real = it.load\n"
        "def load(files, settings, report):\n"
        "    for percent in range(0, 100, 20):\n"
        "        report(percent, percent)\n"
        "        time.sleep(0.5)\n"
        "    return real(files, settings, report)\n"
        "it.load = load\n"
    )

    async def run() -> set[int]:
        running = ProcessRunner(Settings(load_timeout=2.0))
        starting = asyncio.create_task(running.start(store.resolve(str(tiny_model))))
        seen: set[int] = set()
        while not starting.done():
            status = running.status()
            seen.add(status.progress)
            assert status.state in ("loading", "ready")
            with pytest.raises(AppError, match="still loading"):
                await answer(running, "a", b"x")
            await asyncio.sleep(0.05)
        await starting
        await running.stop()
        return seen

    assert {20, 40, 60, 80} <= asyncio.run(run())


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


def addressed(process: int) -> int:
    """Bytes of its address space."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


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
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    plant(HUNGRY)

    async def run() -> None:
        async with started(tiny_model) as running:
            limit = addressed(pid(running)) + (128 << 20)
            resource.prlimit(pid(running), resource.RLIMIT_AS, (limit, limit))
            for ended in await asyncio.gather(*(end(running, f"job {i}") for i in range(4))):
                assert ended.error is not None
                assert ended.error.startswith("the engine stopped")
            assert "emory" in await running.over()

    asyncio.run(run())


@linux
def test_a_process_that_gets_no_memory_to_begin_with_says_so(
    tiny_model: Path, plant: Callable[[str], None]
) -> None:
    plant("import resource as it\nit.setrlimit(it.RLIMIT_AS, (150 << 20, 150 << 20))")
    error = asyncio.run(refusal(tiny_model))
    assert error.kind is Kind.MODEL_FILES
    assert "emory" in error.message


def test_a_flood_of_words_without_an_end_blocks_nobody(
    tiny_model: Path, plant: Callable[[str], None], caplog: pytest.LogCaptureFixture
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
        async with started(tiny_model) as running:
            asked = job("a", b"hello", max_tokens=40, stop_ids=frozenset[int]())
            async with running.submit(asked) as submission:
                updates = [update async for update in submission]
            assert len(ids(updates)) == 40

    asyncio.run(run())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) < 500
    assert max(map(len, said)) < 2100


@pytest.fixture(scope="module")
def healthy(tiny_model: Path) -> Iterator[Healthy]:
    """A function that does something to a runner; one runner for all tests that should not mind."""
    with asyncio.Runner() as loop:
        running = ProcessRunner(Settings())
        loop.run(running.start(store.resolve(str(tiny_model))))

        async def checked(body: Callable[[ProcessRunner], Awaitable[None]]) -> None:
            async with asyncio.timeout(PATIENCE):
                await body(running)
                assert ids(await answer(running, "afterwards", b"hello"))

        yield lambda body: loop.run(checked(body))
        loop.run(running.stop())


@pytest.mark.parametrize("secret", [None, b"Bearer", b"Bearer x", b"Bearer \xc3\xa9"])
def test_nobody_without_the_secret_gets_in(healthy: Healthy, secret: bytes | None) -> None:
    async def body(running: ProcessRunner) -> None:
        headers = {} if secret is None else {b"Authorization": secret}
        base = f"http://127.0.0.1:{port(running)}"
        async with httpx2.AsyncClient(trust_env=False, verify=False, base_url=base) as client:
            for method, path in (
                ("GET", "/v1/status"),
                ("GET", "/v1/updates"),
                ("POST", "/v1/jobs"),
                ("POST", "/v1/embed"),
                ("DELETE", "/v1/jobs/a"),
                ("GET", "/docs"),
            ):
                reply = await client.request(method, path, headers=headers)
                assert (reply.status_code, reply.text) == (401, "no")
                assert "server" not in reply.headers

    healthy(body)


@pytest.mark.parametrize("option", [None, socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_nobody_else_gets_the_port(healthy: Healthy, option: int | None) -> None:
    async def body(running: ProcessRunner) -> None:
        with socket.socket() as thief:
            if option is not None:
                thief.setsockopt(socket.SOL_SOCKET, option, 1)
            with pytest.raises(OSError, match="in use"):
                thief.bind(("127.0.0.1", port(running)))

    healthy(body)


def test_garbage_on_the_port_harms_nobody(healthy: Healthy) -> None:
    async def body(running: ProcessRunner) -> None:
        with ExitStack() as crowd:
            for garbage in (
                b"\x00" * 100_000,
                b"POST /v1/jobs HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n{",
                b"GET /v1/updates HTTP/1.1\r\nHost: x\r\n",
                b"",
            ):
                for _ in range(25):
                    line = socket.create_connection(("127.0.0.1", port(running)))
                    crowd.enter_context(line)
                    with suppress(OSError):  # it may hang up at once
                        line.sendall(garbage)
            assert ids(await answer(running, "meanwhile", b"hello"))

    healthy(body)


def test_a_service_manager_that_tells_all_processes_to_end_ends_no_stream(healthy: Healthy) -> None:
    async def body(running: ProcessRunner) -> None:
        asking = asyncio.create_task(answer(running, "meanwhile", b"hello", max_tokens=200))
        os.kill(pid(running), signal.SIGTERM)
        assert ids(await asking)

    healthy(body)


@linux
def test_the_kernel_is_told_whom_to_kill_first(healthy: Healthy) -> None:
    def points(process: int | str) -> int:
        return int(Path(f"/proc/{process}/oom_score_adj").read_text())

    async def body(running: ProcessRunner) -> None:
        assert points(pid(running)) > points("self")

    healthy(body)


PARENT = """
import asyncio, sys
from app import store
from app.core.settings import Settings
from app.runners.process import ProcessRunner
from tests.engine.driving import job

async def main():
    running = ProcessRunner(Settings())
    await running.start(store.resolve(sys.argv[1]))
    async with running.submit(job("a", b"hello", max_tokens=4000, stop_ids=frozenset())):
        print(running.status().pid, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("helps", [False, pytest.param(True, marks=linux)])
def test_nobody_is_left_behind_by_a_parent_that_was_killed(
    tiny_model: Path, plant: Callable[[str], None], stopped: bool, helps: bool
) -> None:
    """helps: whether the kernel kills whose parent is gone. Not all of them do."""
    if not helps:
        plant("import app.runners.lifeline as it\nit.tie_to_parent = lambda: None")
    command = [sys.executable, "-c", PARENT, str(tiny_model)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        if stopped:
            os.kill(process, signal.SIGSTOP)
        parent.kill()
    wait_until(lambda: not lives(process))


@linux
def test_many_starts_leave_nothing_open(tiny_model: Path) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def once(kill: bool) -> None:
        async with started(tiny_model) as running:
            await answer(running, "a", b"hello")
            if kill:
                os.kill(pid(running), signal.SIGKILL)
                await running.over()

    async def run() -> None:
        await once(kill=False)
        before = opened()
        for _ in range(2):
            await asyncio.gather(once(kill=False), once(kill=True), once(kill=False))
        assert opened() == before

    asyncio.run(run())
