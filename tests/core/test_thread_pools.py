"""Work beside the event loop: fair, bounded, and given up with its request."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar

import pytest

from app.core.thread_pools import CancelToken, FairThreadPool, ThreadPools, WorkCancelled

PATIENCE = 10.0


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await body()

    asyncio.run(bounded())


class Text(str):
    """A str that shows when it is not in memory any more."""

    __slots__ = ("__weakref__",)


class Held:
    """Work that runs until it is let go, and notes who began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._gate = threading.Event()

    def work(self, name: str) -> Callable[[], str]:
        def held() -> str:
            self.began.append(name)
            assert self._gate.wait(PATIENCE)
            return name

        return held

    def let_go(self) -> None:
        self._gate.set()


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.let_go()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # another thread's doing
        await asyncio.sleep(0.002)


def test_a_thread_for_large_work_rests_as_long_as_it_worked():
    """Most work holds the interpreter: without a rest the event loop gets little of it."""

    def work() -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    async def run() -> float:
        queue = FairThreadPool(1, "resting", rest=2.0)
        began = time.monotonic()
        await asyncio.gather(*(queue.run(work, key="") for _ in range(4)))
        return time.monotonic() - began

    assert asyncio.run(run()) >= 4 * 0.02 + 3 * 0.04


def test_work_runs_on_another_thread_in_the_context_of_its_request():
    whose: ContextVar[str] = ContextVar("whose", default="")

    async def body() -> None:
        whose.set("anna")
        queue = FairThreadPool(2, "test")
        assert await queue.run(whose.get, key="") == "anna"
        assert await queue.run(threading.get_ident, key="") != threading.get_ident()

    run(body)


def test_what_the_work_raises_is_raised_where_it_is_awaited():
    """Also what is no Exception, such as the panic of a library in Rust."""

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


def test_keys_take_turns_and_one_key_has_half_of_the_threads(held: Held):
    """Twenty requests of one client, then one of another: it is the next one to start."""

    async def body() -> None:
        queue = FairThreadPool(4, "test")
        greedy = [asyncio.create_task(queue.run(held.work(f"a{n}"), key="a")) for n in range(20)]
        await until(lambda: len(held.began) == 2)
        other = [asyncio.create_task(queue.run(held.work(f"b{n}"), key="b")) for n in range(3)]
        await until(lambda: len(held.began) == 4)
        assert sorted(held.began) == ["a0", "a1", "b0", "b1"]
        assert (queue.running, queue.queued) == (4, 19)
        held.let_go()
        assert await asyncio.gather(*greedy) == [f"a{n}" for n in range(20)]
        assert await asyncio.gather(*other) == ["b0", "b1", "b2"]
        assert held.began.index("b2") < held.began.index("a4")

    run(body)


def test_work_of_a_request_that_is_gone_never_starts(held: Held):
    async def body() -> None:
        queue = FairThreadPool(1, "test")
        tasks = [asyncio.create_task(queue.run(held.work(name), key="")) for name in "abc"]
        await until(lambda: held.began)
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        assert queue.queued == 1
        held.let_go()
        assert await asyncio.gather(tasks[0], tasks[2]) == ["a", "c"]
        assert held.began == ["a", "c"]

    run(body)


def test_running_work_keeps_its_thread_until_it_ends(held: Held):
    """A thread cannot be stopped: what it does counts, though its request is gone."""

    async def body() -> None:
        queue = FairThreadPool(1, "test")
        gone = asyncio.create_task(queue.run(held.work("a"), key=""))
        await until(lambda: held.began)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        waiting = asyncio.create_task(queue.run(held.work("b"), key=""))
        await asyncio.sleep(0.02)
        assert (queue.running, queue.queued, held.began) == (1, 1, ["a"])
        held.let_go()
        assert await waiting == "b"

    run(body)


def test_work_that_looks_notices_that_its_request_is_gone():
    ended = threading.Event()

    def work(token: CancelToken) -> None:
        try:
            while True:
                token.check()
        except WorkCancelled:
            ended.set()
            raise

    async def body() -> None:
        workers = ThreadPools()
        task = asyncio.create_task(workers.run_cancellable(work))
        await until(lambda: workers.running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(ended.is_set)
        await until(lambda: workers.running == 0)

    run(body)


def test_small_work_does_not_wait_for_large_work(held: Held):
    async def body() -> None:
        workers = ThreadPools()
        large = [
            asyncio.create_task(workers.run(held.work(f"{n}"), size=1 << 20, key=f"{n}"))
            for n in range(50)
        ]
        await until(lambda: workers.large.queued and workers.running)
        assert await workers.run(lambda: "small", size=1000) == "small"
        held.let_go()
        await asyncio.gather(*large)

    run(body)


def test_threads_do_not_keep_what_they_worked_on():
    """A request's text stayed in memory until the thread had other work."""

    async def body() -> None:
        queue, text = FairThreadPool(1, "test"), Text("x" * 1000)
        gone = weakref.ref(text)
        await queue.run(lambda text=text: text, key="")
        del text
        await until(lambda: gone() is None)

    run(body)


def test_an_error_takes_what_its_work_had_in_hand_with_it():
    """It stayed in memory until the garbage collector found it, which may be minutes later."""

    async def body() -> None:
        def fail(text: Text) -> None:
            raise ValueError(len(text))

        queue, text = FairThreadPool(1, "test"), Text("x" * 1000)
        gone = weakref.ref(text)
        gc.disable()
        try:
            with suppress(ValueError):
                await queue.run(lambda text=text: fail(text), key="")
            del text
            await until(lambda: gone() is None)
        finally:
            gc.enable()

    run(body)
