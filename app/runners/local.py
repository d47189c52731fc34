"""A runner whose engine is a thread of this process.

Knows: the engine thread, asyncio. Must not know: HTTP, text. Commands go down through the thread's
queue; messages come up by one `call_soon_threadsafe` per step and are dealt to a queue per job.
Everything here runs on the event loop, so nothing needs a lock.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.jobs import Ended, EngineStats, Job, Step, Update
from app.core.ports import RunnerState, RunnerStatus
from app.core.settings import Settings
from app.engine.load import load
from app.engine.thread import EngineThread, Failed, Loading, Message, Ready

log = logging.getLogger(__name__)

# seconds that a stopping engine may take to reach the end of its step
_STOP_PATIENCE = 30.0


class LocalSubmission:
    """The updates of one job, as they come in."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ended = False
        self.kept: int | None = None
        self._updates: asyncio.Queue[Update] = asyncio.Queue()

    def put(self, update: Update) -> None:
        self.ended = self.ended or isinstance(update, Ended)
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

    state: RunnerState
    progress: int
    stats: EngineStats
    error: str | None = None


class LocalRunner:
    """settings: those that the engine reads (cache, exact, prefill_chunk)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known = _Known(state="loading", progress=0, stats=EngineStats())
        self._submissions: dict[str, LocalSubmission] = {}
        self._thread: EngineThread | None = None
        self._ready: asyncio.Future[None] | None = None

    async def start(self, files: ModelFiles) -> None:
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()

        def post(message: Message) -> None:
            # the loop may be gone already when a stopping engine has its last word
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._receive, message)

        self._thread = EngineThread(lambda report: load(files, self._settings, report), post)
        self._thread.start()
        await self._ready

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[LocalSubmission]:
        if self._known.state == "loading":
            raise AppError(
                Kind.LOADING, f"the model is still loading ({self._known.progress} %), try again"
            )
        if self._known.state == "failed" or self._thread is None:
            raise AppError(Kind.ENGINE, f"the engine is not running: {self._known.error}")
        submission = self._submissions[job.id] = LocalSubmission(job)
        self._thread.submit(job)
        try:
            yield submission
        finally:
            del self._submissions[job.id]
            if not submission.ended:
                self._thread.cancel(job.id, keep=submission.kept)

    def status(self) -> RunnerStatus:
        known = self._known
        return RunnerStatus(
            state=known.state, progress=known.progress, stats=known.stats, error=known.error
        )

    async def stop(self) -> None:
        if self._thread is None:
            return
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, _STOP_PATIENCE):
            log.error("the engine did not stop within %.0f s", _STOP_PATIENCE)

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
                    state="ready", progress=100, stats=EngineStats(memory=message.memory)
                )
                self._resolve(None)
            case Step():
                self._known = _Known(state="ready", progress=100, stats=message.stats)
                for update in message.updates:
                    self._deal(update)
            case Failed():
                self._fail(message.error)

    def _deal(self, update: Update) -> None:
        # a job whose client left is not here any more
        if submission := self._submissions.get(update.job):
            submission.put(update)

    def _fail(self, error: Exception) -> None:
        self._known = _Known(state="failed", progress=0, stats=self._known.stats, error=str(error))
        for job, submission in self._submissions.items():
            submission.put(
                Ended(job=job, reason="error", at=time.monotonic_ns(), error="the engine stopped")
            )
        self._resolve(error)

    def _resolve(self, error: Exception | None) -> None:
        assert self._ready is not None
        if self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)
