"""Crash quarantine: retries jobs after a crash of the runner, and runs suspects one at a time.

Knows: the jobs of the runner, the suspects. Must not know: the life cycle of runners.

A job that had not started when the runner failed is resubmitted to the next runner. This includes
jobs that were sent while the runner was hung. All jobs that were running become suspects. Suspects
run one at a time. A suspect that did not cause the crash finishes normally, which clears it, and it
is not running when the job that caused the crash crashes the runner again. Other jobs may run
alongside a suspect. If the suspect crashes the runner, they become suspects as well.

A crash caused by an operator's signal has no weight. A SIGKILL may come from an operator or from
the kernel's OOM killer; if the sender is unknown, the crash has less weight than a fault.
"""

import asyncio
import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, ErrorKind
from app.core.jobs import Ended, EngineStats, Job, JobUpdate
from app.core.model_state import ServedModel
from app.core.ports import FailureCause, Runner, RunnerFailure, Submission
from app.core.units import pluralize

# The time in seconds after which the next suspect starts even if the current suspect is still
# running. Most crashes happen within this time, and a long completion must not delay other suspects
# for minutes.
_MAX_TURN = 30.0

SubmitJob = Callable[[Job], AbstractAsyncContextManager[Submission]]


class SerialTurns:
    """Runs tasks one at a time.

    max_waiting: the maximum number of waiting tasks. A task that gets its turn at once does not
        wait.
    max_turn: the number of seconds after which the next task may start.
    """

    def __init__(self, max_waiting: int, max_turn: float = _MAX_TURN) -> None:
        self.max_waiting = max_waiting
        self._max_turn = max_turn
        self._waiting = 0
        self._free = asyncio.Semaphore(1)

    @asynccontextmanager
    async def take_turn(self) -> AsyncGenerator[None]:
        """Waits for a turn, and holds it until the context exits. Raises AppError(BUSY) if the turn
        is taken and too many tasks are waiting."""
        if self._free.locked() and self._waiting >= self.max_waiting:
            raise AppError(
                ErrorKind.BUSY,
                "prompts that were running when the model failed are retried one at a "
                "time, and too "
                "many are already waiting; try again later",
                retry_after=round(self._max_turn),
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        over = False

        def end() -> None:
            nonlocal over
            if not over:
                over = True
                self._free.release()

        timer = asyncio.get_running_loop().call_later(self._max_turn, end)
        try:
            yield
        finally:
            timer.cancel()
            end()


class IsolatedSubmission:
    """A submission that waits for its turn.

    A separate task reads the updates, so that the turn ends with the job, rather than when a slow
    client has read the output. Entering the context never waits, because a request submits all of
    its jobs before it reads from the first one, and would otherwise deadlock. Iterating raises the
    exceptions of `submit`.

    `on_success` is called with a job that has finished without an error.
    """

    def __init__(
        self, job: Job, submit: SubmitJob, turns: SerialTurns, on_success: Callable[[Job], None]
    ) -> None:
        self._job = job
        self._submit = submit
        self._turns = turns
        self._on_success = on_success
        self._batches: asyncio.Queue[Sequence[JobUpdate] | Exception] = asyncio.Queue()
        self._submission: Submission | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        while True:
            updates = await self._batches.get()
            if isinstance(updates, Exception):
                raise updates
            yield updates
            if isinstance(updates[-1], Ended):
                return

    @property
    def started_ns(self) -> int | None:
        return None if self._submission is None else self._submission.started_ns

    @property
    def ended_ns(self) -> int | None:
        return None if self._submission is None else self._submission.ended_ns

    def limit_cached_tokens(self, tokens: int) -> None:
        # There is no output before the job is submitted.
        assert self._submission is not None
        self._submission.limit_cached_tokens(tokens)

    async def _read(self) -> None:
        try:
            async with self._turns.take_turn(), self._submit(self._job) as submission:
                self._submission = submission
                async for updates in submission:
                    self._batches.put_nowait(updates)
                    last = updates[-1]
                    if isinstance(last, Ended) and last.reason in ("stop", "length"):
                        self._on_success(self._job)
        except Exception as error:
            self._batches.put_nowait(error)


# The weight of a crash by cause, and the total weight at which a job is rejected: two faults, or
# six crashes that may have been caused by running out of memory.
CRASH_WEIGHTS: Mapping[FailureCause, int] = {"fault": 3, "unknown": 1, "outside": 0}
REFUSE_WEIGHT = 6

_MAX_RECORDS, _RECORD_TTL = 1000, 3600.0

AnyJob = Job | EmbedJob


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
        # Hashing a long prompt takes a millisecond, so it is skipped if there are no records.
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


# The number of engine steps after which a cancellation has taken effect. It includes the two steps
# of `Runner.submit`, and completed steps that were not reported yet.
_STEPS_UNTIL_CANCELLED = 8

# The maximum number of cancelled jobs to track, because they may still be running. It is larger
# than the number of concurrent jobs.
_MAX_ABANDONED = 64


class RunnerSource(Protocol):
    """Provides the current runner of a model."""

    async def get_runner(self, lost_runner: Runner | None = None) -> Runner:
        """Returns the current runner. If there is none, or if it is `lost_runner`, waits for the
        next runner. Raises AppError if no runner will be started."""
        ...


class CrashQuarantine:
    """Runs the jobs of one model, and runs suspects one at a time."""

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
        ] = {}  # cancelled jobs in `_tracked`, and the engine's step count at that time

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[Submission]:
        """Submits a job like `Runner.submit`. Also raises AppError(INVALID) for a prompt whose
        crash weight has reached `REFUSE_WEIGHT`. Iterating over a suspect waits until no other
        suspect is running. If the runner fails before the job has started, the job is submitted to
        the next runner."""
        if not self._check_suspect(job):
            async with self._submit_with_retry(job) as submission:
                yield submission
            return
        async with IsolatedSubmission(
            job, self._submit_with_retry, self._serial_turns, self._crash_records.clear
        ) as submission:
            yield submission

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """Computes embeddings like `Runner.embed`, under the same rules as `submit`. An embedding
        job that the runner has received is always treated as started."""
        if not self._check_suspect(job):
            return await self._embed(job)
        async with self._serial_turns.take_turn():
            vectors = await self._embed(job)
        self._crash_records.clear(job)
        return vectors

    def record_crash(self, parallel: int, stats: EngineStats, failure: RunnerFailure) -> None:
        """Records a failure of the runner.

        Jobs that had started become suspects. For each free slot, the next job in order of arrival
        also becomes a suspect, because a runner that crashes immediately cannot report that a job
        has started. Jobs that the runner or its hung engine had not read are no suspects.

        parallel: the maximum number of concurrent jobs.
        stats: the last statistics of the engine.
        """
        self._drop_abandoned(stats)
        read = [one for one in self._tracked.values() if one.was_read(failure)]
        jobs = [one for one in read if isinstance(one.job, Job)]
        began = [one for one in jobs if one.has_started]
        others = [one for one in jobs if not one.has_started]
        embedding = [one for one in read if isinstance(one.job, EmbedJob)]
        suspects = [*began, *others[: max(0, parallel - len(began))], *embedding]
        if weight := CRASH_WEIGHTS[failure.cause]:
            self._crash_records.add_crash((one.job for one in suspects), weight=weight)
        for one in self._tracked.values():
            one.set_implicated(implicated=one in suspects)

    def set_max_waiting(self, suspects: int) -> None:
        """Sets the maximum number of waiting suspects."""
        self._serial_turns.max_waiting = suspects

    def reset(self) -> None:
        """Drops all jobs of a runner that has stopped."""
        for one in self._tracked.values():
            one.set_implicated(
                implicated=True
            )  # no effect if already set; otherwise, the job ends with the runner
        self._tracked.clear()
        self._abandoned.clear()

    def forget_crashes(self) -> None:
        """Clears all crash records."""
        self._crash_records.clear_all()

    def _check_suspect(self, job: AnyJob) -> bool:
        """Returns whether a job is a suspect. Raises AppError(INVALID) if the job is rejected."""
        record = self._crash_records.get(job)
        if record.weight >= REFUSE_WEIGHT:
            raise AppError(
                ErrorKind.INVALID,
                f"this prompt is refused, because {self._name} failed "
                f"{pluralize(record.crashes, 'time')} while processing it: change the prompt or "
                "its response format, or ask an operator to unload the model",
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
    async def _track(self, job: AnyJob, runner: Runner) -> AsyncGenerator["_TrackedJob"]:
        # Track the job before submitting it, because compiling its grammar may crash the runner.
        one = self._tracked[job.id] = _TrackedJob(job, runner)
        try:
            yield one
        finally:
            self._untrack(one)

    async def _embed(self, job: EmbedJob) -> Sequence[bytes]:
        """Submits an embedding job to each new runner until a runner has received it."""
        lost_runner: Runner | None = None
        while True:
            runner = await self._source.get_runner(lost_runner)
            async with self._track(job, runner) as one:
                try:
                    vectors = await runner.embed(job)
                    one.succeeded = True
                    return vectors
                except AppError:
                    if runner.status().state != "failed" or not await one.may_retry():
                        raise
            lost_runner = runner

    def _untrack(self, tracked: "_TrackedJob") -> None:
        """Stops tracking a job. An unfinished job is tracked until the engine has completed a step
        without it, because the job may have hung the engine (clients time out before the watchdog
        does), or the engine may have failed without the failure being handled yet."""
        if self._tracked.get(tracked.job.id) is not tracked:
            return  # the runner has stopped
        status = tracked.runner.status()
        alive = status.state != "failed"
        if alive:
            self._drop_abandoned(status.stats)
        if tracked.succeeded or (alive and len(self._abandoned) >= _MAX_ABANDONED):
            del self._tracked[tracked.job.id]
        else:
            self._abandoned[tracked.job.id] = status.stats.steps

    def _drop_abandoned(self, stats: EngineStats) -> None:
        """Drops jobs whose cancellation has taken effect."""
        idle = not (stats.running or stats.waiting or stats.embedding_jobs)
        for id_, turns in list(self._abandoned.items()):
            if stats.steps >= turns + (1 if idle else _STEPS_UNTIL_CANCELLED):
                del self._abandoned[id_], self._tracked[id_]


class _TrackedJob:
    """A job submitted to a runner. `succeeded` is True if it has finished without an error."""

    def __init__(self, job: AnyJob, runner: Runner) -> None:
        self.job = job
        self.runner = runner
        self.submission: Submission | None = None
        self.succeeded = False
        self._submitted_ns = time.monotonic_ns()
        self._implicated: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def has_started(self) -> bool:
        return self.submission is not None and self.submission.started_ns is not None

    def was_read(self, failure: RunnerFailure) -> bool:
        """Returns whether the job may have had an effect on the runner before its failure."""
        if self.has_started:
            return True
        stuck = failure.stuck_since_ns
        return self.job.id not in failure.not_received and (
            stuck is None or self._submitted_ns <= stuck
        )

    def set_implicated(self, *, implicated: bool) -> None:
        """Records whether the job may have caused the runner's failure. Called after the failure.
        Only the first call has an effect."""
        if not self._implicated.done():
            self._implicated.set_result(implicated)

    async def may_retry(self) -> bool:
        """Returns whether the job may be resubmitted to the next runner. Waits until the failure of
        the runner has been handled. Returns False if the job had started, because the client may
        have received output, or if the job may have caused the failure."""
        return not self.has_started and not await self._implicated


class _RetryingSubmission:
    """Implements `Submission`. Resubmits a job to each new runner until the job starts. `stack` is
    closed when the context of the job exits."""

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
        """The time at which the slot of the job became free; None while the job may be
        resubmitted."""
        one = self._current
        if one is None or one.submission is None or one.submission.ended_ns is None:
            return None
        if not one.has_started and one.runner.status().state == "failed":
            return None
        return one.submission.ended_ns

    def limit_cached_tokens(self, tokens: int) -> None:
        assert self._current is not None
        assert self._current.submission is not None, "a job has no output before it is submitted"
        self._current.submission.limit_cached_tokens(tokens)

    async def submit(self, lost_runner: Runner | None = None) -> None:
        """Submits the job to a runner other than `lost_runner`. Raises the same errors as
        `Runner.submit`, and the error that prevents the model from being reloaded."""
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

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        while True:
            one = self._current
            assert one is not None
            assert one.submission is not None
            async for updates in one.submission:
                last = updates[-1]
                if isinstance(last, Ended):
                    if last.engine_lost and await one.may_retry():
                        break
                    one.succeeded = last.reason in ("stop", "length")
                yield updates
                if isinstance(last, Ended):
                    return
            await self.submit(one.runner)
