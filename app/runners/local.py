"""A runner whose engine is a thread of this process.

Knows: the engine thread, asyncio. Must not know: HTTP, text. Commands go down through the thread's
queue; messages come up by one `call_soon_threadsafe` per step and are dealt to a queue per job.
Everything here runs on the event loop, so nothing needs a lock.

Jobs wait in the engine's queue, which has no bound of its own: the bound is kept here, where one
more can still be refused.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from app.core.embeddings import Embedded, EmbedJob
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.jobs import Capacity, Ended, EngineStats, Job, Started, Step, Update
from app.core.ports import RunnerState, RunnerStatus
from app.core.settings import Settings
from app.engine.grammar import Grammars, Matcher
from app.engine.load import load
from app.engine.thread import IDLE, EngineThread, Failed, Loading, Message, Ready

log = logging.getLogger(__name__)

# seconds that a stopping engine may take to reach the end of its step
_STOP_PATIENCE = 30.0

# looks at the heartbeat per `Settings.watchdog`
_LOOKS = 4

# seconds that a refused client is told to wait, at most; SDKs ignore what is far above
_LONGEST_WAIT = 60


class LocalSubmission:
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

    state: RunnerState
    progress: int
    stats: EngineStats
    error: str | None = None
    capacity: Capacity | None = None


class LocalRunner:
    """settings: those that the engine reads, max_queue and watchdog."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known = _Known(state="loading", progress=0, stats=EngineStats())
        self._submissions: dict[str, LocalSubmission] = {}
        self._embedding: dict[str, asyncio.Future[Embedded]] = {}
        self._pace = Pace()
        self._rejected = 0
        self._grammars: Grammars | None = None
        self._thread: EngineThread | None = None
        self._ready: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._broke = asyncio.Event()

    async def start(self, files: ModelFiles) -> None:
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()

        def post(message: Message) -> None:
            # the loop may be gone already when a stopping engine has its last word
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._receive, message)

        self._grammars = Grammars(files.tokenizer, vocab=files.tokens or files.vocab_size)
        self._thread = EngineThread(
            lambda report: load(files, self._settings, report), post, checks=self._settings.debug
        )
        self._thread.start()
        self._watch = asyncio.create_task(self._keep_watch())
        await self._ready

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[LocalSubmission]:
        thread = self._admit()
        submission = self._submissions[job.id] = LocalSubmission(job)
        try:
            thread.submit(job, await self._compiled(job))
            yield submission
        finally:
            del self._submissions[job.id]
            if submission.ended is None:
                thread.cancel(job.id, keep=submission.kept)
            if submission.started is not None:
                ended = submission.ended or time.monotonic_ns()
                self._pace.note((ended - submission.started) / 1e9)

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        thread = self._admit()
        over = self._embedding[job.id] = asyncio.get_running_loop().create_future()
        try:
            thread.embed(job)
            embedded = await over
        except asyncio.CancelledError:
            thread.cancel(job.id)
            raise
        finally:
            del self._embedding[job.id]
        if embedded.error is not None:
            raise AppError(Kind.ENGINE, embedded.error)
        return embedded.vectors

    def status(self) -> RunnerStatus:
        known = self._known
        stall = self._stall()
        return RunnerStatus(
            state=known.state if stall is None else "stalled",
            progress=known.progress,
            stats=known.stats,
            error=known.error if stall is None else stall,
            capacity=known.capacity,
            rejected=self._rejected,
        )

    async def over(self) -> str:
        await self._broke.wait()
        assert self._known.error is not None
        return self._known.error

    async def stop(self) -> None:
        self._end_jobs("the server is stopping")
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._thread is None:
            return
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, _STOP_PATIENCE):
            log.error("the engine did not stop within %.0f s", _STOP_PATIENCE)

    def _admit(self) -> EngineThread:
        """Whoever will run one more job. Raises AppError(LOADING, ENGINE or BUSY)."""
        known = self._known
        if known.state == "loading":
            message = f"the model is still loading ({known.progress} %), try again"
            raise AppError(Kind.LOADING, message)
        if known.state == "failed" or self._thread is None:
            raise AppError(Kind.ENGINE, f"the engine is not running: {known.error}")
        assert known.capacity is not None
        parallel, most = known.capacity.parallel, self._settings.max_queue
        # what was submitted, not what the engine last counted: that is a step old
        here = sum(submission.ended is None for submission in self._submissions.values())
        here += len(self._embedding)
        if here >= parallel + most:
            self._rejected += 1
            seconds = self._pace.wait(waiting=max(1, here - parallel), parallel=parallel)
            raise AppError(
                Kind.BUSY,
                f"the server is busy: {here} requests are here, as many as may run ({parallel}) "
                f"and wait ({most}); try again in about {seconds} s",
                retry_after=seconds,
            )
        return self._thread

    async def _compiled(self, job: Job) -> Matcher | None:
        """Its grammar, not on the event loop nor the engine's thread: others' answers go on."""
        if job.grammar is None:
            return None
        assert self._grammars is not None
        return await asyncio.to_thread(self._grammars.compile, job.grammar, job.stop_ids)

    def _stall(self) -> str | None:
        """A sentence when a loaded engine has been at one thing for too long."""
        if self._known.state != "ready" or self._thread is None:
            return None
        since, doing = self._thread.heartbeat()
        seconds = (time.monotonic_ns() - since) / 1e9
        if doing == IDLE or seconds < self._settings.watchdog:
            return None
        return f"the engine has not moved for {seconds:.0f} s ({doing})"

    async def _keep_watch(self) -> None:
        """Tell the log when the engine hangs, and when it goes on, also if nobody asks."""
        hung = False
        while True:
            await asyncio.sleep(self._settings.watchdog / _LOOKS)
            stall = self._stall()
            if stall is not None and not hung:
                log.error("%s", stall)
            if stall is None and hung:
                log.warning("the engine moves again")
            hung = stall is not None

    def _receive(self, message: Message) -> None:
        match message:
            case Loading():
                self._known = _Known(
                    state="loading",
                    progress=message.progress,
                    stats=EngineStats(memory=message.memory),
                )
            case Ready():
                self._known = _Known(
                    state="ready",
                    progress=100,
                    stats=message.stats,
                    capacity=message.capacity,
                )
                self._resolve(None)
            case Step():
                self._known = replace(self._known, stats=message.stats)
                for update in message.updates:
                    self._deal(update)
                for embedded in message.embedded:
                    self._hand_over(embedded)
            case Failed():
                self._fail(message.error)

    def _deal(self, update: Update) -> None:
        # a job whose client left is not here any more
        if submission := self._submissions.get(update.job):
            submission.put(update)

    def _hand_over(self, embedded: Embedded) -> None:
        over = self._embedding.get(embedded.job)
        if over is not None and not over.done():
            over.set_result(embedded)

    def _fail(self, error: Exception) -> None:
        was_ready = self._known.state == "ready"
        self._known = replace(self._known, state="failed", progress=0, error=str(error))
        self._end_jobs("the engine stopped")
        if was_ready:
            self._broke.set()
        self._resolve(error)

    def _end_jobs(self, why: str) -> None:
        for job, submission in self._submissions.items():
            if submission.ended is None:
                at = time.monotonic_ns()
                submission.put(Ended(job=job, reason="error", at=at, error=why))
        for job in self._embedding:
            self._hand_over(Embedded(job=job, error=why))

    def _resolve(self, error: Exception | None) -> None:
        assert self._ready is not None
        if self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)
