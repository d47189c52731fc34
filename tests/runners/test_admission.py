"""How many requests one model takes on, whatever they are doing."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, ErrorKind
from app.core.jobs import Capacity, EngineStats, Job, JobUpdate
from app.core.ports import RunnerState, RunnerStatus
from app.runners.admission import Admission, LatencyAverage
from tests.engine.harness import job

PATIENCE = 10.0
SECOND = 1_000_000_000


class Going:
    """Implements `Submission`; nothing happens to it but what a test does."""

    def __init__(self) -> None:
        self.started_ns: int | None = None
        self.ended_ns: int | None = None

    async def __aiter__(self) -> AsyncIterator[JobUpdate]:
        for update in ():
            yield update

    def limit_cached_tokens(self, tokens: int) -> None: ...


class Scripted:
    """Implements `JobRunner`, with two places. gate: what submitting waits for, as for a
    grammar."""

    def __init__(self) -> None:
        self.state: RunnerState = "ready"
        self.gate = asyncio.Event()
        self.gate.set()
        self.going: dict[str, Going] = {}

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[Going]:
        await self.gate.wait()
        going = self.going[job.id] = Going()
        try:
            yield going
        finally:
            del self.going[job.id]

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        await self.gate.wait()
        return [b""]

    def status(self) -> RunnerStatus:
        capacity = Capacity(parallel=2, context_length=64, kv_budget=1, kv_bytes_per_sequence=1)
        return RunnerStatus(
            state=self.state,
            progress=40,
            stats=EngineStats(),
            capacity=capacity if self.state == "ready" else None,
        )


def run(body: Callable[[Admission, Scripted], Awaitable[None]], max_queue: int = 3) -> None:
    async def checked() -> None:
        jobs = Scripted()
        async with asyncio.timeout(PATIENCE):
            await body(Admission(jobs, max_queue), jobs)

    asyncio.run(checked())


def refusal(admission: Admission, count: int = 1) -> AppError:
    with pytest.raises(AppError) as caught, admission.reserve(count):
        pass
    return caught.value


def test_requests_are_admitted_before_any_work_is_done_for_them():
    """Requests that waited for a thread, or for a grammar, were in no queue and had no bound."""

    async def body(admission: Admission, jobs: Scripted) -> None:
        with ExitStack() as held:
            for _ in range(5):
                held.enter_context(admission.reserve())
            assert admission.status().preparing == 5
            for count in (1, 2):
                error = refusal(admission)
                assert error.kind is ErrorKind.BUSY
                assert error.retry_after is not None
                assert "5 requests are running or queued" in error.message
                assert "at most 2 run and 3 wait" in error.message
                assert admission.status().rejected == count
        assert admission.status().preparing == 0
        with admission.reserve(5):
            assert admission.status().rejected == 2

    run(body)


def test_a_request_for_several_answers_takes_a_place_for_each():
    async def body(admission: Admission, jobs: Scripted) -> None:
        with admission.reserve(3):
            assert "3 requests are running or queued" in refusal(admission, 3).message
            with admission.reserve(2):
                assert refusal(admission).kind is ErrorKind.BUSY

    run(body)


def test_a_job_keeps_its_place_while_it_is_submitted_and_runs():
    async def body(admission: Admission, jobs: Scripted) -> None:
        jobs.gate.clear()

        async def answer(name: str) -> None:
            with admission.reserve() as places:
                async with places.submit(job(name, b"x")):
                    await asyncio.Event().wait()

        tasks = [asyncio.create_task(answer(name)) for name in "ab"]
        await asyncio.sleep(0)
        assert admission.status().preparing == 0, "their grammars are compiled"
        assert refusal(admission).kind is ErrorKind.BUSY
        jobs.gate.set()
        while len(jobs.going) < 2:  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0)
        assert refusal(admission).kind is ErrorKind.BUSY
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with admission.reserve(2):
            pass

    run(body, max_queue=0)


def test_an_answer_that_is_still_being_read_takes_no_place():
    """The engine is done with it; a slow client does not keep others waiting."""

    async def body(admission: Admission, jobs: Scripted) -> None:
        with admission.reserve(2) as places:
            async with places.submit(job("a", b"x")), places.submit(job("b", b"x")):
                assert refusal(admission).kind is ErrorKind.BUSY
                jobs.going["a"].ended_ns = 1
                with admission.reserve():
                    assert refusal(admission).kind is ErrorKind.BUSY

    run(body, max_queue=0)


def test_one_of_several_jobs_that_is_left_gives_up_its_place():
    async def body(admission: Admission, jobs: Scripted) -> None:
        with admission.reserve(2) as places:
            async with places.submit(job("a", b"x")):
                pass
            with admission.reserve():
                assert refusal(admission).kind is ErrorKind.BUSY

    run(body, max_queue=0)


def test_inputs_that_are_embedded_count_among_the_others():
    async def body(admission: Admission, jobs: Scripted) -> None:
        jobs.gate.clear()

        async def embed() -> None:
            with admission.reserve() as places:
                await places.embed(EmbedJob(id="v", inputs=((1,),), pooling="mean"))

        tasks = [asyncio.create_task(embed()) for _ in "ab"]
        await asyncio.sleep(0)
        assert refusal(admission).kind is ErrorKind.BUSY
        jobs.gate.set()
        await asyncio.gather(*tasks)
        with admission.reserve(2):
            pass

    run(body, max_queue=0)


def test_a_model_that_is_being_loaded_again_admits_as_many_as_may_wait():
    """Requests that arrived while a process was replaced got an error."""

    async def body(admission: Admission, jobs: Scripted) -> None:
        jobs.state = "loading"
        with admission.reserve(4):
            assert refusal(admission).kind is ErrorKind.BUSY

    run(body)


def test_the_wait_that_is_asked_for_follows_the_jobs_of_late():
    async def body(admission: Admission, jobs: Scripted) -> None:
        with admission.reserve() as places:
            async with places.submit(job("a", b"x")):
                going = jobs.going["a"]
                going.started_ns, going.ended_ns = 0, 12 * SECOND
        with admission.reserve(5):
            assert refusal(admission).retry_after == 18, "three wait for two places of 12 s"

    run(body)


def test_the_wait_follows_how_long_jobs_take_and_how_many_are_waiting() -> None:
    average = LatencyAverage()
    assert average.estimate_wait(waiting=64, parallel=1) == 1, "nothing is known yet"
    average.add(3.0)
    assert average.estimate_wait(waiting=1, parallel=1) == 3
    assert average.estimate_wait(waiting=8, parallel=4) == 6
    assert average.estimate_wait(waiting=1, parallel=8) == 1
    assert average.estimate_wait(waiting=64, parallel=1) == 60
    average.add(11.0)
    assert average.estimate_wait(waiting=1, parallel=1) == 4


@given(
    seconds=st.lists(st.floats(0, 1e6), max_size=20),
    waiting=st.integers(1, 10_000),
    parallel=st.integers(1, 64),
)
def test_the_wait_is_never_nothing_and_never_more_than_a_minute(
    seconds: list[float], waiting: int, parallel: int
) -> None:
    average = LatencyAverage()
    for one in seconds:
        average.add(one)
    assert 1 <= average.estimate_wait(waiting=waiting, parallel=parallel) <= 60
