"""What is the same for every runner: who is let in, who is told, and what ends with the engine."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.core.embeddings import Embedded, EmbedJob
from app.core.errors import AppError, Kind
from app.core.jobs import Capacity, Ended, EngineStats, Job, Step, Token
from app.core.messages import Failed, Loading, Ready
from app.core.ports import RunnerLoss
from app.runners.desk import Desk
from tests.engine.driving import job

READY = Ready(
    stats=EngineStats(), capacity=Capacity(parallel=1, context=64, kv_budget=1, kv_bytes=1)
)
BROKEN = Failed(kind=Kind.ENGINE, message="AssertionError: planted", ours=True)
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


def at_desk(body: Callable[[Desk, Noted], Awaitable[None]]) -> None:
    async def run() -> None:
        desk, engine = Desk(), Noted()
        desk.engine = engine
        async with asyncio.timeout(PATIENCE):
            await body(desk, engine)

    asyncio.run(run())


async def over(desk: Desk, name: str) -> str | None:
    """The error that a job ends in."""
    async with desk.submit(job(name, b"x")) as waiting:
        updates = [update async for update in waiting]
    assert isinstance(updates[-1], Ended)
    return updates[-1].error


def test_all_who_wait_hear_of_the_end_at_once():
    async def body(desk: Desk, engine: Noted) -> None:
        desk.receive(READY)
        await desk.ready()
        vectors = EmbedJob(id="v", inputs=((1,),), pooling="mean")
        waiting = asyncio.gather(
            over(desk, "a"), over(desk, "b"), desk.lost(), desk.lost(), desk.embed(vectors),
            return_exceptions=True,
        )  # fmt: skip
        await asyncio.sleep(0)
        desk.receive(BROKEN)
        *jobs, said, also, embedding = await waiting
        assert set(jobs) == {"the engine stopped: AssertionError: planted"}
        assert said == also == RunnerLoss(message="AssertionError: planted")
        assert isinstance(embedding, AppError)
        assert embedding.message == "the engine stopped: AssertionError: planted"
        assert await desk.lost() == said, "those who come later hear it too"
        assert engine.asked == ["submit a", "submit b", "embed v"], "nobody is there to cancel"

    at_desk(body)


def test_a_last_word_changes_nothing():
    async def body(desk: Desk, engine: Noted) -> None:
        desk.receive(READY)
        desk.receive(BROKEN)
        before = desk.status()
        desk.receive(READY)
        desk.receive(Step(updates=(), stats=EngineStats(steps=9)))
        desk.lose(AppError(Kind.ENGINE, "another reason"))
        assert desk.status() == before

    at_desk(body)


def test_a_fault_of_ours_while_loading_is_told_of_the_model():
    async def body(desk: Desk, engine: Noted) -> None:
        desk.receive(Loading(progress=40, memory=7))
        assert (desk.status().progress, desk.status().stats.memory) == (40, 7)
        desk.receive(BROKEN)
        with pytest.raises(AppError, match="the model could not be loaded: Assert") as caught:
            await desk.ready()
        assert caught.value.kind is Kind.MODEL_FILES
        waiting = asyncio.create_task(desk.lost())
        await asyncio.sleep(0)
        assert not waiting.done(), "it never was ready"
        waiting.cancel()

    at_desk(body)


def test_who_finds_the_engine_gone_is_told_why():
    async def body(desk: Desk, engine: Noted) -> None:
        desk.receive(READY)
        asking = asyncio.create_task(desk.why())
        await asyncio.sleep(0)
        desk.lose(AppError(Kind.ENGINE, "long and inward"), told="short")
        assert (await asking).message == "short"

    at_desk(body)


def test_an_answer_that_came_to_its_end_is_not_ended_again():
    async def body(desk: Desk, engine: Noted) -> None:
        desk.receive(READY)
        async with desk.submit(job("a", b"x")) as waiting:
            said = (Token(job="a", id=1, at=1), Ended(job="a", reason="stop", at=2))
            desk.receive(Step(updates=said, stats=EngineStats()))
            desk.receive(BROKEN)
            assert tuple([update async for update in waiting]) == said
        assert engine.asked == ["submit a"]

    at_desk(body)


def test_what_nobody_waits_for_any_more_is_dropped():
    async def body(desk: Desk, engine: Noted) -> None:
        desk.receive(READY)
        async with desk.submit(job("a", b"x")) as waiting:
            waiting.keep(3)
        desk.receive(Step(updates=(Token(job="a", id=1, at=1),), stats=EngineStats()))
        desk.hand_over(Embedded(job="b"))
        assert engine.asked == ["submit a", "cancel a 3"]

    at_desk(body)


def test_nobody_is_asked_to_cancel_what_is_over_already():
    """There may be no engine any more, where a client leaves at the moment at which it ends."""

    async def body(desk: Desk, engine: Noted) -> None:
        desk.receive(READY)
        vectors = EmbedJob(id="v", inputs=((1,),), pooling="mean")
        asking = asyncio.create_task(desk.embed(vectors))
        await asyncio.sleep(0)
        desk.receive(BROKEN)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert engine.asked == ["embed v"]

    at_desk(body)
