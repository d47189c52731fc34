"""Jobs on their way to a model's runner: submitted again where the runner died before they began,
tried alone where they ran when one died.

Knows: which jobs are at the runner, which ones are suspects (`app.runners.suspects`). Must not
know: why there is a runner or none.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, ErrorKind
from app.core.jobs import Ended, EngineStats, Job, JobUpdate
from app.core.ports import FailureCause, Runner, Submission
from app.core.residents import ServedModel
from app.runners.alone import IsolatedSubmission, SerialTurns
from app.runners.suspects import CRASH_WEIGHTS, REFUSE_WEIGHT, AnyJob, CrashRecords

# Turns of an engine in which it has surely heard that a job was left: two (`Runner.submit`), and
# those which it had made already when the news of them had not come yet.
_STEPS_UNTIL_CANCELLED = 8

# jobs that were left and may still be run which are remembered: more than run at once
_MAX_ABANDONED = 64


class RunnerSource(Protocol):
    """Where runners come from."""

    async def get_runner(self, lost_runner: Runner | None = None) -> Runner:
        """The runner of now, or the next one where there is none, or where it is `lost_runner`.
        Raises AppError if there will be none."""
        ...


class CrashQuarantine:
    """Runs the jobs of one model."""

    def __init__(
        self, served: ServedModel, source: RunnerSource, clock: Callable[[], float]
    ) -> None:
        self._name = served.name
        self._source = source
        self._crash_records = CrashRecords(clock)
        self._serial_turns = SerialTurns(served.settings.max_queue)
        self._tracked: dict[str, _TrackedJob] = {}
        self._abandoned: dict[
            str, int
        ] = {}  # of those dispatched, and the engine's turns until then

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[Submission]:
        """As `Runner.submit`; AppError(INVALID) also for a prompt that killed two runners. One that
        stood by when one died waits, while it is iterated, until no other such one runs. One whose
        runner is lost before it began is submitted to the next runner."""
        if not self._check_suspect(job):
            async with self._submit_with_retry(job) as submission:
                yield submission
            return
        async with IsolatedSubmission(
            job, self._submit_with_retry, self._serial_turns, self._crash_records.clear
        ) as apart:
            yield apart

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """As `Runner.embed`, and as `submit`; inputs count as begun."""
        if not self._check_suspect(job):
            return await self._embed(job)
        async with self._serial_turns.take_turn():
            vectors = await self._embed(job)
        self._crash_records.clear(job)
        return vectors

    def record_crash(self, parallel: int, stats: EngineStats, *, cause: FailureCause) -> None:
        """The runner was lost. parallel: jobs that ran at once. Those that had begun ran; so may
        have as many of the others as there were places left, in the order in which they came: of a
        prompt that kills at once, a runner dies before it has said that the job began. stats: the
        last that it said. cause: see `RunnerFailure`."""
        self._drop_abandoned(stats)
        jobs = [one for one in self._tracked.values() if isinstance(one.job, Job)]
        began = [one for one in jobs if one.has_started]
        others = [one for one in jobs if not one.has_started]
        embedding = [one for one in self._tracked.values() if isinstance(one.job, EmbedJob)]
        accused = [*began, *others[: max(0, parallel - len(began))], *embedding]
        if weight := CRASH_WEIGHTS[cause]:
            self._crash_records.add_crash((one.job for one in accused), weight=weight)
        for one in self._tracked.values():
            one.set_implicated(implicated=one in accused)

    def reset(self) -> None:
        """There is no runner any more."""
        for one in self._tracked.values():
            one.set_implicated(
                implicated=True
            )  # unless it was judged before: it ends with the runner
        self._tracked.clear()
        self._abandoned.clear()

    def forget_crashes(self) -> None:
        """Forget all suspects."""
        self._crash_records.clear_all()

    def _check_suspect(self, job: AnyJob) -> bool:
        """Whether it is a suspect. Raises AppError(INVALID) if it is more than that."""
        record = self._crash_records.get(job)
        if record.weight >= REFUSE_WEIGHT:
            raise AppError(
                ErrorKind.INVALID,
                f"this prompt is refused: {self._name} failed {record.crashes} times while "
                "evaluating "
                "it. Change the prompt or its response format; an operator can clear this by "
                "unloading the model",
                code="prompt_refused",
            )
        return record.weight > 0

    @asynccontextmanager
    async def _submit_with_retry(self, job: Job) -> AsyncGenerator[Submission]:
        async with AsyncExitStack() as stack:
            requeued = _RetryingSubmission(job, self._source, self._track, stack)
            await requeued.submit()
            yield requeued

    @asynccontextmanager
    async def _track(self, job: Job, runner: Runner) -> AsyncGenerator["_TrackedJob"]:
        # before it is submitted: compiling its grammar may be what kills
        one = self._tracked[job.id] = _TrackedJob(job, runner)
        try:
            yield one
        finally:
            self._untrack(one)

    async def _embed(self, job: EmbedJob) -> Sequence[bytes]:
        runner = await self._source.get_runner()
        one = self._tracked[job.id] = _TrackedJob(job, runner)
        try:
            vectors = await runner.embed(job)
            one.succeeded = True
            return vectors
        finally:
            self._untrack(one)

    def _untrack(self, tracked: "_TrackedJob") -> None:
        """One that did not end well is remembered until the engine has turned without it: it may
        hang in it, and clients are less patient than a watchdog; or it is dead, and the client
        heard of it before we did."""
        if self._tracked.get(tracked.job.id) is not tracked:
            return  # of a runner that is gone
        status = tracked.runner.status()
        alive = status.state != "failed"
        if alive:
            self._drop_abandoned(status.stats)
        if tracked.succeeded or (alive and len(self._abandoned) >= _MAX_ABANDONED):
            del self._tracked[tracked.job.id]
        else:
            self._abandoned[tracked.job.id] = status.stats.steps

    def _drop_abandoned(self, stats: EngineStats) -> None:
        """Those whose leaving the engine has heard of."""
        idle = not (stats.running or stats.waiting or stats.embedding_jobs)
        for id_, turns in list(self._abandoned.items()):
            if stats.steps >= turns + (1 if idle else _STEPS_UNTIL_CANCELLED):
                del self._abandoned[id_], self._tracked[id_]


class _TrackedJob:
    """A job that a runner was given. succeeded: it came to a good end."""

    def __init__(self, job: AnyJob, runner: Runner) -> None:
        self.job = job
        self.runner = runner
        self.submission: Submission | None = None
        self.succeeded = False
        self._implicated: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def has_started(self) -> bool:
        return self.submission is not None and self.submission.started_ns is not None

    def set_implicated(self, *, implicated: bool) -> None:
        """The runner is lost; implicated: the job may be the cause. Only the first one counts."""
        if not self._implicated.done():
            self._implicated.set_result(implicated)

    async def may_retry(self) -> bool:
        """To be asked when the runner is lost; returns when that was noticed. Not a job that had
        begun, of which its client has seen something, nor one that may be the cause."""
        return not self.has_started and not await self._implicated


class _RetryingSubmission:
    """Implements `Submission`: a job at one runner after the other, until it begins. stack: left
    when the job is."""

    def __init__(
        self,
        job: Job,
        source: RunnerSource,
        track: Callable[[Job, Runner], AbstractAsyncContextManager[_TrackedJob]],
        stack: AsyncExitStack,
    ) -> None:
        self._job = job
        self._source = source
        self._track = track
        self._stack = stack
        self._current: _TrackedJob | None = None

    @property
    def started_ns(self) -> int | None:
        submission = None if self._current is None else self._current.submission
        return None if submission is None else submission.started_ns

    @property
    def ended_ns(self) -> int | None:
        """A job that may be submitted again keeps its place."""
        one = self._current
        if one is None or one.submission is None or one.submission.ended_ns is None:
            return None
        if not one.has_started and one.runner.status().state == "failed":
            return None
        return one.submission.ended_ns

    def limit_cached_tokens(self, tokens: int) -> None:
        assert self._current is not None
        assert self._current.submission is not None, (
            "nothing is seen of a job before it is submitted"
        )
        self._current.submission.limit_cached_tokens(tokens)

    async def submit(self, lost_runner: Runner | None = None) -> None:
        """Submits the job, to another runner than the one that was lost. Raises as `Runner.submit`
        does, and what keeps the model from being loaded again."""
        while True:
            await self._stack.aclose()
            runner = await self._source.get_runner(lost_runner)
            one = self._current = await self._stack.enter_async_context(
                self._track(self._job, runner)
            )
            try:
                one.submission = await self._stack.enter_async_context(runner.submit(self._job))
                return
            except AppError:
                if runner.status().state != "failed" or not await one.may_retry():
                    raise
                lost_runner = runner

    async def __aiter__(self) -> AsyncIterator[JobUpdate]:
        while True:
            one = self._current
            assert one is not None
            assert one.submission is not None
            async for update in one.submission:
                if isinstance(update, Ended):
                    if update.engine_lost and await one.may_retry():
                        break
                    one.succeeded = update.reason in ("stop", "length")
                yield update
                if isinstance(update, Ended):
                    return
            await self.submit(one.runner)
