"""The runner with its engine in a separate process."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.requests import ChoiceGrammar, EmbedJob
from app.core.settings import Settings
from app.runners import channel
from app.runners.process_runner import ProcessRunner
from tests import tiny
from tests.descriptors import exhaust_descriptors
from tests.engine.harness import job
from tests.runners.contract import *  # noqa: F403  # the suite that every runner passes
from tests.runners.contract import PATIENCE, MakeRunner, answer, ids
from tests.runners.spawning import (
    linux,
    pid,
    start_runner,
)

UseProcess = Callable[[Callable[[ProcessRunner], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def runner() -> MakeRunner:
    return lambda: ProcessRunner(Settings(prefill_chunk=8, debug=True))


@pytest.fixture(scope="module")
def use_runner(tiny_model: Path) -> Iterator[UseProcess]:
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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the sockets of a process")
def test_a_process_listens_on_no_port(use_runner: UseProcess) -> None:
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


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_of_a_service_manager_ends_no_stream(
    use_runner: UseProcess, sent: signal.Signals
) -> None:
    async def body(running: ProcessRunner) -> None:
        task = asyncio.create_task(answer(running, "meanwhile", b"hello", max_tokens=200))
        os.kill(pid(running), sent)
        assert ids(await task)

    use_runner(body)


def test_requests_need_no_free_file_descriptor(use_runner: UseProcess) -> None:
    """They failed with 503 after two seconds."""
    grammar = ChoiceGrammar(options=("a",))
    inputs = EmbedJob(id="vectors", inputs=((1, 2),), pooling="mean")

    async def body(running: ProcessRunner) -> None:
        with exhaust_descriptors():
            constrained, plain, vectors = await asyncio.gather(
                answer(running, "one", b"x", grammar=grammar, stop_token_ids=frozenset({tiny.END})),
                answer(running, "two", b"x"),
                running.embed(inputs),
            )
        assert ids(constrained) == [ord("a")]
        assert ids(plain)
        assert len(vectors) == 1

    use_runner(body)


def test_a_prompt_of_megabytes_and_a_batch_of_embeddings_fit(use_runner: UseProcess) -> None:
    inputs = EmbedJob(id="vectors", inputs=((1,),) * 5000, pooling="mean")

    async def body(running: ProcessRunner) -> None:
        async with running.submit(job("long", bytes(1_000_000))):
            pass  # the process has accepted it
        vectors = await running.embed(inputs)
        assert vectors == (vectors[0],) * 5000

    use_runner(body)


def test_a_request_that_exceeds_the_limit_of_a_message_is_rejected(
    use_runner: UseProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(running: ProcessRunner) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(channel, "MAX_MESSAGE_BYTES", 1000)
            with pytest.raises(AppError, match="the request is too large") as caught:
                await answer(running, "a", bytes(2000))
            assert caught.value.kind is ErrorKind.TOO_LARGE
            with pytest.raises(AppError, match="the request is too large"):
                await running.embed(EmbedJob(id="b", inputs=((1,) * 2000,), pooling="mean"))

    use_runner(body)


@linux
def test_the_oom_killer_prefers_the_model_process(use_runner: UseProcess) -> None:
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
