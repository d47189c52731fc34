"""Prompts that kill: noticed, tried alone, refused. Innocent ones are cleared."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, ErrorKind
from app.core.jobs import Ended, EngineStats, Job, JobUpdate
from app.core.ports import FailureCause
from app.runners import quarantine
from app.runners.handle import ModelHandle
from app.runners.pool import ModelPool
from tests.runners.scripted import PLACES, House, job, need, pooled, served, settled, until

MODEL = served("a")


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


@asynccontextmanager
async def loaded(house: House) -> AsyncGenerator[tuple[ModelPool, ModelHandle]]:
    house.needs = {"a": need(1)}
    async with pooled(house) as pool, pool.lease(MODEL) as lease:
        await lease.wait()
        yield pool, pool.get_handle(MODEL)


async def updates(handle: ModelHandle, asked: Job) -> list[JobUpdate]:
    async with handle.submit(asked) as submission:
        return [update async for update in submission]


async def end(handle: ModelHandle, asked: Job) -> str:
    last = (await updates(handle, asked))[-1]
    assert isinstance(last, Ended)
    return last.reason


async def death(
    house: House, handle: ModelHandle, *jobs: Job, cause: FailureCause = "fault"
) -> Sequence[str]:
    """All of them are at the runner when it is lost. Returns how they ended."""
    house.hold.clear()
    runner = house.of("a")
    before = len(runner.jobs)
    running = [asyncio.create_task(end(handle, one)) for one in jobs]
    await until(lambda: len(runner.jobs) == before + len(jobs))
    await settled()
    runner.die(cause=cause)
    house.hold.set()
    ends = await asyncio.gather(*running)
    await until(lambda: handle.phase == "ready" and handle.status().state == "ready")
    return ends


async def leave_early(house: House, handle: ModelHandle, asked: Job) -> None:
    house.hold.clear()
    async with handle.submit(asked) as submission:
        await anext(aiter(submission))
    house.hold.set()


def test_a_prompt_that_killed_twice_is_refused_and_told_why():
    async def body() -> None:
        house, killer = House(), job("x", 6, 6, 6)
        async with loaded(house) as (pool, handle):
            for _ in range(2):
                assert await death(house, handle, killer) == ["error"]
            with pytest.raises(AppError, match="failed 2 times while evaluating it") as raised:
                await updates(handle, killer)
            assert (raised.value.kind, raised.value.code) == (ErrorKind.INVALID, "prompt_refused")
            assert await end(handle, job("y", 1)) == "stop"
            handle.forget_crashes()
            assert await end(handle, killer) == "stop"
            assert pool.model_state(MODEL).restarts == 2

    run(body())


def test_one_that_waited_for_a_place_is_innocent():
    """Two run at once; the third cannot have been at it."""

    async def body() -> None:
        house = House()
        async with loaded(house) as (_, handle):
            jobs = [job(name, ord(name)) for name in "xyz"]
            assert await death(house, handle, *jobs) == ["error", "error", "stop"]
            house.hold.clear()
            tasks = [asyncio.create_task(end(handle, one)) for one in jobs]
            runner = house.of("a")
            await until(lambda: runner.at_once == 2)
            await settled()
            assert {one.id for one in runner.jobs} == {"x", "z"}, "y waits for its turn"
            house.hold.set()
            assert await asyncio.gather(*tasks) == ["stop"] * 3

    run(body())


def test_requests_that_had_not_started_are_run_by_the_next_runner():
    """A crash ended all 28 of 28 requests, though 20 of them only waited."""

    async def body() -> None:
        house = House()
        async with loaded(house) as (_, handle):
            jobs = [job(f"job {number}", number) for number in range(28)]
            ends = await death(house, handle, *jobs)
            assert ends == ["error"] * PLACES + ["stop"] * (28 - PLACES)
            assert [one.id for one in house.of("a").jobs] == [one.id for one in jobs[PLACES:]]

    run(body())


def test_one_that_waits_through_several_deaths_is_run_in_the_end():
    async def body() -> None:
        house = House()
        async with loaded(house) as (_, handle):
            house.hold.clear()
            jobs = [job(f"job {number}", number) for number in range(1 + 2 * PLACES)]
            tasks = [asyncio.create_task(end(handle, one)) for one in jobs]
            for number in range(2):
                left = len(jobs) - number * PLACES
                await until(lambda left=left: len(house.of("a").jobs) == left)
                await settled()
                house.of("a").die()
                await until(lambda number=number: len(house.loads) == 2 + number)
            await until(lambda: len(house.of("a").jobs) == 1)
            house.hold.set()
            assert await asyncio.gather(*tasks) == ["error"] * 2 * PLACES + ["stop"]

    run(body())


def test_a_request_that_leaves_while_it_waits_for_the_next_runner_is_not_run():
    async def body() -> None:
        house = House()
        async with loaded(house) as (_, handle):
            house.hold.clear()
            jobs = [job(f"job {number}", number) for number in range(2 + PLACES)]
            tasks = [asyncio.create_task(end(handle, one)) for one in jobs]
            await until(lambda: len(house.of("a").jobs) == len(jobs))
            await settled()
            house.gates["a"] = asyncio.Event()
            house.of("a").die()
            await asyncio.gather(*tasks[:PLACES])
            tasks[-1].cancel()
            await asyncio.gather(tasks[-1], return_exceptions=True)
            house.gates["a"].set()
            house.hold.set()
            assert await tasks[PLACES] == "stop"
            assert [one.id for one in house.of("a").jobs] == [jobs[PLACES].id]

    run(body())


def test_signals_from_outside_do_not_refuse_a_prompt():
    async def body() -> None:
        house, innocent = House(), job("x", 1)
        async with loaded(house) as (_, handle):
            for _ in range(10):
                assert await death(house, handle, innocent, cause="outside") == ["error"]
            for _ in range(5):
                assert await death(house, handle, innocent, cause="unknown") == ["error"]
            assert await end(handle, innocent) == "stop"
            assert await death(house, handle, innocent, cause="unknown") == ["error"]
            assert await end(handle, innocent) == "stop", "a good end clears it"

    run(body())


def test_a_prompt_that_is_killed_again_and_again_is_refused_in_the_end():
    """As by a system that runs out of memory over it."""

    async def body() -> None:
        house, killer = House(), job("x", 1)
        async with loaded(house) as (_, handle):
            for _ in range(6):
                await death(house, handle, killer, cause="unknown")
            with pytest.raises(AppError, match="failed 6 times while evaluating it"):
                await updates(handle, killer)

    run(body())


def test_suspects_run_one_at_a_time_beside_others_and_a_good_end_clears_them():
    async def body() -> None:
        house = House()
        suspects = [job("x", 1), job("y", 2)]
        async with loaded(house) as (_, handle):
            await death(house, handle, *suspects)
            runner = house.of("a")
            house.hold.clear()
            tasks = [asyncio.create_task(end(handle, one)) for one in (*suspects, job("z", 3))]
            await until(lambda: runner.at_once == 2)
            await settled()
            assert [one.id for one in runner.jobs] == ["z", "x"]
            house.hold.set()
            assert await asyncio.gather(*tasks) == ["stop"] * 3
            await death(house, handle, *suspects)
            assert await end(handle, suspects[0]) == "stop", "the first death does not count"

    run(body())


def test_an_innocent_that_stood_beside_a_killer_is_not_refused():
    """They are tried again together, as SDKs do; only one of the two comes to the runner."""

    async def body() -> None:
        house, killer, innocent = House(), job("x", 6), job("y", 1)
        async with loaded(house) as (_, handle):
            await death(house, handle, killer, innocent)
            house.hold.clear()
            runner = house.of("a")
            tasks = [asyncio.create_task(end(handle, one)) for one in (killer, innocent)]
            await until(lambda: runner.at_once == 1)
            await settled()
            runner.die()
            house.hold.set()
            assert await asyncio.gather(*tasks) == ["error", "stop"]
            await until(lambda: handle.status().state == "ready")
            with pytest.raises(AppError, match="refused"):
                await updates(handle, killer)
            assert await end(handle, innocent) == "stop"

    run(body())


def test_two_suspects_of_one_request_do_not_wait_for_each_other():
    """Generation enters all submissions before it reads the first one."""

    async def body() -> None:
        house, first, second = House(), job("x", 1), job("y", 2)
        async with loaded(house) as (_, handle):
            await death(house, handle, first, second)
            async with handle.submit(first) as one, handle.submit(second) as two:
                for submission in (two, one):
                    assert isinstance([update async for update in submission][-1], Ended)

    run(body())


def test_a_suspect_that_is_read_slowly_does_not_keep_the_others_waiting():
    async def body() -> None:
        house, slow, other = House(), job("x", 1), job("y", 2)
        async with loaded(house) as (_, handle):
            await death(house, handle, slow, other)
            async with handle.submit(slow):
                assert await end(handle, other) == "stop"

    run(body())


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    real = quarantine.SerialTurns.__init__
    monkeypatch.setattr(
        quarantine.SerialTurns, "__init__", lambda self, most: real(self, most, 0.02)
    )


@pytest.mark.usefixtures("short_turns")
def test_a_long_answer_gives_up_its_turn():
    async def body() -> None:
        house, long, other = House(), job("x", 1), job("y", 2)
        async with loaded(house) as (_, handle):
            await death(house, handle, long, other)
            house.hold.clear()
            tasks = [asyncio.create_task(end(handle, one)) for one in (long, other)]
            await until(lambda: house.of("a").at_once == 2)
            house.hold.set()
            assert await asyncio.gather(*tasks) == ["stop"] * 2

    run(body())


def test_a_suspect_that_hangs_up_leaves_its_place():
    async def body() -> None:
        house, first, second = House(), job("x", 1), job("y", 2)
        async with loaded(house) as (_, handle):
            await death(house, handle, first, second)
            house.hold.clear()
            runner = house.of("a")
            async with handle.submit(first), handle.submit(second):
                await until(lambda: runner.at_once == 1)
            assert runner.at_once == 0
            house.hold.set()
            assert await end(handle, second) == "stop"

    run(body())


def test_no_more_suspects_wait_than_requests_may():
    async def body() -> None:
        house = House()
        house.needs = {"a": need(1)}
        model = served("a", max_queue=1)
        jobs = [job(name, ord(name)) for name in "xy"]
        async with pooled(house) as pool, pool.lease(model) as lease:
            await lease.wait()
            handle = pool.get_handle(model)
            await death(house, handle, *jobs)
            house.hold.clear()
            two = [asyncio.create_task(end(handle, one)) for one in jobs]
            await until(lambda: house.of("a").at_once == 1)
            await settled()
            with pytest.raises(AppError) as raised:
                await updates(handle, jobs[0])
            assert raised.value.kind is ErrorKind.BUSY
            house.hold.set()
            assert await asyncio.gather(*two) == ["stop"] * 2

    run(body())


def test_whoever_hears_of_the_death_and_leaves_before_we_do_is_counted():
    async def body() -> None:
        house, killer = House(), job("x", 6)
        async with loaded(house) as (_, handle):
            for _ in range(2):
                runner = house.of("a")
                house.hold.clear()
                async with handle.submit(killer) as submission:
                    await anext(aiter(submission))
                    await settled()
                    runner.state = "failed"
                runner.die()
                house.hold.set()
                await until(lambda: handle.status().state == "ready")
            with pytest.raises(AppError, match="refused"):
                await updates(handle, killer)

    run(body())


def test_a_client_that_does_not_wait_for_a_hang_to_be_noticed_is_counted():
    """Most clients are less patient than the watchdog: they leave, and try again."""

    async def body() -> None:
        house, killer = House(), job("x", 6)
        async with loaded(house) as (_, handle):
            for _ in range(2):
                await leave_early(house, handle, killer)
                house.of("a").die("the engine has made no progress for 60 s")
                await until(lambda: handle.status().state == "ready")
            with pytest.raises(AppError, match="refused"):
                await updates(handle, killer)

    run(body())


@pytest.mark.parametrize(
    "stats", [EngineStats(steps=18, running=1), EngineStats(steps=11)], ids=["busy", "idle"]
)
def test_one_that_was_left_long_before_a_death_is_innocent(stats: EngineStats):
    async def body() -> None:
        house, innocent = House(), job("x", 1)
        async with loaded(house) as (_, handle):
            for _ in range(2):
                house.of("a").stats = EngineStats(steps=10, running=1)
                await leave_early(house, handle, innocent)
                house.of("a").stats = stats
                house.of("a").die()
                await until(lambda: handle.status().state == "ready")
            assert await end(handle, innocent) == "stop"

    run(body())


def test_what_is_remembered_of_a_hang_is_bounded():
    async def body() -> None:
        house = House()
        async with loaded(house) as (_, handle):
            for number in range(200):
                await leave_early(house, handle, job(f"job {number}", number))
            assert len(handle._quarantine._tracked) == 64

    run(body())


def test_inputs_that_kill_are_refused_like_prompts():
    async def body() -> None:
        house = House()
        killer = EmbedJob(id="x", inputs=((1, 2),), pooling="mean")
        async with loaded(house) as (_, handle):
            for _ in range(2):
                house.hold.clear()
                runner = house.of("a")
                asking = asyncio.create_task(handle.embed(killer))
                await until(lambda runner=runner: runner.at_once == 1)
                await settled()
                runner.die()
                with pytest.raises(AppError, match="the engine stopped"):
                    await asking
                house.hold.set()
                await until(lambda: handle.status().state == "ready")
            with pytest.raises(AppError, match="refused"):
                await handle.embed(killer)
            innocent = EmbedJob(id="y", inputs=((3,),), pooling="mean")
            assert await handle.embed(innocent) == [b""]

    run(body())
