"""The runner whose engine lives in a process of its own."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.requests import ChoiceGrammar
from app.core.settings import Settings
from app.runners.process_runner import ProcessRunner
from tests import tiny
from tests.descriptors import exhaust_descriptors
from tests.runners.contract import *  # noqa: F403  # the suite that every runner passes
from tests.runners.contract import PATIENCE, MakeRunner, answer, ids
from tests.runners.spawning import (
    linux,
    pid,
    port,
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
                assert (reply.status_code, reply.text) == (401, "unauthorized")
                assert "server" not in reply.headers

    healthy(body)


def test_a_request_for_which_no_connection_can_be_opened_comes_again_later(
    healthy: Healthy,
) -> None:
    """It was answered with 500, five seconds later. Others take turns on the connections that there
    are."""

    async def body(running: ProcessRunner) -> None:
        follows = {"grammar": ChoiceGrammar(options=("a",)), "stop_ids": frozenset({tiny.END})}
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
