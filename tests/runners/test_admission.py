"""Admission: the limit of requests for one model, in all their phases."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.core.jobs import Capacity, EngineStats, Job, JobUpdate
from app.core.ports import RunnerState, RunnerStatus
from app.core.requests import EmbedJob
from app.runners.admission import Admission, LatencyAverage
from tests.engine.harness import job

PATIENCE = 30.0
SECOND = 1_000_000_000


class FakeSubmission:
    """Implements `Submission`; tests set its fields."""

    def __init__(self) -> None:
        self.started_ns: int | None = None
        self.ended_ns: int | None = None

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        for update in ():
            yield [update]

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        raise AssertionError("the jobs have no images")

    def limit_cached_tokens(self, tokens: int) -> None: ...


class FakeRunner:
    """Implements `JobRunner`, with two slots. gate: a submit waits for it, as for a grammar."""

    def __init__(self) -> None:
        self.state: RunnerState = "ready"
        self.gate = asyncio.Event()
        self.gate.set()
        self.submissions: dict[str, FakeSubmission] = {}
        self.refused = False

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[FakeSubmission]:
        await self.gate.wait()
        if self.refused:
            raise AppError(ErrorKind.INVALID, "unsupported grammar")
        submission = self.submissions[job.id] = FakeSubmission()
        try:
            yield submission
        finally:
            del self.submissions[job.id]

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


def run(body: Callable[[Admission, FakeRunner], Awaitable[None]], max_queue: int = 3) -> None:
    async def checked() -> None:
        runner = FakeRunner()
        async with asyncio.timeout(PATIENCE):
            await body(Admission(runner, max_queue), runner)

    asyncio.run(checked())


def admission_error(admission: Admission, count: int = 1) -> AppError:
    with pytest.raises(AppError) as caught, admission.reserve(count):
        pass
    return caught.value


def test_requests_are_admitted_before_any_work_is_done_for_them():
    """Requests that waited for a thread, or for a grammar, were not counted and not limited."""

    async def body(admission: Admission, runner: FakeRunner) -> None:
        with ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(admission.reserve())
            assert admission.status().preparing == 5
            for count in (1, 2):
                error = admission_error(admission)
                assert error.kind is ErrorKind.BUSY
                assert error.retry_after is not None
                assert "5 requests in progress" in error.message
                assert "at most 2 run and 3 wait" in error.message
                assert admission.status().rejected == count
        assert admission.status().preparing == 0
        with admission.reserve(5):
            assert admission.status().rejected == 2

    run(body)


def test_a_request_takes_a_slot_for_each_choice():
    async def body(admission: Admission, runner: FakeRunner) -> None:
        with admission.reserve(3):
            assert "3 requests in progress" in admission_error(admission, 3).message
            with admission.reserve(2):
                assert admission_error(admission).kind is ErrorKind.BUSY

    run(body)


def test_a_job_keeps_its_slot_while_it_is_submitted_and_runs():
    async def body(admission: Admission, runner: FakeRunner) -> None:
        runner.gate.clear()

        async def answer(name: str) -> None:
            with admission.reserve() as reservation:
                async with reservation.submit(job(name, b"x")):
                    await asyncio.Event().wait()

        tasks = [asyncio.create_task(answer(name)) for name in "ab"]
        await asyncio.sleep(0)
        assert admission.status().preparing == 0, "their grammars are compiled"
        assert admission_error(admission).kind is ErrorKind.BUSY
        runner.gate.set()
        while len(runner.submissions) < 2:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0)
        assert admission_error(admission).kind is ErrorKind.BUSY
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with admission.reserve(2):
            pass

    run(body, max_queue=0)


def test_a_finished_job_that_is_still_read_takes_no_slot():
    """The engine has finished it; a slow client does not delay others."""

    async def body(admission: Admission, runner: FakeRunner) -> None:
        with admission.reserve(2) as reservation:
            async with reservation.submit(job("a", b"x")), reservation.submit(job("b", b"x")):
                assert admission_error(admission).kind is ErrorKind.BUSY
                runner.submissions["a"].ended_ns = 1
                with admission.reserve():
                    assert admission_error(admission).kind is ErrorKind.BUSY

    run(body, max_queue=0)


def test_a_choice_that_is_left_frees_its_slot():
    async def body(admission: Admission, runner: FakeRunner) -> None:
        with admission.reserve(2) as reservation:
            async with reservation.submit(job("a", b"x")):
                pass
            with admission.reserve():
                assert admission_error(admission).kind is ErrorKind.BUSY

    run(body, max_queue=0)


def test_embeddings_take_slots_too():
    async def body(admission: Admission, runner: FakeRunner) -> None:
        runner.gate.clear()

        async def embed() -> None:
            with admission.reserve() as reservation:
                await reservation.embed(EmbedJob(id="v", inputs=((1,),), pooling="mean"))

        tasks = [asyncio.create_task(embed()) for _ in "ab"]
        await asyncio.sleep(0)
        assert admission_error(admission).kind is ErrorKind.BUSY
        runner.gate.set()
        await asyncio.gather(*tasks)
        with admission.reserve(2):
            pass

    run(body, max_queue=0)


def test_a_reloading_model_admits_as_many_as_the_queue_holds():
    """Requests that arrived while a process was replaced got an error."""

    async def body(admission: Admission, runner: FakeRunner) -> None:
        runner.state = "loading"
        with admission.reserve(4):
            assert admission_error(admission).kind is ErrorKind.BUSY

    run(body)


def test_retry_after_depends_on_recent_jobs():
    async def body(admission: Admission, runner: FakeRunner) -> None:
        with admission.reserve() as reservation:
            async with reservation.submit(job("a", b"x")):
                submission = runner.submissions["a"]
                submission.started_ns, submission.ended_ns = 0, 12 * SECOND
        with admission.reserve(5):
            assert admission_error(admission).retry_after == 18, "three wait for two slots of 12 s"

    run(body)


def test_the_estimated_wait_depends_on_latency_and_queue_length() -> None:
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
def test_the_estimated_wait_is_between_a_second_and_a_minute(
    seconds: list[float], waiting: int, parallel: int
) -> None:
    average = LatencyAverage()
    for one in seconds:
        average.add(one)
    assert 1 <= average.estimate_wait(waiting=waiting, parallel=parallel) <= 60


def test_a_rejected_job_frees_its_place_in_the_queue():
    async def body(admission: Admission, jobs: FakeRunner) -> None:
        with admission.reserve() as places:
            jobs.refused = True
            with pytest.raises(AppError):
                async with places.submit(job("a", [1])):
                    pass
            assert admission.preparing == 1
            jobs.refused = False
            async with places.submit(job("b", [1])):
                assert admission.preparing == 0

    run(body)
