"""Jobs on their way to a model's runner: submitted again where the runner died before they began,
tried alone where they ran when one died.

Knows: which jobs are at the runner, which ones are suspects (`app.runners.quarantine`). Must not
know: why there is a runner or none.

Jobs that run one at a time, whatever else runs beside them.

Prompts that stood by when a runner died.

A job that was running when a runner died is a suspect, and so is everybody who ran beside it. What
is asked of whoever runs them (`app.runners.handle`) is that suspects run one at a time: then
an innocent one comes to a good end, which clears it, and is not there when the killer kills again.
Others may run beside a suspect; they would be suspects, for the first time, after it.

A death by a signal of an operator weighs nothing. The kernel sends the same SIGKILL when memory
runs out; where it does not say which of the two it was, a death weighs less than a fault.
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

# seconds after which the next one's turn comes, though the one before is still at it: most of what
# a prompt can break is broken by then, and a long answer must not keep others waiting for minutes
_MAX_TURN = 30.0

SubmitJob = Callable[[Job], AbstractAsyncContextManager[Submission]]


class SerialTurns:
    """Turns. max_waiting: who may wait for one."""

    def __init__(self, max_waiting: int, max_turn: float = _MAX_TURN) -> None:
        self._max_waiting = max_waiting
        self._max_turn = max_turn
        self._waiting = 0
        self._free = asyncio.Semaphore(1)

    @asynccontextmanager
    async def take_turn(self) -> AsyncGenerator[None]:
        """Raises AppError(BUSY) when too many wait."""
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
    """A job that waits for its turn. It is read by a task of its own, so that the turn ends with
    the job and not with a client that is slow to read. What `submit` raises is raised where it is
    iterated: nobody may be kept from entering, since a request enters all of its jobs before it
    reads the first, and would wait for itself.

    on_success: told of a job that came to its end."""

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
        # nothing is seen of a job before it is submitted
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


# What a death weighs by its cause, and from which weight on a job is not run any more: two faults,
# or six deaths of which it is not known whether memory ran out.
CRASH_WEIGHTS: Mapping[FailureCause, int] = {"fault": 3, "unknown": 1, "outside": 0}
REFUSE_WEIGHT = 6

_MAX_RECORDS, _RECORD_TTL = 1000, 3600.0

AnyJob = Job | EmbedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashRecord:
    """crashes: how many a job ran at, and what they weigh together. last_crash: when the last one
    was."""

    crashes: int = 0
    weight: int = 0
    last_crash: float = 0.0


class CrashRecords:
    """Of one model. max_records: how many are remembered, the latest ones. ttl: seconds."""

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
        """At which deaths it ran, as far as that is remembered."""
        self._drop_expired()
        # a long prompt takes a millisecond to hash: not where there is nothing to compare it with
        known = self._records.get(_key(job)) if self._records else None
        return known or CrashRecord()

    def add_crash(self, jobs: Iterable[AnyJob], *, weight: int) -> None:
        """A runner died while these ran; answers of one prompt beside each other are one."""
        self._drop_expired()
        for key in {_key(job) for job in jobs}:
            before = self._records.pop(key, CrashRecord())
            self._records[key] = CrashRecord(
                crashes=before.crashes + 1, weight=before.weight + weight, last_crash=self._clock()
            )
        while len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def clear(self, job: AnyJob) -> None:
        """It came to a good end."""
        self._records.pop(_key(job), None)

    def clear_all(self) -> None:
        self._records.clear()

    def _drop_expired(self) -> None:
        """The oldest ones stand first, since each accusation puts its job last."""
        oldest = self._clock() - self._ttl
        while self._records and next(iter(self._records.values())).last_crash < oldest:
            self._records.popitem(last=False)


def _key(job: AnyJob) -> bytes:
    """What a runner is asked to evaluate, not how its answer is drawn."""
    if isinstance(job, EmbedJob):
        parts, rest = job.inputs, f"embed {job.pooling}"
    else:
        parts, rest = (job.prompt_token_ids,), repr(job.grammar)
    digest = hashlib.blake2b(rest.encode(errors="surrogatepass"), digest_size=16)
    for ids in parts:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(array("q", ids).tobytes())
    return digest.digest()


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
