"""Decides what happens to the jobs of a model when its runner crashes.

Knows: the jobs of the runner, and which of them were running. Must not know: the life cycle of
runners.

A job that had not started when the runner failed is submitted to the next runner. This includes
jobs that were sent while the runner was hung. A job that was running fails, and its prompt is
recorded. A prompt that was running at two crashes is refused for an hour, unless it has finished
without an error in the meantime. Nothing is known about which of the running prompts caused a
crash, so a prompt that is sent again together with the cause is refused with it.

A crash caused by an operator's signal has no weight. A SIGKILL may come from an operator or from
the kernel's OOM killer; if the sender is unknown, the crash has less weight than a fault.
"""

import asyncio
import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.core.jobs import Ended, EngineStats, Job, JobUpdate
from app.core.models import ServedModel
from app.core.ports import FailureCause, Runner, RunnerFailure, Submission
from app.core.requests import EmbedJob
from app.core.units import pluralize

# The weight of a crash by cause, and the total weight at which a job is rejected: two faults, or
# six crashes that may have been caused by running out of memory.
CRASH_WEIGHTS: Mapping[FailureCause, int] = {"fault": 3, "unknown": 1, "outside": 0}
REFUSE_WEIGHT = 6

_MAX_RECORDS, _RECORD_TTL = 1000, 3600.0

AnyJob = Job | EmbedJob

# The number of engine steps after which a cancellation has taken effect. It includes the two steps
# of `Runner.submit`, and completed steps that were not reported yet.
_STEPS_UNTIL_CANCELLED = 8

# The maximum number of cancelled jobs to track, because they may still be running. It is larger
# than the number of concurrent jobs.
_MAX_ABANDONED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashRecord:
    """The crashes during which a job was running.

    crashes: the number of these crashes.
    weight: their total weight.
    last_crash: the time of the last crash.
    """

    crashes: int = 0
    weight: int = 0
    last_crash: float = 0.0


class CrashRecords:
    """The crash records of one model.

    max_records: the maximum number of records. The oldest records are dropped.
    ttl: the number of seconds for which a record is kept.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_records: int = _MAX_RECORDS,
        ttl: float = _RECORD_TTL,
    ) -> None:
        self._clock = clock
        self._max_records = max_records
        self._ttl = ttl
        self._records: OrderedDict[bytes, CrashRecord] = OrderedDict()

    def get(self, job: AnyJob) -> CrashRecord:
        """Returns the crash record of a job. The record is empty if there is none."""
        self._drop_expired()
        # Hashing a long prompt takes a millisecond, so it is skipped here and in `clear` if there
        # are no records.
        known = self._records.get(_key(job)) if self._records else None
        return known or CrashRecord()

    def add_crash(self, jobs: Iterable[AnyJob], *, weight: int) -> None:
        """Records that a runner crashed while these jobs were running. Several choices of the same
        prompt are counted once."""
        self._drop_expired()
        for key in {_key(job) for job in jobs}:
            before = self._records.pop(key, CrashRecord())
            self._records[key] = CrashRecord(
                crashes=before.crashes + 1, weight=before.weight + weight, last_crash=self._clock()
            )
        while len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def clear(self, job: AnyJob) -> None:
        """Removes the crash record of a job that has finished without an error."""
        if self._records:
            self._records.pop(_key(job), None)

    def clear_all(self) -> None:
        self._records.clear()

    def _drop_expired(self) -> None:
        """Drops expired records. Records are ordered by the last crash."""
        oldest = self._clock() - self._ttl
        while self._records and next(iter(self._records.values())).last_crash < oldest:
            self._records.popitem(last=False)


def _key(job: AnyJob) -> bytes:
    """Returns a hash of the job's prompt and grammar. Sampling parameters are not included."""
    if isinstance(job, EmbedJob):
        parts, rest = job.inputs, f"embed {job.pooling}"
    else:
        parts, rest = (job.prompt_token_ids,), repr(job.grammar)
    digest = hashlib.blake2b(rest.encode(errors="surrogatepass"), digest_size=16)
    for ids in parts:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(array("q", ids).tobytes())
    return digest.digest()


# Returns the current runner of a model. If there is none, or if it is the argument, waits for the
# next runner. Raises AppError if no runner will be started.
GetRunner = Callable[[Runner | None], Awaitable[Runner]]


class CrashQuarantine:
    """Runs the jobs of one model, and runs them again after a crash if this is allowed."""

    def __init__(
        self, served: ServedModel, get_runner: GetRunner, clock: Callable[[], float]
    ) -> None:
        self._name = served.name
        self._get_runner = get_runner
        self._crash_records = CrashRecords(clock)
        self._attempts: dict[str, _Attempt] = {}
        # cancelled jobs in `_attempts`, and the engine's step count at that time
        self._abandoned: dict[str, int] = {}

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[Submission]:
        """Submits a job like `Runner.submit`. Also raises AppError(INVALID) for a prompt whose
        crash weight has reached `REFUSE_WEIGHT`. If the runner fails before the job has started,
        the job is submitted to the next runner."""
        self._check_refused(job)
        async with AsyncExitStack() as stack:
            submission = _RetryingSubmission(job, self._get_runner, self._attempt, stack)
            await submission.submit()
            yield submission

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """Computes embeddings like `Runner.embed`, under the same rules as `submit`. An embedding
        job that the runner has received is always treated as started."""
        self._check_refused(job)
        lost_runner: Runner | None = None
        while True:
            runner = await self._get_runner(lost_runner)
            async with self._attempt(job, runner) as attempt:
                try:
                    vectors = await runner.embed(job)
                    attempt.succeeded = True
                    return vectors
                except AppError:
                    if runner.status().state != "failed" or not await attempt.may_retry():
                        raise
            lost_runner = runner

    def record_crash(self, parallel: int, stats: EngineStats, failure: RunnerFailure) -> None:
        """Records a failure of the runner.

        Jobs that had started were running. For each free slot, so was the next job in order of
        arrival, because a runner that crashes immediately cannot report that a job has started.
        Jobs that the runner or its hung engine had not read were not running.

        parallel: the maximum number of concurrent jobs.
        stats: the last statistics of the engine.
        """
        self._drop_abandoned(stats)
        read = [attempt for attempt in self._attempts.values() if attempt.was_read(failure)]
        jobs = [attempt for attempt in read if isinstance(attempt.job, Job)]
        started = [attempt for attempt in jobs if attempt.has_started]
        others = [attempt for attempt in jobs if not attempt.has_started]
        embedding = [attempt for attempt in read if isinstance(attempt.job, EmbedJob)]
        running = [*started, *others[: max(0, parallel - len(started))], *embedding]
        if weight := CRASH_WEIGHTS[failure.cause]:
            self._crash_records.add_crash((attempt.job for attempt in running), weight=weight)
        for attempt in self._attempts.values():
            attempt.end(was_running=attempt in running)

    def reset(self) -> None:
        """Drops all jobs of a runner that has stopped."""
        for attempt in self._attempts.values():
            # no effect after a crash; without a crash, the job ends with the runner
            attempt.end(was_running=True)
        self._attempts.clear()
        self._abandoned.clear()

    def forget_crashes(self) -> None:
        """Clears all crash records."""
        self._crash_records.clear_all()

    def _check_refused(self, job: AnyJob) -> None:
        record = self._crash_records.get(job)
        if record.weight >= REFUSE_WEIGHT:
            raise AppError(
                ErrorKind.INVALID,
                f"this prompt is refused, because {self._name} failed "
                f"{pluralize(record.crashes, 'time')} while processing it: change the prompt or "
                "its response format, or ask an operator to unload the model",
                code="prompt_refused",
            )

    @asynccontextmanager
    async def _attempt(self, job: AnyJob, runner: Runner) -> AsyncGenerator["_Attempt"]:
        # Track the job before submitting it, because compiling its grammar may crash the runner.
        attempt = self._attempts[job.id] = _Attempt(job, runner)
        try:
            yield attempt
        finally:
            if attempt.succeeded:
                self._crash_records.clear(job)
            if self._attempts.get(job.id) is attempt:  # the runner has not stopped
                self._stop_tracking(attempt)

    def _stop_tracking(self, attempt: "_Attempt") -> None:
        """Stops tracking a job. An unfinished job is tracked until the engine has completed a step
        without it, because the job may have hung the engine (clients time out before the watchdog
        does), or the engine may have failed without the failure being handled yet."""
        status = attempt.runner.status()
        alive = status.state != "failed"
        if alive:
            self._drop_abandoned(status.stats)
        if attempt.succeeded or (alive and len(self._abandoned) >= _MAX_ABANDONED):
            del self._attempts[attempt.job.id]
        else:
            self._abandoned[attempt.job.id] = status.stats.steps

    def _drop_abandoned(self, stats: EngineStats) -> None:
        """Drops jobs whose cancellation has taken effect."""
        idle = not (stats.running or stats.waiting or stats.embedding_jobs)
        for id_, steps in list(self._abandoned.items()):
            if stats.steps >= steps + (1 if idle else _STEPS_UNTIL_CANCELLED):
                del self._abandoned[id_], self._attempts[id_]


class _Attempt:
    """A job submitted to a runner. `succeeded` is True if it has finished without an error."""

    def __init__(self, job: AnyJob, runner: Runner) -> None:
        self.job = job
        self.runner = runner
        self.submission: Submission | None = None
        self.succeeded = False
        self._submitted_ns = time.monotonic_ns()
        self._was_running: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def has_started(self) -> bool:
        return self.submission is not None and self.submission.started_ns is not None

    def was_read(self, failure: RunnerFailure) -> bool:
        """Returns whether the runner had read the job before its failure."""
        if self.has_started:
            return True
        stuck = failure.stuck_since_ns
        return self.job.id not in failure.not_received and (
            stuck is None or self._submitted_ns <= stuck
        )

    def end(self, *, was_running: bool) -> None:
        """Records whether the job was running when the runner ended. Only the first call has an
        effect."""
        if not self._was_running.done():
            self._was_running.set_result(was_running)

    async def may_retry(self) -> bool:
        """Returns whether the job may be submitted to the next runner. Waits until the failure of
        the runner has been handled."""
        return not self.has_started and not await self._was_running


class _RetryingSubmission:
    """Implements `Submission`. Submits a job to each new runner until the job starts. `stack` is
    closed when the context of the job exits."""

    def __init__(
        self,
        job: Job,
        get_runner: GetRunner,
        attempt: Callable[[Job, Runner], AbstractAsyncContextManager[_Attempt]],
        stack: AsyncExitStack,
    ) -> None:
        self._job = job
        self._get_runner = get_runner
        self._attempt = attempt
        self._stack = stack
        self._current: _Attempt | None = None

    @property
    def started_ns(self) -> int | None:
        submission = None if self._current is None else self._current.submission
        return None if submission is None else submission.started_ns

    @property
    def ended_ns(self) -> int | None:
        """The time at which the slot of the job became free; None while the job may be submitted
        again."""
        attempt = self._current
        if attempt is None or attempt.submission is None:
            return None
        if not attempt.has_started and attempt.runner.status().state == "failed":
            return None
        return attempt.submission.ended_ns

    def limit_cached_tokens(self, tokens: int) -> None:
        assert self._current is not None
        assert self._current.submission is not None, "a job has no output before it is submitted"
        self._current.submission.limit_cached_tokens(tokens)

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        # After a crash, the next runner requests the pixels again.
        if self._current is not None and self._current.submission is not None:
            self._current.submission.provide_images(images)

    async def submit(self, lost_runner: Runner | None = None) -> None:
        """Submits the job to a runner other than `lost_runner`. Raises the same errors as
        `Runner.submit`, and the error that prevents the model from being reloaded."""
        while True:
            await self._stack.aclose()
            runner = await self._get_runner(lost_runner)
            attempt = self._current = await self._stack.enter_async_context(
                self._attempt(self._job, runner)
            )
            try:
                attempt.submission = await self._stack.enter_async_context(runner.submit(self._job))
                return
            except AppError:
                if runner.status().state != "failed" or not await attempt.may_retry():
                    raise
                lost_runner = runner

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        while True:
            attempt = self._current
            assert attempt is not None
            assert attempt.submission is not None
            async for updates in attempt.submission:
                last = updates[-1]
                if isinstance(last, Ended):
                    if last.engine_lost and await attempt.may_retry():
                        break
                    attempt.succeeded = last.reason in ("stop", "length")
                yield updates
                if isinstance(last, Ended):
                    return
            await self.submit(attempt.runner)
