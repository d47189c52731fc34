"""A runner whose engine lives in a process of its own.

Knows: the process, the line to it, the desk, the vigil. Must not know: tensors, text, how the
process does what it is asked. Nothing is evaluated here; token ids, numbers and words cross.

One task owns the process from its beginning to its end: `_live`. However that end comes, everybody
who waits for something is told by the desk, and everything that was opened is closed.

When a runner that says nothing, or always the same, counts as hung.
"""

import asyncio
import logging
import math
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import assert_never

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, ErrorKind
from app.core.jobs import IDLE, EngineFailed, EngineReady, Heartbeat, Job, StepOutput
from app.core.model_files import ModelFiles
from app.core.ports import RunnerFailure, RunnerStatus
from app.core.settings import Settings
from app.runners import worker_protocol
from app.runners.child_process import ChildProcess, ProcessExit
from app.runners.dispatcher import UNLOADING_MESSAGE, Dispatcher, RequestStream
from app.runners.restart_policy import RUNNER_CRASHED
from app.runners.worker_protocol import (
    PromptScoresChunk,
    StepJoiner,
    WorkerEvent,
    WorkerInit,
    WorkerStatus,
)


class Watchdog:
    """watchdog: seconds; interval: seconds between two heartbeats, and between two looks."""

    def __init__(self, *, watchdog: float, interval: float) -> None:
        self._limit = math.ceil(watchdog / interval)
        self._interval = interval
        self._silent_checks: int | None = None  # looks since something was heard, once anything was
        self._unchanged_beats = 0  # heartbeats that told of one and the same stage
        self._last_heartbeat: Heartbeat | None = None

    def note_activity(self) -> None:
        """Anything at all."""
        self._silent_checks = 0

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        stands = heartbeat == self._last_heartbeat and heartbeat.stage != IDLE
        self._unchanged_beats = self._unchanged_beats + 1 if stands else 0
        self._last_heartbeat = heartbeat

    def check(self) -> str | None:
        """To be called once in an interval: a sentence when it hangs."""
        if self._silent_checks is None:
            return None
        self._silent_checks += 1
        if self._silent_checks > self._limit:
            return (
                f"the engine's process has sent nothing for {self._seconds(self._silent_checks)} s"
            )
        if self._unchanged_beats >= self._limit and self._last_heartbeat is not None:
            seconds = self._seconds(self._unchanged_beats)
            return f"the engine has made no progress for {seconds} s ({self._last_heartbeat.stage})"
        return None

    def _seconds(self, count: int) -> str:
        return f"{count * self._interval:.0f}"


log = logging.getLogger(__name__)

GetStatus = Callable[[], Awaitable[WorkerStatus]]
OpenEvents = Callable[[], AbstractAsyncContextManager[AsyncIterator[WorkerEvent]]]

# seconds between two looks at a model that is being loaded
_LOAD_POLL_INTERVAL = 0.1

# seconds that a process may take to begin: a second or two, on a machine that is not very busy
_STARTUP_TIMEOUT = 30.0

# seconds between two probes of the way that jobs take, at most, and while that way is broken
_PROBE_INTERVAL, _PROBE_RETRY_DELAY = 5.0, 1.0

# Probes in a row that time out before the process counts as hung, each after `watchdog` seconds:
# this process may have been stopped while the first one waited, and what hangs in the engine is
# reported by its heartbeats before that.
_MAX_MISSED_PROBES = 2

# seconds that a process which has hung up may take to end
_EXIT_TIMEOUT = 2.0


class ProcessRunner:
    """settings: those that the engine reads, watchdog and load_timeout."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._dispatcher = Dispatcher()
        self._process: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._stall_message: str | None = None
        self._unreachable: str | None = None
        self._stopping = False

    async def start(self, files: ModelFiles) -> None:
        assert self._task is None, "a runner is started once"
        self._task = asyncio.create_task(self._run_process(files))
        try:
            await self._dispatcher.wait_until_ready()
        except BaseException:
            self._stopping = True
            if self._process is not None:
                self._process.kill()
            await asyncio.wait({self._task})
            raise

    def submit(self, job: Job) -> AbstractAsyncContextManager[RequestStream]:
        return self._dispatcher.submit(job)

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        return await self._dispatcher.embed(job)

    def status(self) -> RunnerStatus:
        status, spawned = self._dispatcher.status(), self._process
        if spawned is None or not spawned.alive:
            return status
        stall = self._stall_message or self._unreachable
        if stall is not None and status.state == "ready":
            return replace(status, state="stalled", error=stall, pid=spawned.pid)
        return replace(status, pid=spawned.pid)

    async def wait_for_failure(self) -> RunnerFailure:
        return await self._dispatcher.wait_for_failure()

    async def stop(self) -> None:
        self._stopping = True
        self._dispatcher.close(
            AppError(ErrorKind.STOPPING, "the engine was stopped"), job_error=UNLOADING_MESSAGE
        )
        if self._process is not None:
            await self._process.terminate()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run_process(self, files: ModelFiles) -> None:
        """The process, from its beginning to its end."""
        secret = secrets.token_urlsafe(32)
        try:
            self._process = await ChildProcess.start(files.name, self._build_init(files, secret))
            if self._stopping:
                self._process.kill()
            await self._supervise(files.name, secret, self._process)
        except Exception as error:
            if not isinstance(error, OSError):  # which the machine has to answer for
                log.exception("%s: managing its process failed", files.name)
            message = f"the process of {files.name} could not be started: {error}"
            self._dispatcher.fail(AppError(ErrorKind.ENGINE, message))
            if self._process is not None:
                self._process.kill()
                await self._process.wait()

    def _build_init(self, files: ModelFiles, secret: str) -> Callable[[int], bytes]:
        def opening(socket: int) -> bytes:
            return worker_protocol.WORKER_INIT.encode(
                WorkerInit(
                    parent_pid=os.getpid(),
                    socket_fd=socket,
                    secret=secret,
                    settings=self._settings,
                    files=files,
                )
            )

        return opening

    async def _supervise(self, name: str, secret: str, process: ChildProcess) -> None:
        # imported while the process does the same with what it needs
        from app.runners.worker_client import WorkerClient

        line = self._dispatcher.engine = WorkerClient(process.port, secret, self._dispatcher)
        interval = worker_protocol.heartbeat_interval(self._settings)
        vigil = Watchdog(watchdog=self._settings.watchdog, interval=interval)
        gone = asyncio.create_task(process.wait())
        talking = asyncio.create_task(
            self._follow_worker(name, line.status, line.stream_events, vigil)
        )
        watching = asyncio.create_task(self._run_watchdog(vigil, interval))
        broken = asyncio.create_task(line.wait_until_disconnected())
        probing = asyncio.create_task(self._run_probes(name, line.probe))
        work = {talking, watching, broken, probing}
        try:
            await asyncio.wait({gone, *work}, return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping:
                # it has hung up, and may be about to say why
                await asyncio.wait({gone}, timeout=_EXIT_TIMEOUT)
                if not gone.done():
                    self._fail_disconnected(name, process.last_output)
            self._report_exit(name, await gone)
            # it closes its connections, which it would not to the last where it is cancelled
            await asyncio.wait({talking}, timeout=_EXIT_TIMEOUT)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await line.close()

    def _report_exit(self, name: str, process_exit: ProcessExit) -> None:
        """The process has ended; if nobody knows better, that is what it was."""
        how, said = (
            process_exit.description,
            f": {process_exit.last_output}" if process_exit.last_output else "",
        )
        if self._dispatcher.status().state == "loading":
            message = f"{name} could not be loaded: its process {how}{said}"
            self._dispatcher.fail(AppError(ErrorKind.MODEL_FILES, message, code=RUNNER_CRASHED))
            return
        error = AppError(ErrorKind.ENGINE, f"the process of {name} {how}{said}")
        told = f"the engine stopped: its process {how}"
        self._dispatcher.fail(error, job_error=told, cause=process_exit.cause)

    async def _follow_worker(
        self, name: str, get_status: GetStatus, open_events: OpenEvents, watchdog: Watchdog
    ) -> None:
        """Returns when there is nothing more to be heard."""
        try:
            ready = await self._wait_until_loaded(name, get_status)
            if ready is None:
                return
            watchdog.note_activity()  # from here on, silence is a hang
            async with open_events() as news:
                self._dispatcher.receive(ready)
                await self._read_events(news, watchdog)
        except ConnectionError as error:
            log.debug("%s: %s", name, error)
        except Exception:
            log.exception("%s: cannot decode a message from its process", name)
            self._fail_and_kill(
                AppError(
                    ErrorKind.ENGINE, f"the process of {name} sent a message that cannot be decoded"
                )
            )

    async def _wait_until_loaded(self, name: str, get_status: GetStatus) -> EngineReady | None:
        """Looks until the model is there; None when the desk knows that it will not be. A process
        that does not even answer any more is stuck, or stopped, and nothing to be patient with."""
        last, limit = None, self._settings.load_timeout
        now = asyncio.get_running_loop().time
        moved = now()

        async def look() -> worker_protocol.WorkerStatus:
            silence = self._settings.watchdog
            async with asyncio.timeout(silence if last else max(silence, _STARTUP_TIMEOUT)):
                return await get_status()

        try:
            async with asyncio.timeout(limit) as patience:
                while not isinstance(state := (await look()).State, EngineReady):
                    self._dispatcher.receive(state)
                    if isinstance(state, EngineFailed):
                        self._fail_and_kill(AppError(state.kind, state.message))
                        return None
                    if state != last:
                        last, moved = state, now()
                        patience.reschedule(moved + limit)
                    await asyncio.sleep(_LOAD_POLL_INTERVAL)
                return state
        except TimeoutError:
            progress = self._dispatcher.status().progress
            still = now() - moved
            message = f"{name} could not be loaded: no progress for {still:.0f} s at {progress} %"
            self._fail_and_kill(AppError(ErrorKind.MODEL_FILES, message))
            return None

    async def _read_events(self, events: AsyncIterator[WorkerEvent], watchdog: Watchdog) -> None:
        joiner = StepJoiner()
        async for one in events:
            watchdog.note_activity()
            match one:
                case StepOutput():
                    self._dispatcher.receive(joiner.join(one))
                case PromptScoresChunk():
                    joiner.add(one)
                case Heartbeat():
                    watchdog.note_heartbeat(one)
                case EngineFailed():
                    self._dispatcher.receive(one)
                    self._fail_and_kill(AppError(one.kind, one.message))
                    return
                case _:
                    assert_never(one)

    async def _run_watchdog(self, watchdog: Watchdog, interval: float) -> None:
        """Returns when the process hangs."""
        while True:
            await asyncio.sleep(interval)
            if (stall := watchdog.check()) is not None:
                break
        self._stall_message = stall
        self._fail_and_kill(AppError(ErrorKind.ENGINE, stall))

    async def _run_probes(self, name: str, probe: Callable[[], Awaitable[None]]) -> None:
        """Sees that jobs can reach the engine: heartbeats come another way. Returns when it takes
        no commands for too long. A way that is broken on this side, say for lack of descriptors, is
        no fault of the process, which may be answering others."""
        await self._dispatcher.wait_until_ready()
        limit, missed = self._settings.watchdog, 0
        while missed < _MAX_MISSED_PROBES:
            try:
                async with asyncio.timeout(limit):
                    await probe()
                missed, self._unreachable = 0, None
                await asyncio.sleep(min(_PROBE_INTERVAL, limit / 4))
            except ConnectionError as error:
                self._unreachable = f"the process of {name} cannot be reached: {error}"
                await asyncio.sleep(_PROBE_RETRY_DELAY)
            except TimeoutError:
                missed += 1
        self._stall_message = (
            f"the process of {name} has accepted no requests for {missed * limit:.0f} s"
        )
        self._fail_and_kill(AppError(ErrorKind.ENGINE, self._stall_message))

    def _fail_disconnected(self, name: str, output: str) -> None:
        message = f"the process of {name} closed its connection and did not exit"
        error = AppError(ErrorKind.ENGINE, f"{message}: {output}" if output else message)
        self._fail_and_kill(
            error, job_error="the engine stopped: its process closed its connection"
        )

    def _fail_and_kill(self, error: AppError, *, job_error: str | None = None) -> None:
        """The process is there and good for nothing. job_error: as `Dispatcher.fail` has it."""
        assert self._process is not None
        self._dispatcher.fail(error, job_error=job_error)
        self._process.kill()
