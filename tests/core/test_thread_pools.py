"""Thread pools for work off the event loop: fair, bounded, and cancelled with the request."""

import asyncio
import gc
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import partial

import pytest

from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.thread_pools import CancelToken, FairThreadPool, ThreadPools, WorkCancelled
from tests.waiting import wait_until_async

PATIENCE = 30.0


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def run_with_timeout() -> None:
        async with asyncio.timeout(PATIENCE):
            await body()

    asyncio.run(run_with_timeout())


class Text(str):
    """A str with weak references, so that a test can see when it is freed."""

    __slots__ = ("__weakref__",)


class BlockingWork:
    """Work that blocks until it is released. started: names in order."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self._gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._is_released = False

    def work(self, name: str) -> Callable[[], str]:
        gate = self._gates[name]

        def block() -> str:
            self.started.append(name)
            assert self._is_released or gate.wait(PATIENCE)
            return name

        return block

    def release(self, name: str | None = None) -> None:
        """Releases the work of this name, or all work."""
        self._is_released = name is None
        for gate in [self._gates[name]] if name is not None else self._gates.values():
            gate.set()


@pytest.fixture
def blocker() -> Iterator[BlockingWork]:
    blocker = BlockingWork()
    yield blocker
    blocker.release()


def test_a_thread_for_large_work_rests_after_each_job():
    """Most work holds the GIL: without a rest the event loop is starved."""

    def work() -> None:
        deadline = time.thread_time() + 0.02
        while time.thread_time() < deadline:
            pass

    async def run() -> float:
        queue = FairThreadPool(1, "resting", rest=2.0)
        start = time.monotonic()
        await asyncio.gather(*(queue.run(work, key="") for _ in range(4)))
        return time.monotonic() - start

    assert asyncio.run(run()) >= 4 * 0.02 + 3 * 0.04


def test_work_runs_on_another_thread_in_the_context_of_its_request():
    user: ContextVar[str] = ContextVar("user", default="")

    async def body() -> None:
        user.set("anna")
        queue = FairThreadPool(2, "test")
        assert await queue.run(user.get, key="") == "anna"
        assert await queue.run(threading.get_ident, key="") != threading.get_ident()

    run(body)


def test_an_exception_of_the_work_is_raised_in_the_awaiting_task():
    """Also a BaseException, such as the panic of a Rust library."""

    class Panic(BaseException):
        pass

    def fail(error: BaseException) -> None:
        raise error

    async def body() -> None:
        queue = FairThreadPool(1, "test")
        for error in (ValueError("x"), Panic("y")):
            with pytest.raises(type(error)):
                await queue.run(lambda error=error: fail(error), key="")
        assert (queue.running, queue.queued) == (0, 0)

    run(body)


def test_keys_take_turns_and_one_key_has_half_of_the_threads(blocker: BlockingWork):
    """After twenty requests of one client, the first request of another client starts next."""

    async def body() -> None:
        queue = FairThreadPool(4, "test")
        first_tasks = [
            asyncio.create_task(queue.run(blocker.work(f"a{n}"), key="a")) for n in range(20)
        ]
        await wait_until_async(lambda: len(blocker.started) == 2)
        other_tasks = [
            asyncio.create_task(queue.run(blocker.work(f"b{n}"), key="b")) for n in range(3)
        ]
        await wait_until_async(lambda: len(blocker.started) == 4)
        assert sorted(blocker.started) == ["a0", "a1", "b0", "b1"]
        assert (queue.running, queue.queued) == (4, 19)
        blocker.release("b0")
        await wait_until_async(lambda: len(blocker.started) == 5)
        assert blocker.started[4] == "b2"
        blocker.release()
        assert await asyncio.gather(*first_tasks) == [f"a{n}" for n in range(20)]
        assert await asyncio.gather(*other_tasks) == ["b0", "b1", "b2"]

    run(body)


def test_work_without_a_key_belongs_to_the_caller_of_the_request(blocker: BlockingWork):
    """Ten items of one caller leave threads for another caller."""

    async def body() -> None:
        pools = ThreadPools()

        async def request(caller: str, number: int) -> str:
            REQUEST_CONTEXT.set(RequestContext(id=f"req_{number}", state={"caller": caller}))
            return await pools.run(blocker.work(f"{caller}{number}"))

        first = [asyncio.create_task(request("a", number)) for number in range(10)]
        await wait_until_async(lambda: len(blocker.started) == 2)
        other = asyncio.create_task(request("b", 0))
        await wait_until_async(lambda: len(blocker.started) == 3)
        assert sorted(blocker.started) == ["a0", "a1", "b0"]
        blocker.release()
        await asyncio.gather(*first, other)

    run(body)


def test_queued_work_of_a_cancelled_request_never_starts(blocker: BlockingWork):
    async def body() -> None:
        queue = FairThreadPool(1, "test")
        tasks = [asyncio.create_task(queue.run(blocker.work(name), key="")) for name in "abc"]
        await wait_until_async(lambda: blocker.started)
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        assert queue.queued == 1
        blocker.release()
        assert await asyncio.gather(tasks[0], tasks[2]) == ["a", "c"]
        assert blocker.started == ["a", "c"]

    run(body)


def test_running_work_keeps_its_thread_until_it_ends(blocker: BlockingWork):
    """A thread cannot be stopped, so its work counts as running after the request was cancelled."""

    async def body() -> None:
        queue = FairThreadPool(1, "test")
        cancelled = asyncio.create_task(queue.run(blocker.work("a"), key=""))
        await wait_until_async(lambda: blocker.started)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        queued = asyncio.create_task(queue.run(blocker.work("b"), key=""))
        await asyncio.sleep(0.02)  # a shorter sleep could only miss that it starts
        assert (queue.running, queue.queued, blocker.started) == (1, 1, ["a"])
        blocker.release()
        assert await queued == "b"

    run(body)


def test_work_that_checks_its_token_stops_when_the_request_is_cancelled():
    stopped = threading.Event()

    def work(token: CancelToken) -> None:
        try:
            while True:
                token.check()
        except WorkCancelled:
            stopped.set()
            raise

    async def body() -> None:
        workers = ThreadPools()
        task = asyncio.create_task(workers.run_cancellable(work))
        await wait_until_async(lambda: workers.running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wait_until_async(stopped.is_set)
        await wait_until_async(lambda: workers.running == 0)

    run(body)


def test_small_work_does_not_wait_for_large_work(blocker: BlockingWork):
    async def body() -> None:
        workers = ThreadPools()
        large = [
            asyncio.create_task(workers.run(blocker.work(f"{n}"), size=1 << 20, key=f"{n}"))
            for n in range(50)
        ]
        await wait_until_async(lambda: workers.large.queued and workers.running)
        assert await workers.run(lambda: "small", size=1000) == "small"
        blocker.release()
        await asyncio.gather(*large)

    run(body)


def test_the_threads_of_an_idle_pool_end_and_later_work_starts_new_ones():
    """Tokenizers caches words per thread, and frees them when the thread ends."""
    local = threading.local()

    def cache(text: Text) -> threading.Thread:
        local.cache = text
        return threading.current_thread()

    async def body() -> None:
        queue = FairThreadPool(4, "test", idle=0.05)
        for _ in range(2):
            texts = [Text("x") for _ in range(4)]
            references = list(map(weakref.ref, texts))
            threads = await asyncio.gather(
                *(queue.run(partial(cache, text), key=f"{n}") for n, text in enumerate(texts))
            )
            del texts
            await wait_until_async(
                lambda threads=threads: not any(map(threading.Thread.is_alive, threads))
            )
            assert not any(reference() for reference in references)

    run(body)


def test_threads_stay_as_long_as_there_is_work(blocker: BlockingWork):
    async def body() -> None:
        queue = FairThreadPool(2, "test", idle=0.02)
        long = asyncio.create_task(queue.run(blocker.work("long"), key="a"))
        await wait_until_async(lambda: blocker.started)
        idle = await queue.run(threading.current_thread, key="b")
        await asyncio.sleep(0.1)  # a shorter sleep could only miss that it ends
        assert idle.is_alive()
        blocker.release()
        await long
        await wait_until_async(lambda: not idle.is_alive())
        assert await queue.run(lambda: "later", key="a") == "later"

    run(body)


def test_threads_keep_no_references_to_results():
    """The text of a request stayed in memory until the thread got other work."""

    async def body() -> None:
        queue, text = FairThreadPool(1, "test"), Text("x" * 1000)
        reference = weakref.ref(text)
        await queue.run(lambda text=text: text, key="")
        del text
        await wait_until_async(lambda: reference() is None)

    run(body)


def test_an_error_keeps_no_references_to_arguments():
    """The arguments stayed in memory until the next garbage collection, possibly for minutes."""

    async def body() -> None:
        def fail(text: Text) -> None:
            raise ValueError(len(text))

        queue, text = FairThreadPool(1, "test"), Text("x" * 1000)
        reference = weakref.ref(text)
        gc.disable()
        try:
            with suppress(ValueError):
                await queue.run(lambda text=text: fail(text), key="")
            del text
            await wait_until_async(lambda: reference() is None)
        finally:
            gc.enable()

    run(body)
