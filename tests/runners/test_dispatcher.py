"""What is the same for every runner: who is let in, who is told, and what ends with the engine."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.core.embeddings import EmbedJob, EmbedResult
from app.core.errors import AppError, ErrorKind
from app.core.jobs import (
    Capacity,
    Ended,
    EngineFailed,
    EngineReady,
    EngineStats,
    Job,
    LoadProgress,
    StepOutput,
    Token,
)
from app.core.ports import RunnerFailure
from app.runners.dispatcher import Dispatcher
from tests.engine.harness import job

READY = EngineReady(
    stats=EngineStats(),
    capacity=Capacity(parallel=1, context_length=64, kv_budget=1, kv_bytes_per_sequence=1),
)
BROKEN = EngineFailed(
    kind=ErrorKind.ENGINE, message="AssertionError: planted", is_internal_error=True
)
PATIENCE = 10.0


class Noted:
    """An engine that does nothing, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gone = False

    async def submit(self, job: Job) -> None:
        self.asked.append(f"submit {job.id}")

    def embed(self, job: EmbedJob) -> None:
        self.asked.append(f"embed {job.id}")

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        self.asked.append(f"cancel {job} {keep}")


def with_dispatcher(body: Callable[[Dispatcher, Noted], Awaitable[None]]) -> None:
    async def run() -> None:
        dispatcher, engine = Dispatcher(), Noted()
        dispatcher.engine = engine
        async with asyncio.timeout(PATIENCE):
            await body(dispatcher, engine)

    asyncio.run(run())


async def over(dispatcher: Dispatcher, name: str) -> str | None:
    """The error that a job ends in."""
    async with dispatcher.submit(job(name, b"x")) as waiting:
        updates = [update async for update in waiting]
    assert isinstance(updates[-1], Ended)
    return updates[-1].error


def test_all_who_wait_hear_of_the_end_at_once():
    async def body(dispatcher: Dispatcher, engine: Noted) -> None:
        dispatcher.receive(READY)
        await dispatcher.wait_until_ready()
        vectors = EmbedJob(id="v", inputs=((1,),), pooling="mean")
        waiting = asyncio.gather(
            over(dispatcher, "a"),
            over(dispatcher, "b"),
            dispatcher.wait_for_failure(),
            dispatcher.wait_for_failure(),
            dispatcher.embed(vectors),
            return_exceptions=True,
        )
        await asyncio.sleep(0)
        dispatcher.receive(BROKEN)
        *jobs, said, also, embedding = await waiting
        assert set(jobs) == {"the engine stopped: AssertionError: planted"}
        assert said == also == RunnerFailure(message="AssertionError: planted")
        assert isinstance(embedding, AppError)
        assert embedding.message == "the engine stopped: AssertionError: planted"
        assert await dispatcher.wait_for_failure() == said, "those who come later hear it too"
        assert engine.asked == ["submit a", "submit b", "embed v"], "nobody is there to cancel"

    with_dispatcher(body)


def test_a_last_word_changes_nothing():
    async def body(dispatcher: Dispatcher, engine: Noted) -> None:
        dispatcher.receive(READY)
        dispatcher.receive(BROKEN)
        before = dispatcher.status()
        dispatcher.receive(READY)
        dispatcher.receive(StepOutput(updates=(), stats=EngineStats(steps=9)))
        dispatcher.fail(AppError(ErrorKind.ENGINE, "another reason"))
        assert dispatcher.status() == before

    with_dispatcher(body)


def test_a_fault_of_ours_while_loading_is_told_of_the_model():
    async def body(dispatcher: Dispatcher, engine: Noted) -> None:
        dispatcher.receive(LoadProgress(progress=40, allocated_bytes=7))
        assert (dispatcher.status().progress, dispatcher.status().stats.allocated_bytes) == (40, 7)
        dispatcher.receive(BROKEN)
        with pytest.raises(AppError, match="the model could not be loaded: Assert") as caught:
            await dispatcher.wait_until_ready()
        assert caught.value.kind is ErrorKind.MODEL_FILES
        waiting = asyncio.create_task(dispatcher.wait_for_failure())
        await asyncio.sleep(0)
        assert not waiting.done(), "it never was ready"
        waiting.cancel()

    with_dispatcher(body)


def test_who_finds_the_engine_gone_is_told_why():
    async def body(dispatcher: Dispatcher, engine: Noted) -> None:
        dispatcher.receive(READY)
        asking = asyncio.create_task(dispatcher.get_failure())
        await asyncio.sleep(0)
        dispatcher.fail(AppError(ErrorKind.ENGINE, "long and inward"), job_error="short")
        assert (await asking).message == "short"

    with_dispatcher(body)


def test_an_answer_that_came_to_its_end_is_not_ended_again():
    async def body(dispatcher: Dispatcher, engine: Noted) -> None:
        dispatcher.receive(READY)
        async with dispatcher.submit(job("a", b"x")) as waiting:
            said = (
                Token(job_id="a", id=1, timestamp_ns=1),
                Ended(job_id="a", reason="stop", timestamp_ns=2),
            )
            dispatcher.receive(StepOutput(updates=said, stats=EngineStats()))
            dispatcher.receive(BROKEN)
            assert tuple([update async for update in waiting]) == said
        assert engine.asked == ["submit a"]

    with_dispatcher(body)


def test_what_nobody_waits_for_any_more_is_dropped():
    async def body(dispatcher: Dispatcher, engine: Noted) -> None:
        dispatcher.receive(READY)
        async with dispatcher.submit(job("a", b"x")) as waiting:
            waiting.limit_cached_tokens(3)
        dispatcher.receive(
            StepOutput(updates=(Token(job_id="a", id=1, timestamp_ns=1),), stats=EngineStats())
        )
        dispatcher.finish_embedding(EmbedResult(job_id="b"))
        assert engine.asked == ["submit a", "cancel a 3"]

    with_dispatcher(body)


def test_nobody_is_asked_to_cancel_what_is_over_already():
    """There may be no engine any more, where a client leaves at the moment at which it ends."""

    async def body(dispatcher: Dispatcher, engine: Noted) -> None:
        dispatcher.receive(READY)
        vectors = EmbedJob(id="v", inputs=((1,),), pooling="mean")
        asking = asyncio.create_task(dispatcher.embed(vectors))
        await asyncio.sleep(0)
        dispatcher.receive(BROKEN)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert engine.asked == ["embed v"]

    with_dispatcher(body)
