"""Submits jobs to a runner's engine, delivers their updates, and fails the jobs if the engine
fails.

Knows: jobs, messages, asyncio. Must not know: threads, processes, the transport of commands, the
queue limit (app/runners/admission.py). All code runs on the event loop, so no lock is needed.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, assert_never

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.core.jobs import (
    CallResult,
    Capacity,
    Ended,
    EngineCall,
    EngineFailed,
    EngineMessage,
    EngineReady,
    EngineStats,
    Job,
    JobUpdate,
    LoadProgress,
    Started,
    StepOutput,
)
from app.core.ports import FailureCause, RunnerFailure, RunnerState, RunnerStatus
from app.core.requests import EmbedJob, EmbedResult

# How long to wait for the reason why an engine is unreachable, in seconds.
_FAILURE_TIMEOUT = 5.0

# The maximum number of updates in a batch. Encoding this many tokens takes about a millisecond.
_MAX_BATCH = 64

# The maximum number of stored IDs of jobs that the engine has not received. It receives them within
# milliseconds, unless it hangs.
_MAX_UNRECEIVED = 1024

# The error of jobs that end because the runner is stopped.
UNLOADING_MESSAGE = "the model is being unloaded"


class EngineClient(Protocol):
    """Sends commands to an engine. The engine's messages are passed to `Dispatcher.receive`,
    the IDs of the jobs that it has read to `Dispatcher.mark_received`, and embeddings to
    `Dispatcher.finish_embedding`."""

    async def submit(self, job: Job) -> None:
        """Submits a job, and returns when the engine has accepted it. Raises AppError if the job is
        rejected."""
        ...

    def embed(self, job: EmbedJob) -> None:
        """Submits a job. Raises AppError if it is too large."""
        ...

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        """Cancels a job. The engine may not know the job, or the submission may still be in
        progress. `keep` is the number of sampled tokens to cache; None caches all of them."""
        ...

    def provide_images(self, job: str, images: Sequence[ImagePixels]) -> None:
        """Sends pixels for a job, which the engine may no longer know. Raises
        AppError(TOO_LARGE)."""
        ...

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        """Implements `Runner.call` for a ready engine. May wait forever if the engine ends."""
        ...


class RequestStream:
    """The updates of one job as they arrive, in batches. A batch contains the updates that arrived
    while the reader was busy.

    started_ns: the monotonic time in ns at which the job left the queue.
    ended_ns: the monotonic time in ns at which the slot of the job became free.
    """

    def __init__(self, job: Job, engine: EngineClient) -> None:
        self.job = job
        self._engine = engine
        self.started_ns: int | None = None
        self.ended_ns: int | None = None
        self.keep_tokens: int | None = None
        self._updates: list[JobUpdate] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, update: JobUpdate) -> None:
        if isinstance(update, Started):
            self.started_ns = update.timestamp_ns
        if isinstance(update, Ended):
            self.ended_ns = update.timestamp_ns
        self._updates.append(update)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def limit_cached_tokens(self, tokens: int) -> None:
        self.keep_tokens = tokens

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        if self.ended_ns is None:
            self._engine.provide_images(self.job.id, images)

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        loop = asyncio.get_running_loop()
        while True:
            if not self._updates:
                self._waiter = loop.create_future()
                await self._waiter
            batch = self._updates[:_MAX_BATCH]
            del self._updates[:_MAX_BATCH]
            yield batch
            if isinstance(batch[-1], Ended):
                return
            if self._updates:  # let other tasks run between two batches
                await asyncio.sleep(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineState:
    """The last known state of the engine."""

    state: RunnerState = "loading"
    progress: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    error: str | None = None
    capacity: Capacity | None = None


class Dispatcher:
    """Manages the jobs of one runner. Set the attribute `engine` before `EngineReady` is
    received."""

    engine: EngineClient

    def __init__(self) -> None:
        self._engine_state = _EngineState()
        self._failure: AppError | None = None
        self._streams: dict[str, RequestStream] = {}
        self._embedding: dict[str, asyncio.Future[EmbedResult]] = {}
        self._unreceived: OrderedDict[str, None] = OrderedDict()
        self._compiling = 0
        self._loss: RunnerFailure | None = None
        self._load_finished = asyncio.Event()  # set when the load has succeeded or failed
        self._ended = asyncio.Event()
        self._lost = asyncio.Event()
        self._job_error = "the engine cannot be reached"

    def status(self) -> RunnerStatus:
        known = self._engine_state
        return RunnerStatus(
            state=known.state,
            progress=known.progress,
            stats=known.stats,
            error=known.error,
            capacity=known.capacity,
            compiling=self._compiling,
        )

    async def wait_until_ready(self) -> None:
        """Returns when the model is ready. Raises the engine's AppError if the load fails."""
        await self._load_finished.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_for_failure(self) -> RunnerFailure:
        """Implements `Runner.wait_for_failure`."""
        await self._lost.wait()
        assert self._loss is not None
        return self._loss

    async def get_failure(self) -> AppError:
        """Returns the error for jobs when the engine is unreachable. Waits up to `_FAILURE_TIMEOUT`
        for the cause."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _FAILURE_TIMEOUT)
        return AppError(ErrorKind.ENGINE, self._job_error)

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[RequestStream]:
        """Implements `Runner.submit`."""
        self._check_ready()
        waiting = self._streams[job.id] = RequestStream(job, self.engine)
        self._mark_submitted(job.id)
        try:
            with self._count_compiling(job):
                try:
                    await self.engine.submit(job)
                    self.mark_received(job.id)
                except AppError:
                    waiting.ended_ns = time.monotonic_ns()  # the engine never received the job
                    raise
            yield waiting
        finally:
            del self._streams[job.id]
            if waiting.ended_ns is None:
                self.engine.cancel(job.id, keep=waiting.keep_tokens)

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """Implements `Runner.embed`."""
        self._check_ready()
        over = self._embedding[job.id] = asyncio.get_running_loop().create_future()
        self._mark_submitted(job.id)
        try:
            self.engine.embed(job)
            embedded = await over
        except asyncio.CancelledError:
            if over.cancelled():  # otherwise, there is a result or the engine has exited
                self.engine.cancel(job.id)
            raise
        finally:
            del self._embedding[job.id]
        if embedded.error is not None:
            raise AppError(ErrorKind.ENGINE, embedded.error)
        return embedded.vectors

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        """Implements `Runner.call`."""
        self._check_ready()
        reply = asyncio.create_task(self.engine.call(call))
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({reply, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise await self.get_failure()
            return reply.result()
        finally:
            reply.cancel()
            ended.cancel()

    def receive(self, message: EngineMessage) -> None:
        if self._failure is not None:
            return  # the failure has already been reported
        match message:
            case LoadProgress():
                stats = EngineStats(allocated_bytes=message.allocated_bytes)
                self._engine_state = _EngineState(progress=message.progress, stats=stats)
            case EngineReady():
                self._engine_state = _EngineState(
                    state="ready", progress=100, stats=message.stats, capacity=message.capacity
                )
                self._load_finished.set()
            case StepOutput():
                self._engine_state = replace(self._engine_state, stats=message.stats)
                for update in message.updates:
                    # If the client has disconnected, the job was already removed.
                    if waiting := self._streams.get(update.job_id):
                        waiting.put(update)
                for embedded in message.embed_results:
                    self.finish_embedding(embedded)
            case EngineFailed():
                self.fail(self._to_app_error(message))
            case _:
                assert_never(message)

    def mark_received(self, job: str) -> None:
        """Records that the engine has read a job, which may be the cause of a failure from now
        on."""
        self._unreceived.pop(job, None)

    def _mark_submitted(self, job: str) -> None:
        self._unreceived[job] = None
        if len(self._unreceived) > _MAX_UNRECEIVED:
            self._unreceived.popitem(last=False)

    def finish_embedding(self, embedded: EmbedResult) -> None:
        over = self._embedding.get(embedded.job_id)
        if over is not None and not over.done():
            over.set_result(embedded)

    def fail(
        self,
        error: AppError,
        *,
        job_error: str | None = None,
        cause: FailureCause = "fault",
        stuck_since_ns: int | None = None,
    ) -> None:
        """Fails all jobs, because the engine exited unexpectedly. Only the first call has an
        effect.

        job_error: the error of the jobs; None derives it from `error`.
        cause, stuck_since_ns: see `RunnerFailure`.
        """
        if self._failure is not None:
            return
        was_ready = self._engine_state.state == "ready"
        self._end_jobs(
            error, job_error=job_error or f"the engine stopped: {error.message}", lost=was_ready
        )
        if was_ready:
            self._loss = RunnerFailure(
                message=error.message,
                cause=cause,
                not_received=frozenset(self._unreceived),
                stuck_since_ns=stuck_since_ns,
            )
            self._lost.set()

    def close(self, error: AppError, *, job_error: str) -> None:
        """Ends all jobs with the error `job_error`, because the engine was stopped. Only the first
        call has an effect."""
        if self._failure is None:
            self._end_jobs(error, job_error=job_error, lost=False)

    def _end_jobs(self, error: AppError, *, job_error: str, lost: bool) -> None:
        self._failure, self._job_error = error, job_error
        self._engine_state = replace(
            self._engine_state, state="failed", progress=0, error=error.message
        )
        at = time.monotonic_ns()
        for job, waiting in self._streams.items():
            if waiting.ended_ns is None:
                waiting.put(
                    Ended(
                        job_id=job,
                        reason="error",
                        timestamp_ns=at,
                        error=job_error,
                        engine_lost=lost,
                    )
                )
        for job in self._embedding:
            self.finish_embedding(EmbedResult(job_id=job, error=job_error))
        self._load_finished.set()
        self._ended.set()

    def _to_app_error(self, failed: EngineFailed) -> AppError:
        """Converts the failure to an AppError. An internal error during a load is reported as an
        error of the model's files."""
        if failed.is_internal_error and self._engine_state.state == "loading":
            message = f"the model could not be loaded: {failed.message}"
            return AppError(ErrorKind.MODEL_FILES, message)
        return AppError(failed.kind, failed.message)

    @contextmanager
    def _count_compiling(self, job: Job) -> Generator[None]:
        """Counts the job as compiling if it has a grammar."""
        counted = job.grammar is not None
        self._compiling += counted
        try:
            yield
        finally:
            self._compiling -= counted

    def _check_ready(self) -> None:
        """Raises AppError(LOADING) or AppError(ENGINE) if the engine is not ready."""
        known = self._engine_state
        if known.state == "loading":
            message = f"the model is still loading ({known.progress} %): try again"
            raise AppError(ErrorKind.LOADING, message)
        if known.state == "failed":
            raise AppError(ErrorKind.ENGINE, f"the engine is not running: {known.error}")
