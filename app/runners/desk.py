"""What every runner does with jobs, wherever its engine lives: submit them, hand out what the
engine says of them, and end them all when there is no engine any more.

Knows: jobs, messages, asyncio. Must not know: threads, processes, how commands travel, how many
jobs there may be (app/runners/admission.py). Everything here runs on the event loop, so nothing
needs a lock.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, assert_never

from app.core.embeddings import Embedded, EmbedJob
from app.core.errors import AppError, Kind
from app.core.jobs import Capacity, Ended, EngineStats, Job, Started, Step, Update
from app.core.messages import Failed, Loading, Message, Ready
from app.core.ports import LossCause, RunnerLoss, RunnerState, RunnerStatus

# seconds in which it is found out why an engine cannot be reached
_LAST_WORD = 5.0

# what those are told whose jobs end because the runner was told to
STOPPED = "the model is being unloaded"


class Engine(Protocol):
    """Whoever carries out what the desk let in. It answers through `Desk.receive`, and
    `Desk.hand_over` for inputs that were embedded."""

    async def submit(self, job: Job) -> None:
        """Returns when the job is the engine's. Raises AppError if it cannot be."""
        ...

    def embed(self, job: EmbedJob) -> None: ...

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        """Also of a job that the engine does not have, or is only being given."""
        ...


class Waiting:
    """The updates of one job, as they come in. started: when it left the queue; ended: when its
    place was free again; monotonic ns."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.started: int | None = None
        self.ended: int | None = None
        self.kept: int | None = None
        self._updates: asyncio.Queue[Update] = asyncio.Queue()

    def put(self, update: Update) -> None:
        if isinstance(update, Started):
            self.started = update.at
        if isinstance(update, Ended):
            self.ended = update.at
        self._updates.put_nowait(update)

    def keep(self, tokens: int) -> None:
        self.kept = tokens

    async def __aiter__(self) -> AsyncIterator[Update]:
        while True:
            update = await self._updates.get()
            yield update
            if isinstance(update, Ended):
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The last that the engine said of itself."""

    state: RunnerState = "loading"
    progress: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    error: str | None = None
    capacity: Capacity | None = None


class Desk:
    """engine: to be set before the desk hears that it is ready."""

    engine: Engine

    def __init__(self) -> None:
        self._known = _Known()
        self._failure: AppError | None = None
        self._waiting: dict[str, Waiting] = {}
        self._embedding: dict[str, asyncio.Future[Embedded]] = {}
        self._compiling = 0
        self._loss: RunnerLoss | None = None
        self._settled = asyncio.Event()  # the model is there, or never will be
        self._closed = asyncio.Event()
        self._lost = asyncio.Event()
        self._told = "the engine cannot be reached"

    def status(self) -> RunnerStatus:
        known = self._known
        return RunnerStatus(
            state=known.state,
            progress=known.progress,
            stats=known.stats,
            error=known.error,
            capacity=known.capacity,
            compiling=self._compiling,
        )

    async def ready(self) -> None:
        """Returns when the model is. Raises the AppError that it ended with."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    async def lost(self) -> RunnerLoss:
        """`Runner.lost`."""
        await self._lost.wait()
        assert self._loss is not None
        return self._loss

    async def why(self) -> AppError:
        """For those who find the engine gone: why it is, as soon as that is known."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), _LAST_WORD)
        return AppError(Kind.ENGINE, self._told)

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[Waiting]:
        """`Runner.submit`."""
        self._check_ready()
        waiting = self._waiting[job.id] = Waiting(job)
        try:
            with self._compilation(job):
                try:
                    await self.engine.submit(job)
                except AppError:
                    waiting.ended = time.monotonic_ns()  # it never was the engine's
                    raise
            yield waiting
        finally:
            del self._waiting[job.id]
            if waiting.ended is None:
                self.engine.cancel(job.id, keep=waiting.kept)

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """`Runner.embed`."""
        self._check_ready()
        over = self._embedding[job.id] = asyncio.get_running_loop().create_future()
        try:
            self.engine.embed(job)
            embedded = await over
        except asyncio.CancelledError:
            if over.cancelled():  # else it had its answer, and there may be no engine any more
                self.engine.cancel(job.id)
            raise
        finally:
            del self._embedding[job.id]
        if embedded.error is not None:
            raise AppError(Kind.ENGINE, embedded.error)
        return embedded.vectors

    def receive(self, message: Message) -> None:
        if self._failure is not None:
            return  # a last word, when all has been told already
        match message:
            case Loading():
                stats = EngineStats(memory=message.memory)
                self._known = _Known(progress=message.progress, stats=stats)
            case Ready():
                self._known = _Known(
                    state="ready", progress=100, stats=message.stats, capacity=message.capacity
                )
                self._settled.set()
            case Step():
                self._known = replace(self._known, stats=message.stats)
                for update in message.updates:
                    # a job whose client left is not here any more
                    if waiting := self._waiting.get(update.job):
                        waiting.put(update)
                for embedded in message.embedded:
                    self.hand_over(embedded)
            case Failed():
                self.lose(self._blamed(message))
            case _:
                assert_never(message)

    def hand_over(self, embedded: Embedded) -> None:
        over = self._embedding.get(embedded.job)
        if over is not None and not over.done():
            over.set_result(embedded)

    def lose(self, error: AppError, *, told: str | None = None, cause: LossCause = "fault") -> None:
        """There is no engine any more, though nothing stopped it. told: the error of the jobs that
        end, if not this one. cause: see `RunnerLoss`. Only the first reason is kept."""
        if self._failure is not None:
            return
        was_ready = self._known.state == "ready"
        self._end(error, told=told or f"the engine stopped: {error.message}", lost=was_ready)
        if was_ready:
            self._loss = RunnerLoss(message=error.message, cause=cause)
            self._lost.set()

    def close(self, error: AppError, *, told: str) -> None:
        """The engine was stopped. Only the first reason is kept."""
        if self._failure is None:
            self._end(error, told=told, lost=False)

    def _end(self, error: AppError, *, told: str, lost: bool) -> None:
        self._failure, self._told = error, told
        self._known = replace(self._known, state="failed", progress=0, error=error.message)
        at = time.monotonic_ns()
        for job, waiting in self._waiting.items():
            if waiting.ended is None:
                waiting.put(Ended(job=job, reason="error", at=at, error=told, lost=lost))
        for job in self._embedding:
            self.hand_over(Embedded(job=job, error=told))
        self._settled.set()
        self._closed.set()

    def _blamed(self, failed: Failed) -> AppError:
        """A fault of ours that shows itself at one model's load is in the way of that model."""
        if failed.ours and self._known.state == "loading":
            message = f"the model could not be loaded: {failed.message}"
            return AppError(Kind.MODEL_FILES, message)
        return AppError(failed.kind, failed.message)

    @contextmanager
    def _compilation(self, job: Job) -> Generator[None]:
        """Counts a job whose grammar is being compiled."""
        counted = job.grammar is not None
        self._compiling += counted
        try:
            yield
        finally:
            self._compiling -= counted

    def _check_ready(self) -> None:
        """Raises AppError(LOADING or ENGINE)."""
        known = self._known
        if known.state == "loading":
            message = f"the model is still loading ({known.progress} %), try again"
            raise AppError(Kind.LOADING, message)
        if known.state == "failed":
            raise AppError(Kind.ENGINE, f"the engine is not running: {known.error}")
