"""Crash quarantine: retries jobs after a crash of the runner, suspects one at a time.

Knows: the jobs at the runner, which of them are suspects. Must not know: why there is a runner or
none.

A job that had not begun when the runner crashed is submitted to the next runner. All jobs that were
running are suspects. Suspects run one at a time: a job that did not cause the crash then finishes,
which clears it, and is not running when the cause crashes the runner again. Other jobs may run next
to a suspect; if it crashes the runner, they become suspects as well.

A crash by an operator's signal has no weight. The kernel sends the same SIGKILL when the system is
out of memory; if the sender is unknown, the crash weighs less than a fault.
"""

import asyncio
import hashlib
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
from app.core.ports import FailureCause, Runner, Submission

# seconds after which the next suspect starts although the current one still runs: most crashes
# happen within that time, and a long completion must not delay other suspects for minutes
_MAX_TURN = 30.0

SubmitJob = Callable[[Job], AbstractAsyncContextManager[Submission]]


class SerialTurns:
    """Runs tasks one at a time. max_waiting: maximum number of waiting tasks. max_turn: seconds
    after which the next task may start."""

    def __init__(self, max_waiting: int, max_turn: float = _MAX_TURN) -> None:
        self._max_waiting = max_waiting
        self._max_turn = max_turn
        self._waiting = 0
        self._free = asyncio.Semaphore(1)

    @asynccontextmanager
    async def take_turn(self) -> AsyncGenerator[None]:
        """Waits for a turn and holds it. Raises AppError(BUSY) if too many tasks wait."""
        if self._waiting >= self._max_waiting:
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
    """A job that waits for its turn. A separate task reads its updates, so that the turn ends with
    the job, not when a slow client has read the output. Entering never waits, since a request
    enters all of its jobs before it reads the first one, and would wait for itself; exceptions of
    `submit` are raised by the iteration.

    on_success: called with a job that has finished without an error."""

    def __init__(
        self, job: Job, submit: SubmitJob, turns: SerialTurns, on_success: Callable[[Job], None]
    ) -> None:
        self._job = job
        self._submit = submit
        self._turns = turns
        self._on_success = on_success
        self._updates: asyncio.Queue[JobUpdate | Exception] = asyncio.Queue()
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

    async def __aiter__(self) -> AsyncIterator[JobUpdate]:
        while True:
            update = await self._updates.get()
            if isinstance(update, Exception):
                raise update
            yield update
            if isinstance(update, Ended):
                return

    @property
    def started_ns(self) -> int | None:
        return None if self._submission is None else self._submission.started_ns

    @property
    def ended_ns(self) -> int | None:
        return None if self._submission is None else self._submission.ended_ns

    def limit_cached_tokens(self, tokens: int) -> None:
        # there is no output before the job is submitted
        assert self._submission is not None
        self._submission.limit_cached_tokens(tokens)

    async def _read(self) -> None:
        try:
            async with self._turns.take_turn(), self._submit(self._job) as submission:
                self._submission = submission
                async for update in submission:
                    self._updates.put_nowait(update)
                    if isinstance(update, Ended) and update.reason in ("stop", "length"):
                        self._on_success(self._job)
        except Exception as error:
            self._updates.put_nowait(error)


# The weight of a crash by cause, and the total weight from which a job is refused: two faults, or
# six crashes that may have been caused by a lack of memory.
CRASH_WEIGHTS: Mapping[FailureCause, int] = {"fault": 3, "unknown": 1, "outside": 0}
REFUSE_WEIGHT = 6

_MAX_RECORDS, _RECORD_TTL = 1000, 3600.0

AnyJob = Job | EmbedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashRecord:
    """crashes: number of crashes during which a job ran. weight: their total weight. last_crash:
    time of the last one."""

    crashes: int = 0
    weight: int = 0
    last_crash: float = 0.0


class CrashRecords:
    """The crash records of one model. max_records: maximum number of records; the oldest are
    dropped. ttl: seconds that a record is kept."""

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
        """The crash record of a job; empty if there is none."""
        self._drop_expired()
        # hashing a long prompt takes a millisecond: skipped if there are no records
        known = self._records.get(_key(job)) if self._records else None
        return known or CrashRecord()

    def add_crash(self, jobs: Iterable[AnyJob], *, weight: int) -> None:
        """Records that a runner crashed while these jobs ran; several choices of the same prompt
        count once."""
        self._drop_expired()
        for key in {_key(job) for job in jobs}:
            before = self._records.pop(key, CrashRecord())
            self._records[key] = CrashRecord(
                crashes=before.crashes + 1, weight=before.weight + weight, last_crash=self._clock()
            )
        while len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def clear(self, job: AnyJob) -> None:
        """Removes the record of a job that has finished without an error."""
        self._records.pop(_key(job), None)

    def clear_all(self) -> None:
        self._records.clear()

    def _drop_expired(self) -> None:
        """Drops expired records. The oldest come first, since each crash moves its jobs to the
        end."""
        oldest = self._clock() - self._ttl
        while self._records and next(iter(self._records.values())).last_crash < oldest:
            self._records.popitem(last=False)


def _key(job: AnyJob) -> bytes:
    """A hash of the job's prompt and grammar; sampling parameters are not included."""
    if isinstance(job, EmbedJob):
        parts, rest = job.inputs, f"embed {job.pooling}"
    else:
        parts, rest = (job.prompt_token_ids,), repr(job.grammar)
    digest = hashlib.blake2b(rest.encode(errors="surrogatepass"), digest_size=16)
    for ids in parts:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(array("q", ids).tobytes())
    return digest.digest()


# Engine steps after which a cancellation has certainly taken effect: two (`Runner.submit`), and
# steps that were complete but not yet reported.
_STEPS_UNTIL_CANCELLED = 8

# maximum number of cancelled jobs that are tracked, as they may still run; more than run at once
_MAX_ABANDONED = 64


class RunnerSource(Protocol):
    """Provides the current runner of a model."""

    async def get_runner(self, lost_runner: Runner | None = None) -> Runner:
        """Returns the current runner; waits for the next one if there is none or if it is
        `lost_runner`. Raises AppError if there will be none."""
        ...


class CrashQuarantine:
    """Runs the jobs of one model, suspects one at a time."""

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
        ] = {}  # cancelled jobs of `_tracked`, and the engine's steps at that time

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[Submission]:
        """Like `Runner.submit`; also raises AppError(INVALID) for a prompt whose crashes reach
        `REFUSE_WEIGHT`. The iteration of a suspect waits until no other suspect runs. A job whose
        runner fails before it began is submitted to the next runner."""
        if not self._check_suspect(job):
            async with self._submit_with_retry(job) as submission:
                yield submission
            return
        async with IsolatedSubmission(
            job, self._submit_with_retry, self._serial_turns, self._crash_records.clear
        ) as apart:
            yield apart

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """Like `Runner.embed`, with the rules of `submit`; an embedding job always counts as
        begun."""
        if not self._check_suspect(job):
            return await self._embed(job)
        async with self._serial_turns.take_turn():
            vectors = await self._embed(job)
        self._crash_records.clear(job)
        return vectors

    def record_crash(self, parallel: int, stats: EngineStats, *, cause: FailureCause) -> None:
        """Records a failure of the runner.

        Jobs that had begun are suspects, and so are the next jobs in order of arrival, as many as
        there were free places: a runner that crashes at once has not reported that the job began.

        parallel: maximum number of concurrent jobs. stats: last statistics of the engine. cause:
        see `RunnerFailure`."""
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
        """Drops all jobs of a runner that has ended."""
        for one in self._tracked.values():
            one.set_implicated(
                implicated=True
            )  # no effect if set before; else the job ends with the runner
        self._tracked.clear()
        self._abandoned.clear()

    def forget_crashes(self) -> None:
        """Forgets all suspects."""
        self._crash_records.clear_all()

    def _check_suspect(self, job: AnyJob) -> bool:
        """Whether a job is a suspect. Raises AppError(INVALID) if it is refused."""
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
        # tracked before it is submitted, since compiling its grammar may crash the runner
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
        """Stops tracking a job. A job that did not finish is tracked until the engine has completed
        a step without it: the engine may hang in it, and clients time out before the watchdog; or
        the engine is dead and its failure was not handled yet."""
        if self._tracked.get(tracked.job.id) is not tracked:
            return  # its runner has ended
        status = tracked.runner.status()
        alive = status.state != "failed"
        if alive:
            self._drop_abandoned(status.stats)
        if tracked.succeeded or (alive and len(self._abandoned) >= _MAX_ABANDONED):
            del self._tracked[tracked.job.id]
        else:
            self._abandoned[tracked.job.id] = status.stats.steps

    def _drop_abandoned(self, stats: EngineStats) -> None:
        """Drops the cancelled jobs whose cancellation has taken effect."""
        idle = not (stats.running or stats.waiting or stats.embedding_jobs)
        for id_, turns in list(self._abandoned.items()):
            if stats.steps >= turns + (1 if idle else _STEPS_UNTIL_CANCELLED):
                del self._abandoned[id_], self._tracked[id_]


class _TrackedJob:
    """A job submitted to a runner. succeeded: it has finished without an error."""

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
        """Called when the runner has failed. implicated: the job may be the cause. Only the first
        call counts."""
        if not self._implicated.done():
            self._implicated.set_result(implicated)

    async def may_retry(self) -> bool:
        """Whether the job may be submitted to the next runner; waits until the failure of the
        runner was handled. False for a job that had begun, since its client may have received
        output, and for one that may be the cause."""
        return not self.has_started and not await self._implicated


class _RetryingSubmission:
    """Implements `Submission`: submits a job to one runner after the other until it begins. stack:
    exited when the job's context is."""

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
        """When the job's place was free again; None while the job may be resubmitted."""
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
        """Submits the job to a runner other than `lost_runner`. Raises as `Runner.submit` does, and
        the error that prevents the model from being reloaded."""
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
