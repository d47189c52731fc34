"""The runner whose engine lives in a process of its own."""

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.requests import ChoiceGrammar
from app.core.settings import Settings
from app.runners.child_process import PrivateSocket
from app.runners.process_runner import ProcessRunner
from tests import tiny
from tests.descriptors import exhaust_descriptors
from tests.runners.contract import *  # noqa: F403  # the suite that every runner passes
from tests.runners.contract import PATIENCE, MakeRunner, answer, ids
from tests.runners.spawning import (
    linux,
    pid,
    socket_path,
    started,
)

Healthy = Callable[[Callable[[ProcessRunner], Awaitable[None]]], None]


@pytest.fixture
def runner() -> MakeRunner:
    return lambda: ProcessRunner(Settings(prefill_chunk=8, debug=True))


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


def test_only_this_user_can_open_the_socket_of_a_process(healthy: Healthy) -> None:
    async def body(running: ProcessRunner) -> None:
        path = socket_path(running)
        assert path.is_socket()
        assert path.parent.stat().st_uid == os.getuid()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    healthy(body)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the sockets of a process")
def test_a_process_listens_on_no_port(healthy: Healthy) -> None:
    async def body(running: ProcessRunner) -> None:
        inodes = socket_inodes(pid(running))
        assert inodes
        assert not inodes & inodes_of_ports(pid(running))

    healthy(body)


def socket_inodes(process: int) -> set[str]:
    folder = f"/proc/{process}/fd"
    links = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def inodes_of_ports(process: int) -> set[str]:
    tables = (Path(f"/proc/{process}/net/{name}") for name in ("tcp", "tcp6", "udp", "udp6"))
    return {
        row.split()[9]
        for table in tables
        if table.exists()
        for row in table.read_text().splitlines()[1:]
    }


def test_the_socket_is_removed_with_its_process(tiny_model: Path) -> None:
    async def run() -> None:
        running = ProcessRunner(Settings())
        await running.start(store.resolve(str(tiny_model)))
        directory = socket_path(running).parent
        await running.stop()
        assert not directory.exists()

    asyncio.run(run())


def test_sockets_of_servers_that_were_killed_are_removed() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    stale = Path(tempfile.mkdtemp(prefix=f"mlxrunner-{ended.pid}-", dir="/tmp"))
    mine = Path(tempfile.mkdtemp(prefix=f"mlxrunner-{os.getpid()}-", dir="/tmp"))
    try:
        listener = PrivateSocket()
        listener.close()
        assert mine.exists()
        if listener.path.parents[1] == stale.parent:
            assert not stale.exists()
    finally:
        for directory in (stale, mine):
            shutil.rmtree(directory, ignore_errors=True)


def test_a_request_for_which_no_connection_can_be_opened_comes_again_later(
    healthy: Healthy,
) -> None:
    """It was answered with 500, five seconds later. Others take turns on the connections that there
    are."""

    async def body(running: ProcessRunner) -> None:
        follows = {
            "grammar": ChoiceGrammar(options=("a",)),
            "stop_token_ids": frozenset({tiny.END}),
        }
        assert ids(await answer(running, "opens a connection", b"hello"))
        with exhaust_descriptors():
            refused = asyncio.create_task(answer(running, "refused", b"hello", **follows))
            names = [f"other-{number}" for number in range(10)]
            others = await asyncio.gather(*(answer(running, name, b"hello") for name in names))
            assert all(map(ids, others))
            with pytest.raises(AppError, match="the server is out of file descriptors") as caught:
                await refused
        error = caught.value
        assert (error.kind, error.code, error.retry_after) == (
            ErrorKind.OVERLOADED,
            "out_of_resources",
            1,
        )
        assert ids(await answer(running, "again", b"hello", **follows)) == [ord("a")]

    healthy(body)


def test_garbage_on_the_socket_disturbs_no_request(healthy: Healthy) -> None:
    async def body(running: ProcessRunner) -> None:
        with ExitStack() as crowd:
            for garbage in (
                b"\x00" * 100_000,
                b"POST /v1/jobs HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n{",
                b"GET /v1/updates HTTP/1.1\r\nHost: x\r\n",
                b"",
            ):
                for _ in range(25):
                    line = crowd.enter_context(socket.socket(socket.AF_UNIX))
                    line.connect(str(socket_path(running)))
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


@linux
def test_many_starts_leave_nothing_open(tiny_model: Path) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def once(kill: bool) -> None:
        async with started(tiny_model) as running:
            await answer(running, "a", b"hello")
            if kill:
                os.kill(pid(running), signal.SIGKILL)
                await running.wait_for_failure()

    async def run() -> None:
        await once(kill=False)
        before = opened()
        for _ in range(2):
            await asyncio.gather(once(kill=False), once(kill=True), once(kill=False))
        assert opened() <= before

    asyncio.run(run())
