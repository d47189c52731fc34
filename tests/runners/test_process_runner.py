"""The runner with its engine in a separate process."""

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
from dataclasses import replace
from pathlib import Path

import pytest

from app import store
from app.core.embeddings import EmbedJob
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
    start_runner,
)

UseRunner = Callable[[Callable[[ProcessRunner], Awaitable[None]]], None]


@pytest.fixture
def runner() -> MakeRunner:
    return lambda: ProcessRunner(Settings(prefill_chunk=8, debug=True))


@pytest.fixture(scope="module")
def use_runner(tiny_model: Path) -> Iterator[UseRunner]:
    """A function that runs a test body with a shared runner, which must still work afterwards."""
    with asyncio.Runner() as loop:
        running = ProcessRunner(Settings())
        loop.run(running.start(store.resolve(str(tiny_model))))

        async def checked(body: Callable[[ProcessRunner], Awaitable[None]]) -> None:
            async with asyncio.timeout(PATIENCE):
                await body(running)
                assert ids(await answer(running, "afterwards", b"hello"))

        yield lambda body: loop.run(checked(body))
        loop.run(running.stop())


def test_only_this_user_can_open_the_socket_of_a_process(use_runner: UseRunner) -> None:
    async def body(running: ProcessRunner) -> None:
        path = socket_path(running)
        assert path.is_socket()
        assert path.parent.stat().st_uid == os.getuid()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    use_runner(body)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the sockets of a process")
def test_a_process_listens_on_no_port(use_runner: UseRunner) -> None:
    async def body(running: ProcessRunner) -> None:
        inodes = socket_inodes(pid(running))
        assert inodes
        assert not inodes & inodes_of_ports(pid(running))

    use_runner(body)


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


def test_sockets_of_killed_servers_are_removed() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as exited:
        pass
    stale = Path(tempfile.mkdtemp(prefix=f"mlxrunner-{exited.pid}-", dir="/tmp"))
    own = Path(tempfile.mkdtemp(prefix=f"mlxrunner-{os.getpid()}-", dir="/tmp"))
    try:
        listener = PrivateSocket()
        listener.close()
        assert own.exists()
        if listener.path.parents[1] == stale.parent:
            assert not stale.exists()
    finally:
        for directory in (stale, own):
            shutil.rmtree(directory, ignore_errors=True)


def test_a_request_without_a_free_descriptor_gets_retry_after(
    use_runner: UseRunner,
) -> None:
    """It failed with 500 after five seconds. Other requests share the connections that are open."""

    async def body(running: ProcessRunner) -> None:
        options = {
            "grammar": ChoiceGrammar(options=("a",)),
            "stop_token_ids": frozenset({tiny.END}),
        }
        assert ids(await answer(running, "opens a connection", b"hello"))
        with exhaust_descriptors():
            refused = asyncio.create_task(answer(running, "refused", b"hello", **options))
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
        assert ids(await answer(running, "again", b"hello", **options)) == [ord("a")]

    use_runner(body)


def test_embeddings_without_a_free_descriptor_get_retry_after(tiny_model: Path) -> None:
    """They failed with 500. The runner is new, because no connection for embeddings may be open."""

    async def run() -> None:
        inputs = EmbedJob(id="a", inputs=((1, 2),), pooling="mean")
        async with start_runner(tiny_model) as running:
            with (
                exhaust_descriptors(),
                pytest.raises(AppError, match="the server is out of file descriptors") as caught,
            ):
                await running.embed(inputs)
            error = caught.value
            assert (error.kind, error.code, error.retry_after) == (
                ErrorKind.OVERLOADED,
                "out_of_resources",
                1,
            )
            assert len(await running.embed(replace(inputs, id="b"))) == 1

    asyncio.run(run())


def test_garbage_on_the_socket_affects_no_request(use_runner: UseRunner) -> None:
    async def body(running: ProcessRunner) -> None:
        with ExitStack() as stack:
            for garbage in (
                b"\x00" * 100_000,
                b"POST /v1/jobs HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n{",
                b"GET /v1/status HTTP/1.1\r\nHost: x\r\n",
                b"",
            ):
                for _ in range(25):
                    client = stack.enter_context(socket.socket(socket.AF_UNIX))
                    client.connect(str(socket_path(running)))
                    with suppress(OSError):  # the server may close it at once
                        client.sendall(garbage)
            assert ids(await answer(running, "meanwhile", b"hello"))

    use_runner(body)


def test_a_sigterm_of_a_service_manager_ends_no_stream(use_runner: UseRunner) -> None:
    async def body(running: ProcessRunner) -> None:
        task = asyncio.create_task(answer(running, "meanwhile", b"hello", max_tokens=200))
        os.kill(pid(running), signal.SIGTERM)
        assert ids(await task)

    use_runner(body)


@linux
def test_the_oom_killer_prefers_the_model_process(use_runner: UseRunner) -> None:
    def oom_score_adj(process: int | str) -> int:
        return int(Path(f"/proc/{process}/oom_score_adj").read_text())

    async def body(running: ProcessRunner) -> None:
        assert oom_score_adj(pid(running)) > oom_score_adj("self")

    use_runner(body)


@pytest.mark.exhaustive
@linux
def test_many_starts_leave_no_descriptors_open(tiny_model: Path) -> None:
    def count_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def once(kill: bool) -> None:
        async with start_runner(tiny_model) as running:
            await answer(running, "a", b"hello")
            if kill:
                os.kill(pid(running), signal.SIGKILL)
                await running.wait_for_failure()

    async def run() -> None:
        await once(kill=False)
        before = count_descriptors()
        for _ in range(2):
            await asyncio.gather(once(kill=False), once(kill=True), once(kill=False))
        assert count_descriptors() <= before

    asyncio.run(run())
