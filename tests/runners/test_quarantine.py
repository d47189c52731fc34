"""After a crash: jobs that had not started are run again, others fail, repeated crashes refuse."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.jobs import Ended, EngineStats, Job, JobUpdate
from app.core.models import ServedModel
from app.core.ports import FailureCause
from app.core.requests import EmbedJob
from app.runners.handle import ModelHandle
from app.runners.pool import ModelPool
from tests.batches import flatten
from tests.runners.scripted import (
    SLOTS,
    RunnerScript,
    job,
    make_model,
    make_requirement,
    run_pool,
    settle,
)
from tests.waiting import wait_until_async

MODEL = make_model("a")


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


@asynccontextmanager
async def run_model(
    script: RunnerScript, model: ServedModel = MODEL
) -> AsyncGenerator[tuple[ModelPool, ModelHandle]]:
    script.requirements = {"a": make_requirement(1)}
    async with run_pool(script) as pool, pool.lease(model) as lease:
        await lease.wait()
        yield pool, pool.get_handle(model)


async def collect_updates(handle: ModelHandle, request: Job) -> list[JobUpdate]:
    async with handle.submit(request) as submission:
        return [update async for update in flatten(submission)]


async def end_reason(handle: ModelHandle, request: Job) -> str:
    last = (await collect_updates(handle, request))[-1]
    assert isinstance(last, Ended)
    return last.reason


async def crash_runner(
    script: RunnerScript, handle: ModelHandle, *jobs: Job, cause: FailureCause = "fault"
) -> Sequence[str]:
    """Crash the runner while it has all of these jobs. Returns the reasons of their ends."""
    script.may_end.clear()
    runner = script.runner_of("a")
    before = len(runner.jobs)
    running = [asyncio.create_task(end_reason(handle, one)) for one in jobs]
    await wait_until_async(lambda: len(runner.jobs) == before + len(jobs))
    await settle()
    runner.fail(cause=cause)
    script.may_end.set()
    ends = await asyncio.gather(*running)
    await wait_until_async(lambda: handle.phase == "ready" and handle.status().state == "ready")
    return ends


async def leave_early(script: RunnerScript, handle: ModelHandle, request: Job) -> None:
    script.may_end.clear()
    async with handle.submit(request) as submission:
        await anext(aiter(submission))
    script.may_end.set()


def test_a_prompt_that_crashed_twice_is_refused_with_the_reason():
    async def body() -> None:
        script, killer = RunnerScript(), job("x", 6, 6, 6)
        async with run_model(script) as (pool, handle):
            for _ in range(2):
                assert await crash_runner(script, handle, killer) == ["error"]
            with pytest.raises(AppError, match="failed 2 times while processing it") as raised:
                await collect_updates(handle, killer)
            assert (raised.value.kind, raised.value.code) == (ErrorKind.INVALID, "prompt_refused")
            assert await end_reason(handle, job("y", 1)) == "stop"
            handle.forget_crashes()
            assert await end_reason(handle, killer) == "stop"
            assert pool.model_state(MODEL).restarts == 2

    run(body())


def test_a_waiting_job_is_run_again_and_is_not_counted():
    """Two jobs run at once, so the third cannot be the cause."""

    async def body() -> None:
        script = RunnerScript()
        async with run_model(script) as (_, handle):
            for attempt in range(2):
                jobs = [job(f"{name}{attempt}", ord(name)) for name in "xyz"]
                assert await crash_runner(script, handle, *jobs) == ["error", "error", "stop"]
            for request in jobs[:2]:
                with pytest.raises(AppError, match="refused"):
                    await collect_updates(handle, request)
            assert await end_reason(handle, jobs[2]) == "stop"

    run(body())


def test_requests_that_had_not_started_are_run_by_the_next_runner():
    """A crash ended all 28 of 28 requests, though 20 of them only waited."""

    async def body() -> None:
        script = RunnerScript()
        async with run_model(script) as (_, handle):
            jobs = [job(f"job {number}", number) for number in range(28)]
            ends = await crash_runner(script, handle, *jobs)
            assert ends == ["error"] * SLOTS + ["stop"] * (28 - SLOTS)
            assert [one.id for one in script.runner_of("a").jobs] == [
                one.id for one in jobs[SLOTS:]
            ]

    run(body())


@pytest.mark.parametrize("how", ["silent process", "hung engine"])
def test_what_is_sent_during_a_hang_is_run_again_and_is_not_counted(how: str):
    """A prompt that was sent twice to an idle process that had been stopped was refused by the next
    process, although it had never run."""

    async def body() -> None:
        script, request = RunnerScript(), job("x", 1)
        inputs = EmbedJob(id="v", inputs=((2,),), pooling="mean")
        async with run_model(script) as (_, handle):
            for _ in range(3):
                runner = script.runner_of("a")
                since = time.monotonic_ns()
                runner.hung.set()
                running = asyncio.create_task(end_reason(handle, request))
                vectors = asyncio.create_task(handle.embed(inputs))
                await wait_until_async(lambda runner=runner: runner.num_running == 2)
                if how == "silent process":
                    runner.fail(not_received=("x", "v"))
                else:
                    runner.fail(stuck_since_ns=since)
                assert await running == "stop"
                assert await vectors == [b""]

    run(body())


def test_what_ran_before_a_hang_is_counted():
    async def body() -> None:
        script, killer = RunnerScript(), job("x", 6)
        async with run_model(script) as (_, handle):
            for _ in range(2):
                script.may_end.clear()
                runner = script.runner_of("a")
                running = asyncio.create_task(end_reason(handle, killer))
                await wait_until_async(lambda runner=runner: runner.num_running == 1)
                await settle()
                runner.fail(stuck_since_ns=time.monotonic_ns())
                script.may_end.set()
                assert await running == "error"
                await wait_until_async(lambda: handle.status().state == "ready")
            with pytest.raises(AppError, match="refused"):
                await collect_updates(handle, killer)

    run(body())


def test_a_job_that_waits_through_several_crashes_is_run():
    async def body() -> None:
        script = RunnerScript()
        async with run_model(script) as (_, handle):
            script.may_end.clear()
            jobs = [job(f"job {number}", number) for number in range(1 + 2 * SLOTS)]
            tasks = [asyncio.create_task(end_reason(handle, one)) for one in jobs]
            for number in range(2):
                left = len(jobs) - number * SLOTS
                await wait_until_async(lambda left=left: len(script.runner_of("a").jobs) == left)
                await settle()
                script.runner_of("a").fail()
                await wait_until_async(lambda number=number: len(script.loads) == 2 + number)
            await wait_until_async(lambda: len(script.runner_of("a").jobs) == 1)
            script.may_end.set()
            assert await asyncio.gather(*tasks) == ["error"] * 2 * SLOTS + ["stop"]

    run(body())


def test_a_request_cancelled_before_the_next_runner_is_not_run():
    async def body() -> None:
        script = RunnerScript()
        async with run_model(script) as (_, handle):
            script.may_end.clear()
            jobs = [job(f"job {number}", number) for number in range(2 + SLOTS)]
            tasks = [asyncio.create_task(end_reason(handle, one)) for one in jobs]
            await wait_until_async(lambda: len(script.runner_of("a").jobs) == len(jobs))
            await settle()
            script.gates["a"] = asyncio.Event()
            script.runner_of("a").fail()
            await asyncio.gather(*tasks[:SLOTS])
            tasks[-1].cancel()
            await asyncio.gather(tasks[-1], return_exceptions=True)
            script.gates["a"].set()
            script.may_end.set()
            assert await tasks[SLOTS] == "stop"
            assert [one.id for one in script.runner_of("a").jobs] == [jobs[SLOTS].id]

    run(body())


def test_external_signals_do_not_cause_a_refusal():
    async def body() -> None:
        script, innocent = RunnerScript(), job("x", 1)
        async with run_model(script) as (_, handle):
            for _ in range(10):
                assert await crash_runner(script, handle, innocent, cause="outside") == ["error"]
            for _ in range(5):
                assert await crash_runner(script, handle, innocent, cause="unknown") == ["error"]
            assert await end_reason(handle, innocent) == "stop"
            assert await crash_runner(script, handle, innocent, cause="unknown") == ["error"]
            assert await end_reason(handle, innocent) == "stop", "a successful end clears it"

    run(body())


def test_a_prompt_with_many_crashes_of_unknown_cause_is_refused():
    """For example if the system runs out of memory each time."""

    async def body() -> None:
        script, killer = RunnerScript(), job("x", 1)
        async with run_model(script) as (_, handle):
            for _ in range(6):
                await crash_runner(script, handle, killer, cause="unknown")
            with pytest.raises(AppError, match="failed 6 times while processing it"):
                await collect_updates(handle, killer)

    run(body())


def test_prompts_that_were_running_at_one_crash_run_together_and_a_successful_end_clears_them():
    async def body() -> None:
        script, jobs = RunnerScript(), [job("x", 1), job("y", 2)]
        async with run_model(script) as (_, handle):
            for _ in range(3):
                assert await crash_runner(script, handle, *jobs) == ["error", "error"]
                script.may_end.clear()
                again = [asyncio.create_task(end_reason(handle, request)) for request in jobs]
                await wait_until_async(lambda: script.runner_of("a").num_running == 2)
                script.may_end.set()
                assert await asyncio.gather(*again) == ["stop"] * 2

    run(body())


def test_a_job_left_just_before_a_crash_is_handled_is_counted():
    async def body() -> None:
        script, killer = RunnerScript(), job("x", 6)
        async with run_model(script) as (_, handle):
            for _ in range(2):
                runner = script.runner_of("a")
                script.may_end.clear()
                async with handle.submit(killer) as submission:
                    await anext(aiter(submission))
                    await settle()
                    runner.state = "failed"
                runner.fail()
                script.may_end.set()
                await wait_until_async(lambda: handle.status().state == "ready")
            with pytest.raises(AppError, match="refused"):
                await collect_updates(handle, killer)

    run(body())


def test_a_job_left_before_a_hang_is_detected_is_counted():
    """Most clients are less patient than the watchdog: they disconnect and retry."""

    async def body() -> None:
        script, killer = RunnerScript(), job("x", 6)
        async with run_model(script) as (_, handle):
            for _ in range(2):
                await leave_early(script, handle, killer)
                script.runner_of("a").fail("the engine has made no progress for 60 s")
                await wait_until_async(lambda: handle.status().state == "ready")
            with pytest.raises(AppError, match="refused"):
                await collect_updates(handle, killer)

    run(body())


@pytest.mark.parametrize(
    "stats", [EngineStats(steps=18, running=1), EngineStats(steps=11)], ids=["busy", "idle"]
)
def test_a_job_left_long_before_a_crash_is_not_counted(stats: EngineStats):
    async def body() -> None:
        script, innocent = RunnerScript(), job("x", 1)
        async with run_model(script) as (_, handle):
            for _ in range(2):
                script.runner_of("a").stats = EngineStats(steps=10, running=1)
                await leave_early(script, handle, innocent)
                script.runner_of("a").stats = stats
                script.runner_of("a").fail()
                await wait_until_async(lambda: handle.status().state == "ready")
            assert await end_reason(handle, innocent) == "stop"

    run(body())


def test_the_number_of_tracked_jobs_is_bounded():
    async def body() -> None:
        script = RunnerScript()
        async with run_model(script) as (_, handle):
            for number in range(200):
                await leave_early(script, handle, job(f"job {number}", number))
            assert len(handle._quarantine._attempts) == 64

    run(body())


def test_inputs_that_crash_are_refused_like_prompts():
    async def body() -> None:
        script = RunnerScript()
        killer = EmbedJob(id="x", inputs=((1, 2),), pooling="mean")
        async with run_model(script) as (_, handle):
            for _ in range(2):
                script.may_end.clear()
                runner = script.runner_of("a")
                task = asyncio.create_task(handle.embed(killer))
                await wait_until_async(lambda runner=runner: runner.num_running == 1)
                await settle()
                runner.fail()
                with pytest.raises(AppError, match="the engine stopped"):
                    await task
                script.may_end.set()
                await wait_until_async(lambda: handle.status().state == "ready")
            with pytest.raises(AppError, match="refused"):
                await handle.embed(killer)
            innocent = EmbedJob(id="y", inputs=((3,),), pooling="mean")
            assert await handle.embed(innocent) == [b""]

    run(body())
