"""What every runner does with jobs, wherever its engine lives: let them in or refuse them, deal
what the engine says of them, and end them all when there is no engine any more.

Knows: jobs, messages, asyncio. Must not know: threads, processes, how commands travel. Everything
here runs on the event loop, so nothing needs a lock.

Jobs wait in the engine's queue, which has no bound of its own: the bound is kept here, where one
more can still be refused.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, assert_never

from app.core.embeddings import Embedded, EmbedJob
from app.core.errors import AppError, Kind
from app.core.jobs import Capacity, Ended, EngineStats, Job, Started, Step, Update
from app.core.messages import Failed, Loading, Message, Ready
from app.core.ports import RunnerState, RunnerStatus

# seconds that a refused client is told to wait, at most; SDKs ignore what is far above
_LONGEST_WAIT = 60

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


class Pace:
    """How long a job holds its place in the engine: an exponential mean, in which a job counts for
    an eighth of what all before it count (TCP's smoothed round-trip time, RFC 6298, does the same).
    """

    def __init__(self) -> None:
        self._mean: float | None = None

    def note(self, seconds: float) -> None:
        self._mean = seconds if self._mean is None else self._mean + (seconds - self._mean) / 8

    def wait(self, *, waiting: int, parallel: int) -> int:
        """Whole seconds, 1 to 60, until those who wait now will have been taken: `parallel` of
        them in the time that one job takes."""
        seconds = (self._mean or 0.0) * waiting / parallel
        return max(1, min(math.ceil(seconds), _LONGEST_WAIT))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The last that the engine said of itself."""

    state: RunnerState = "loading"
    progress: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    error: str | None = None
    capacity: Capacity | None = None


class Desk:
    """max_queue: jobs that may wait for one of the engine's places; one more is refused. engine:
    to be set before the desk hears that it is ready."""

    engine: Engine

    def __init__(self, *, max_queue: int) -> None:
        self._max_queue = max_queue
        self._known = _Known()
        self._failure: AppError | None = None
        self._waiting: dict[str, Waiting] = {}
        self._embedding: dict[str, asyncio.Future[Embedded]] = {}
        self._pace = Pace()
        self._rejected = 0
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
            rejected=self._rejected,
        )

    async def ready(self) -> None:
        """Returns when the model is. Raises the AppError that it ended with."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    async def over(self) -> str:
        """`Runner.over`."""
        await self._lost.wait()
        assert self._known.error is not None
        return self._known.error

    async def why(self) -> AppError:
        """For those who find the engine gone: why it is, as soon as that is known."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), _LAST_WORD)
        return AppError(Kind.ENGINE, self._told)

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[Waiting]:
        """`Runner.submit`."""
        self._admit()
        waiting = self._waiting[job.id] = Waiting(job)
        try:
            await self.engine.submit(job)
            yield waiting
        finally:
            del self._waiting[job.id]
            if waiting.ended is None:
                self.engine.cancel(job.id, keep=waiting.kept)
            if waiting.started is not None:
                ended = waiting.ended or time.monotonic_ns()
                self._pace.note((ended - waiting.started) / 1e9)

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """`Runner.embed`."""
        self._admit()
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

    def lose(self, error: AppError, *, told: str | None = None) -> None:
        """There is no engine any more, though nobody stopped it. told: to those whose jobs end, if
        not the error."""
        was_ready = self._known.state == "ready"
        self.close(error, told=told or f"the engine stopped: {error.message}")
        if was_ready:
            self._lost.set()

    def close(self, error: AppError, *, told: str) -> None:
        """Nobody will be served any more. Only the first reason is kept."""
        if self._failure is not None:
            return
        self._failure, self._told = error, told
        self._known = replace(self._known, state="failed", progress=0, error=error.message)
        at = time.monotonic_ns()
        for job, waiting in self._waiting.items():
            if waiting.ended is None:
                waiting.put(Ended(job=job, reason="error", at=at, error=told))
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

    def _admit(self) -> None:
        """Raises AppError(LOADING, ENGINE or BUSY) when one more job cannot be run."""
        known = self._known
        if known.state == "loading":
            message = f"the model is still loading ({known.progress} %), try again"
            raise AppError(Kind.LOADING, message)
        if known.state == "failed":
            raise AppError(Kind.ENGINE, f"the engine is not running: {known.error}")
        assert known.capacity is not None
        parallel = known.capacity.parallel
        # what was submitted, not what the engine last counted: that is a step old
        here = sum(waiting.ended is None for waiting in self._waiting.values())
        here += len(self._embedding)
        if here < parallel + self._max_queue:
            return
        self._rejected += 1
        seconds = self._pace.wait(waiting=max(1, here - parallel), parallel=parallel)
        raise AppError(
            Kind.BUSY,
            f"the server is busy: {here} requests are here, as many as may run ({parallel}) "
            f"and wait ({self._max_queue}); try again in about {seconds} s",
            retry_after=seconds,
        )
