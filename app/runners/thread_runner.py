"""A runner whose engine is a thread of this process.

Knows: the engine thread, asyncio. Must not know: HTTP, text.

Commands are sent through the thread's queue. Messages are passed to the dispatcher with one
`call_soon_threadsafe` call per step. A thread cannot be killed, so a hung engine is only reported.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.core.jobs import IDLE, CallResult, EngineCall, EngineMessage, Job
from app.core.model_files import ModelFiles
from app.core.ports import RunnerFailure, RunnerStatus
from app.core.requests import EmbedJob, Grammar
from app.core.settings import Settings
from app.engine.loader import load_engine
from app.engine.thread import EngineThread
from app.engine.wired_memory import unwire_memory
from app.grammar.compiler import GrammarCompiler, Matcher
from app.runners.dispatcher import UNLOADING_MESSAGE, Dispatcher, RequestStream
from app.runners.ranks.leader import RankGroup, load_leader
from app.runners.restart_policy import stop_grace
from app.runners.snapshot_refresh import call_engine

log = logging.getLogger(__name__)

# The timeout in seconds for a stopping engine to finish its step.
_STOP_TIMEOUT = 30.0

# The timeout if the step may be blocked by a lost rank.
_STOP_TIMEOUT_RANK_LOST = 1.0

_MakeMatcher = Callable[[Grammar, frozenset[int], str], Awaitable[Matcher]]

# The number of heartbeat checks per `Settings.watchdog`.
_CHECKS_PER_WATCHDOG = 4


class ThreadRunner:
    """Implements `Runner`.

    settings: the settings of the engine and the watchdog.
    rank_group: the other ranks, if several ranks run the model together. If set, only one runner
        can be started, and only once.
    """

    def __init__(self, settings: Settings, rank_group: RankGroup | None = None) -> None:
        self._settings = settings
        self._rank_group = rank_group
        self._dispatcher = Dispatcher()
        self._thread: EngineThread | None = None
        self._watchdog_task: asyncio.Task[None] | None = None

    async def start(self, files: ModelFiles) -> None:
        loop = asyncio.get_running_loop()

        def post(message: EngineMessage) -> None:
            # The event loop may be closed when a stopping engine sends its last message.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._dispatcher.receive, message)

        def lost(why: str) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._fail, why)

        grammars = GrammarCompiler.for_model(files)
        read, matcher = partial(load_engine, files, self._settings), grammars.compile_async
        if self._rank_group is not None:
            self._rank_group.attach_engine(lost)
            read = partial(load_leader, files, self._settings, self._rank_group)
            matcher = _compile_on_all_ranks(self._rank_group, grammars)
        self._thread = EngineThread(read, post, check_invariants=self._settings.debug)
        self._dispatcher.engine = _ThreadClient(
            self._thread, matcher, self._dispatcher.mark_received
        )
        self._thread.start()
        grammars.preload_tokenizer()
        self._watchdog_task = asyncio.create_task(self._watch_for_stalls())
        await self._dispatcher.wait_until_ready()

    def submit(self, job: Job) -> AbstractAsyncContextManager[RequestStream]:
        return self._dispatcher.submit(job)

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        return await self._dispatcher.embed(job)

    def status(self) -> RunnerStatus:
        status = self._dispatcher.status()
        stall = self._stall_message()
        return status if stall is None else replace(status, state="stalled", error=stall)

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        return await self._dispatcher.call(call)

    async def wait_for_failure(self) -> RunnerFailure:
        return await self._dispatcher.wait_for_failure()

    async def stop(self) -> None:
        self._dispatcher.close(
            AppError(ErrorKind.STOPPING, "the engine was stopped"), job_error=UNLOADING_MESSAGE
        )
        if self._watchdog_task is not None:
            self._watchdog_task.cancel()
            await asyncio.gather(self._watchdog_task, return_exceptions=True)
        if self._thread is None:
            return
        self._thread.stop()
        rank_lost = self._rank_group is not None and self._rank_group.wait_for_failure() is not None
        status = self._dispatcher.status()
        grace = max(_STOP_TIMEOUT, stop_grace(status.capacity, status.stats.ledger))
        patience = _STOP_TIMEOUT_RANK_LOST if rank_lost else grace
        if not await asyncio.to_thread(self._thread.join, patience):
            log.error("the engine did not stop within %.0f s", patience)
            await asyncio.to_thread(unwire_memory)

    def _fail(self, reason: str) -> None:
        self._dispatcher.fail(AppError(ErrorKind.ENGINE, reason), job_error=reason)

    def _stall_message(self) -> str | None:
        """Returns a description as a sentence if a loaded engine has made no progress for too long,
        otherwise None."""
        if self._thread is None or self._dispatcher.status().state != "ready":
            return None
        beat = self._thread.heartbeat()
        seconds = (time.monotonic_ns() - beat.timestamp_ns) / 1e9
        if beat.stage == IDLE or seconds < self._settings.watchdog:
            return None
        return f"the engine has made no progress for {seconds:.0f} s ({beat.stage})"

    async def _watch_for_stalls(self) -> None:
        """Logs when the engine hangs and when it resumes."""
        hung = False
        while True:
            await asyncio.sleep(self._settings.watchdog / _CHECKS_PER_WATCHDOG)
            stall = self._stall_message()
            if stall is not None and not hung:
                log.error("%s", stall)
                if self._rank_group is not None:
                    self._rank_group.fail(f"{stall}: another rank may be hung")
            if stall is None and hung:
                log.warning("the engine is making progress again")
            hung = stall is not None


def _compile_on_all_ranks(rank_group: RankGroup, grammars: GrammarCompiler) -> _MakeMatcher:
    async def matcher(grammar: Grammar, stop_ids: frozenset[int], caller: str) -> Matcher:
        return await asyncio.to_thread(rank_group.compile_grammar, grammars, grammar, stop_ids)

    return matcher


class _ThreadClient:
    """Implements `EngineClient` for the engine thread."""

    def __init__(
        self, thread: EngineThread, matcher: _MakeMatcher, mark_received: Callable[[str], None]
    ) -> None:
        self._thread = thread
        self._matcher = matcher
        self._mark_received = mark_received

    async def submit(self, job: Job) -> None:
        self._mark_received(job.id)
        matcher: Matcher | None = None
        if job.grammar is not None:
            matcher = await self._matcher(job.grammar, job.stop_token_ids, job.caller)
        self._thread.submit(job, matcher)

    def embed(self, job: EmbedJob) -> None:
        self._mark_received(job.id)
        self._thread.embed(job)

    def provide_images(self, job: str, images: Sequence[ImagePixels]) -> None:
        self._thread.provide_images(job, images)

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        self._thread.cancel(job, keep=keep)

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        return await call_engine(partial(self._thread.call, call))
