"""A runner whose engine is a thread of this process.

Knows: the engine thread, asyncio. Must not know: HTTP, text. Commands go down through the thread's
queue; messages come up by one `call_soon_threadsafe` per step, to the desk. A thread cannot be
killed, so one that hangs is only reported.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.jobs import Job
from app.core.messages import IDLE, Message
from app.core.ports import RunnerLoss, RunnerStatus
from app.core.requests import Grammar
from app.core.settings import Settings
from app.engine.grammar import Grammars, Matcher
from app.engine.load import load
from app.engine.thread import EngineThread
from app.runners.desk import STOPPED, Desk, Waiting
from app.runners.ranks.crew import Crew
from app.runners.ranks.lead import leading

log = logging.getLogger(__name__)

# seconds that a stopping engine may take to reach the end of its step
_STOP_PATIENCE = 30.0

# the same where it may wait for another rank, which is gone
_HOPELESS = 1.0

_MakeMatcher = Callable[[Grammar, frozenset[int], str], Awaitable[Matcher]]

# looks at the heartbeat per `Settings.watchdog`
_LOOKS = 4


class LocalRunner:
    """settings: those that the engine reads, and watchdog. crew: the other ranks, where
    several run the model together; with it, one runner can be started once."""

    def __init__(self, settings: Settings, crew: Crew | None = None) -> None:
        self._settings = settings
        self._crew = crew
        self._desk = Desk()
        self._thread: EngineThread | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, files: ModelFiles) -> None:
        loop = asyncio.get_running_loop()

        def post(message: Message) -> None:
            # the loop may be gone already when a stopping engine has its last word
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._desk.receive, message)

        def lost(why: str) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._lose, why)

        grammars = Grammars.of(files)
        read, matcher = partial(load, files, self._settings), grammars.matcher
        if self._crew is not None:
            self._crew.engage(lost)
            read = partial(leading, files, self._settings, self._crew)
            matcher = _on_all_ranks(self._crew, grammars)
        self._thread = EngineThread(read, post, checks=self._settings.debug)
        self._desk.engine = _Threaded(self._thread, matcher)
        self._thread.start()
        grammars.start()
        self._watch = asyncio.create_task(self._keep_watch())
        await self._desk.ready()

    def submit(self, job: Job) -> AbstractAsyncContextManager[Waiting]:
        return self._desk.submit(job)

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        return await self._desk.embed(job)

    def status(self) -> RunnerStatus:
        status = self._desk.status()
        stall = self._stall()
        return status if stall is None else replace(status, state="stalled", error=stall)

    async def lost(self) -> RunnerLoss:
        return await self._desk.lost()

    async def stop(self) -> None:
        self._desk.close(AppError(Kind.STOPPING, "the engine was stopped"), told=STOPPED)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._thread is None:
            return
        self._thread.stop()
        hopeless = self._crew is not None and self._crew.lost() is not None
        patience = _HOPELESS if hopeless else _STOP_PATIENCE
        if not await asyncio.to_thread(self._thread.join, patience):
            log.error("the engine did not stop within %.0f s", patience)

    def _lose(self, why: str) -> None:
        self._desk.lose(AppError(Kind.ENGINE, why), told=why)

    def _stall(self) -> str | None:
        """A sentence when a loaded engine has been at one thing for too long."""
        if self._thread is None or self._desk.status().state != "ready":
            return None
        beat = self._thread.heartbeat()
        seconds = (time.monotonic_ns() - beat.at) / 1e9
        if beat.doing == IDLE or seconds < self._settings.watchdog:
            return None
        return f"the engine has made no progress for {seconds:.0f} s ({beat.doing})"

    async def _keep_watch(self) -> None:
        """Tell the log when the engine hangs, and when it goes on, also if nobody asks."""
        hung = False
        while True:
            await asyncio.sleep(self._settings.watchdog / _LOOKS)
            stall = self._stall()
            if stall is not None and not hung:
                log.error("%s", stall)
                if self._crew is not None:
                    self._crew.lose(f"{stall}: another rank may be hung")
            if stall is None and hung:
                log.warning("the engine is making progress again")
            hung = stall is not None


def _on_all_ranks(crew: Crew, grammars: Grammars) -> _MakeMatcher:
    async def matcher(grammar: Grammar, stop_ids: frozenset[int], caller: str) -> Matcher:
        return await asyncio.to_thread(crew.compile, grammars, grammar, stop_ids)

    return matcher


class _Threaded:
    """The engine as the desk sees it."""

    def __init__(self, thread: EngineThread, matcher: _MakeMatcher) -> None:
        self._thread = thread
        self._matcher = matcher

    async def submit(self, job: Job) -> None:
        matcher: Matcher | None = None
        if job.grammar is not None:
            matcher = await self._matcher(job.grammar, job.stop_ids, job.caller)
        self._thread.submit(job, matcher)

    def embed(self, job: EmbedJob) -> None:
        self._thread.embed(job)

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        self._thread.cancel(job, keep=keep)
