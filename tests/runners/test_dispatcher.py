"""The dispatcher of every runner: delivery of updates, and the end of jobs with the engine."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels, Pixels
from app.core.jobs import (
    CallResult,
    Capacity,
    Ended,
    EngineCall,
    EngineFailed,
    EngineReady,
    EngineStats,
    Job,
    LoadProgress,
    SetSpareMemory,
    StepOutput,
    Token,
)
from app.core.ports import RunnerFailure
from app.core.requests import EmbedJob, EmbedResult
from app.runners.dispatcher import Dispatcher
from tests.batches import flatten
from tests.engine.harness import job
from tests.waiting import wait_until_async

READY = EngineReady(
    stats=EngineStats(),
    capacity=Capacity(parallel=1, context_length=64, kv_budget=1, kv_bytes_per_sequence=1),
)
BROKEN = EngineFailed(
    kind=ErrorKind.ENGINE, message="AssertionError: planted", is_internal_error=True
)
PIXELS = ImagePixels(key=b"k", tiles=(Pixels(height=1, width=1, data=b"rgb"),))
PATIENCE = 30.0


class FakeEngine:
    """An engine that only records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.may_accept = asyncio.Event()
        self.may_accept.set()

    async def submit(self, job: Job) -> None:
        self.calls.append(f"submit {job.id}")
        await self.may_accept.wait()

    def embed(self, job: EmbedJob) -> None:
        self.calls.append(f"embed {job.id}")

    def provide_images(self, job: str, images: Sequence[ImagePixels]) -> None:
        self.calls.append(f"provide {job} {len(images)}")

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        self.calls.append(f"cancel {job} {keep}")

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        self.calls.append(f"call {type(call).__name__}")
        await self.may_accept.wait()
        return cast("CallResult", 7)


def with_dispatcher(body: Callable[[Dispatcher, FakeEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        dispatcher, engine = Dispatcher(), FakeEngine()
        dispatcher.engine = engine
        async with asyncio.timeout(PATIENCE):
            await body(dispatcher, engine)

    asyncio.run(run())


async def wait_for_error(dispatcher: Dispatcher, name: str) -> str | None:
    """The error that a job ends with."""
    async with dispatcher.submit(job(name, b"x")) as waiting:
        updates = [update async for update in flatten(waiting)]
    assert isinstance(updates[-1], Ended)
    return updates[-1].error


def test_a_failure_ends_all_waiting_calls():
    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        dispatcher.receive(READY)
        await dispatcher.wait_until_ready()
        vectors = EmbedJob(id="v", inputs=((1,),), pooling="mean")
        waiting = asyncio.gather(
            wait_for_error(dispatcher, "a"),
            wait_for_error(dispatcher, "b"),
            dispatcher.wait_for_failure(),
            dispatcher.wait_for_failure(),
            dispatcher.embed(vectors),
            return_exceptions=True,
        )
        await asyncio.sleep(0)
        dispatcher.receive(BROKEN)
        *jobs, failure, second_failure, embedding = await waiting
        assert set(jobs) == {"the engine stopped: AssertionError: planted"}
        assert failure == second_failure
        assert isinstance(failure, RunnerFailure)
        assert failure.message == "AssertionError: planted"
        assert isinstance(embedding, AppError)
        assert embedding.message == "the engine stopped: AssertionError: planted"
        assert await dispatcher.wait_for_failure() == failure, "later calls get it too"
        assert engine.calls == ["submit a", "submit b", "embed v"], (
            "there is no engine to cancel in"
        )

    with_dispatcher(body)


def test_a_call_returns_the_reply_or_the_failure_of_the_engine():
    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        call = SetSpareMemory(num_bytes=1)
        with pytest.raises(AppError, match="still loading"):
            await dispatcher.call(call)
        dispatcher.receive(READY)
        assert await dispatcher.call(call) == 7
        engine.may_accept.clear()
        waiting = asyncio.create_task(dispatcher.call(call))
        await asyncio.sleep(0)
        dispatcher.receive(BROKEN)
        with pytest.raises(AppError, match="planted"):
            await waiting

    with_dispatcher(body)


def test_a_failure_names_the_jobs_that_the_engine_had_not_read():
    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        dispatcher.receive(READY)
        async with dispatcher.submit(job("accepted", b"x")):
            pass
        engine.calls.clear()
        engine.may_accept.clear()
        names = ["a", "b", "c"]
        waiting = [asyncio.create_task(wait_for_error(dispatcher, name)) for name in names]
        vectors = EmbedJob(id="v", inputs=((1,),), pooling="mean")
        waiting.append(asyncio.create_task(_embed_error(dispatcher, vectors)))
        await wait_until_async(lambda: len(engine.calls) == 4)
        waiting[1].cancel()
        dispatcher.mark_received("a")
        dispatcher.fail(AppError(ErrorKind.ENGINE, "it hung"), stuck_since_ns=7)
        engine.may_accept.set()
        assert await dispatcher.wait_for_failure() == RunnerFailure(
            message="it hung", not_received=frozenset({"b", "c", "v"}), stuck_since_ns=7
        )
        await asyncio.gather(*waiting, return_exceptions=True)

    with_dispatcher(body)


async def _embed_error(dispatcher: Dispatcher, request: EmbedJob) -> str:
    with pytest.raises(AppError) as caught:
        await dispatcher.embed(request)
    return caught.value.message


def test_the_number_of_jobs_that_are_remembered_as_not_read_is_bounded():
    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        dispatcher.receive(READY)
        for number in range(1100):
            vectors = EmbedJob(id=f"job {number}", inputs=((1,),), pooling="mean")
            task = asyncio.create_task(dispatcher.embed(vectors))
            await asyncio.sleep(0)
            task.cancel()
        dispatcher.fail(AppError(ErrorKind.ENGINE, "it hung"))
        assert len(engine.calls) >= 1100
        assert len((await dispatcher.wait_for_failure()).not_received) == 1024

    with_dispatcher(body)


def test_messages_after_a_failure_change_nothing():
    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        dispatcher.receive(READY)
        dispatcher.receive(BROKEN)
        before = dispatcher.status()
        dispatcher.receive(READY)
        dispatcher.receive(StepOutput(updates=(), stats=EngineStats(steps=9)))
        dispatcher.fail(AppError(ErrorKind.ENGINE, "another reason"))
        assert dispatcher.status() == before

    with_dispatcher(body)


def test_an_internal_error_during_the_load_is_a_failed_load():
    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        dispatcher.receive(LoadProgress(progress=40, allocated_bytes=7))
        assert (dispatcher.status().progress, dispatcher.status().stats.allocated_bytes) == (40, 7)
        dispatcher.receive(BROKEN)
        with pytest.raises(AppError, match="the model could not be loaded: Assert") as caught:
            await dispatcher.wait_until_ready()
        assert caught.value.kind is ErrorKind.MODEL_FILES
        waiting = asyncio.create_task(dispatcher.wait_for_failure())
        await asyncio.sleep(0)
        assert not waiting.done(), "the model never was ready"
        waiting.cancel()

    with_dispatcher(body)


def test_get_failure_waits_for_the_reason():
    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        dispatcher.receive(READY)
        task = asyncio.create_task(dispatcher.get_failure())
        await asyncio.sleep(0)
        dispatcher.fail(AppError(ErrorKind.ENGINE, "long and internal"), job_error="short")
        assert (await task).message == "short"

    with_dispatcher(body)


def make_token(number: int) -> Token:
    return Token(job_id="a", id=number, timestamp_ns=number)


def test_updates_that_arrive_together_are_one_batch():
    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        dispatcher.receive(READY)
        async with dispatcher.submit(job("a", b"x")) as waiting:
            batches = aiter(waiting)
            reading = asyncio.ensure_future(anext(batches))
            await asyncio.sleep(0)
            for number in range(3):  # three steps in one turn of the event loop
                step = StepOutput(updates=(make_token(number),), stats=EngineStats())
                dispatcher.receive(step)
            assert await reading == [make_token(number) for number in range(3)]
            dispatcher.receive(StepOutput(updates=(make_token(3),), stats=EngineStats()))
            assert await anext(batches) == [make_token(3)]

    with_dispatcher(body)


def test_a_slow_reader_gets_bounded_batches_and_lets_other_tasks_run():
    """Encoding everything that a stopped client missed would block the event loop."""
    tokens = [make_token(number) for number in range(1000)]

    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        dispatcher.receive(READY)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with dispatcher.submit(job("a", b"x")) as waiting:
            ended = Ended(job_id="a", reason="stop", timestamp_ns=2000)
            dispatcher.receive(StepOutput(updates=(*tokens, ended), stats=EngineStats()))
            counting = asyncio.create_task(count_turns())
            batches = [batch async for batch in waiting]
            counting.cancel()
        assert [update for batch in batches for update in batch] == [*tokens, ended]
        assert max(map(len, batches)) <= 64
        assert turns >= len(batches) - 1

    with_dispatcher(body)


def test_a_finished_job_is_not_ended_again():
    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        dispatcher.receive(READY)
        async with dispatcher.submit(job("a", b"x")) as waiting:
            updates = (
                Token(job_id="a", id=1, timestamp_ns=1),
                Ended(job_id="a", reason="stop", timestamp_ns=2),
            )
            dispatcher.receive(StepOutput(updates=updates, stats=EngineStats()))
            dispatcher.receive(BROKEN)
            assert tuple([update async for update in flatten(waiting)]) == updates
        assert engine.calls == ["submit a"]

    with_dispatcher(body)


def test_updates_of_jobs_that_were_left_are_dropped():
    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        dispatcher.receive(READY)
        async with dispatcher.submit(job("a", b"x")) as waiting:
            waiting.limit_cached_tokens(3)
        dispatcher.receive(
            StepOutput(updates=(Token(job_id="a", id=1, timestamp_ns=1),), stats=EngineStats())
        )
        dispatcher.finish_embedding(EmbedResult(job_id="b"))
        assert engine.calls == ["submit a", "cancel a 3"]

    with_dispatcher(body)


async def start_embedding(dispatcher: Dispatcher) -> asyncio.Task[Any]:
    """Submits the embedding job "v" to an engine that is ready."""
    dispatcher.receive(READY)
    vectors = EmbedJob(id="v", inputs=((1,),), pooling="mean")
    task = asyncio.create_task(dispatcher.embed(vectors))
    await asyncio.sleep(0)
    return task


def test_ended_work_is_not_cancelled():
    """The engine may be gone if a client disconnects at the moment of the failure."""

    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        task = await start_embedding(dispatcher)
        dispatcher.receive(BROKEN)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert engine.calls == ["embed v"]

    with_dispatcher(body)


def test_pixels_go_to_the_engine_until_the_job_has_ended() -> None:
    async def body(dispatcher: Dispatcher, engine: FakeEngine) -> None:
        dispatcher.receive(READY)
        async with dispatcher.submit(job("a", b"x")) as stream:
            stream.provide_images([PIXELS, PIXELS])
            dispatcher.fail(AppError(ErrorKind.ENGINE, "gone"))
            stream.provide_images([PIXELS])
        assert engine.calls == ["submit a", "provide a 2"]

    with_dispatcher(body)
