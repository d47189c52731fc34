"""A runner whose engine runs in a separate process.

Knows: the process, its client, the dispatcher, the watchdog. Must not know: tensors, text, the
worker server. Nothing is computed here; only token IDs, numbers and strings are exchanged with the
process.

One task, `_run_process`, owns the process from start to exit. However the process exits, the
dispatcher notifies all waiting tasks, and all resources are closed. `Watchdog` detects a hung
process, which sends no messages or makes no progress.
"""

import asyncio
import logging
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from typing import assert_never

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, ErrorKind
from app.core.jobs import IDLE, EngineFailed, EngineReady, Heartbeat, Job, StepOutput
from app.core.model_files import ModelFiles
from app.core.ports import RunnerFailure, RunnerStatus
from app.core.prefix_snapshot import PrefixSnapshot
from app.core.settings import Settings
from app.runners import worker_protocol
from app.runners.child_process import ChildProcess, ProcessExit
from app.runners.dispatcher import UNLOADING_MESSAGE, Dispatcher, RequestStream
from app.runners.restart_policy import RUNNER_CRASHED, stop_grace
from app.runners.worker_client import WorkerClient
from app.runners.worker_protocol import (
    JobReceived,
    PromptScoresChunk,
    StepJoiner,
    WorkerEvent,
    WorkerInit,
    WorkerStatus,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A hung process. message: one sentence. stuck_since_ns: see `RunnerFailure`."""

    message: str
    stuck_since_ns: int | None = None


class Watchdog:
    """Detects a hung process.

    watchdog: the number of seconds without progress after which the process is considered hung.
    interval: the number of seconds between two heartbeats, and between two checks.
    """

    def __init__(self, *, watchdog: float, interval: float) -> None:
        self._limit = math.ceil(watchdog / interval)
        self._interval = interval
        self._silent_checks: int | None = None  # since the last message; None before the first
        self._unchanged_beats = 0  # consecutive heartbeats without progress
        self._last_heartbeat: Heartbeat | None = None

    def note_activity(self) -> None:
        """Records a message. Called for every message from the process."""
        self._silent_checks = 0

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        unchanged = heartbeat == self._last_heartbeat and heartbeat.stage != IDLE
        self._unchanged_beats = self._unchanged_beats + 1 if unchanged else 0
        self._last_heartbeat = heartbeat

    def check(self) -> "Stall | None":
        """Returns a description if the process is hung, otherwise None. Must be called once per
        interval."""
        if self._silent_checks is None:
            return None
        self._silent_checks += 1
        if self._silent_checks > self._limit:
            seconds = self._seconds(self._silent_checks)
            return Stall(message=f"the engine process has sent nothing for {seconds} s")
        beat = self._last_heartbeat
        if self._unchanged_beats >= self._limit and beat is not None:
            seconds = self._seconds(self._unchanged_beats)
            message = f"the engine has made no progress for {seconds} s ({beat.stage})"
            return Stall(message=message, stuck_since_ns=beat.timestamp_ns)
        return None

    def _seconds(self, count: int) -> str:
        return f"{count * self._interval:.0f}"


log = logging.getLogger(__name__)

GetStatus = Callable[[], Awaitable[WorkerStatus]]
StreamEvents = Callable[[], AsyncGenerator[WorkerEvent]]

# The polling interval in seconds while the model is loading.
_LOAD_POLL_INTERVAL = 0.1

# The timeout in seconds for the start of a process. On an idle machine, it takes one or two
# seconds.
_STARTUP_TIMEOUT = 30.0

# The maximum interval in seconds between two probes of the job endpoint, and the maximum interval
# while connections fail.
_PROBE_INTERVAL, _PROBE_RETRY_DELAY = 5.0, 1.0

# The number of consecutive probes that must time out before the process is considered hung. Each
# probe times out after `watchdog` seconds. A single timeout is not sufficient, because this process
# may have been suspended during the probe. A hung engine is detected earlier by its heartbeats.
# A failed connection, which takes no time, counts as the part of a missed probe that passes until
# the next attempt.
_MAX_MISSED_PROBES = 2

# The timeout in seconds for the exit of a process that has closed its connection.
_EXIT_TIMEOUT = 2.0


class ProcessRunner:
    """Implements `Runner`. `settings` contains the engine's settings, `watchdog` and
    `load_timeout`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._dispatcher = Dispatcher()
        self._process: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._stall_message: str | None = None
        self._unreachable: str | None = None
        self._termination: asyncio.Task[None] | None = None  # of a failed process
        self._stopping = False

    async def start(self, files: ModelFiles) -> None:
        assert self._task is None, "a runner can be started only once"
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

    async def get_prefix_snapshot(self) -> PrefixSnapshot:
        return await self._dispatcher.get_prefix_snapshot()

    async def wait_for_failure(self) -> RunnerFailure:
        return await self._dispatcher.wait_for_failure()

    async def stop(self) -> None:
        self._stopping = True
        self._dispatcher.close(
            AppError(ErrorKind.STOPPING, "the engine was stopped"), job_error=UNLOADING_MESSAGE
        )
        if self._process is not None:
            await self._process.terminate(self._stop_grace())
        ending = {task for task in (self._task, self._termination) if task is not None}
        if ending:
            await asyncio.wait(ending)

    async def _run_process(self, files: ModelFiles) -> None:
        """Starts the process and supervises it until its exit."""
        try:
            self._process = await ChildProcess.start(files.name, self._build_init(files))
            if self._stopping:
                self._process.kill()
            await self._supervise(files.name, self._process)
        except Exception as error:
            if not isinstance(error, OSError):  # OSError does not indicate a bug
                log.exception("%s: managing its process failed", files.name)
            message = f"the {files.name} process could not be started: {error}"
            self._dispatcher.fail(AppError(ErrorKind.ENGINE, message))
            if self._process is not None:
                self._process.kill()
                await self._process.wait()

    def _build_init(self, files: ModelFiles) -> Callable[[int, int], bytes]:
        def opening(socket: int, events: int) -> bytes:
            return worker_protocol.WORKER_INIT.encode(
                WorkerInit(
                    parent_pid=os.getpid(),
                    socket_fd=socket,
                    events_fd=events,
                    settings=self._settings,
                    files=files,
                )
            )

        return opening

    async def _supervise(self, name: str, process: ChildProcess) -> None:
        line = self._dispatcher.engine = WorkerClient(
            process.socket_path, process.events, self._dispatcher
        )
        interval = worker_protocol.heartbeat_interval(self._settings)
        watchdog = Watchdog(watchdog=self._settings.watchdog, interval=interval)
        gone = asyncio.create_task(process.wait())
        follow_task = asyncio.create_task(
            self._follow_worker(name, line.status, line.stream_events, watchdog)
        )
        watchdog_task = asyncio.create_task(self._run_watchdog(watchdog, interval))
        broken = asyncio.create_task(line.wait_until_disconnected())
        probe_task = asyncio.create_task(self._run_probes(name, line.probe))
        work = {follow_task, watchdog_task, broken, probe_task}
        try:
            await asyncio.wait({gone, *work}, return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping:
                # The connection was closed. The process may be about to exit with a reason.
                await asyncio.wait({gone}, timeout=_EXIT_TIMEOUT)
                if not gone.done():
                    self._fail_disconnected(name, process.last_output)
            process_exit = await gone
            # Read the last events before the failure is reported, because they tell which jobs the
            # process had received. If this task were cancelled, some of its connections would stay
            # open.
            await asyncio.wait({follow_task}, timeout=_EXIT_TIMEOUT)
            self._report_exit(name, process_exit)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await line.close()

    def _report_exit(self, name: str, process_exit: ProcessExit) -> None:
        """Reports the exit of the process to the dispatcher, unless the dispatcher has already
        failed."""
        how, details = (
            process_exit.description,
            f": {process_exit.last_output}" if process_exit.last_output else "",
        )
        if self._dispatcher.status().state == "loading":
            message = f"{name} could not be loaded: its process {how}{details}"
            self._dispatcher.fail(AppError(ErrorKind.MODEL_FILES, message, code=RUNNER_CRASHED))
            return
        error = AppError(ErrorKind.ENGINE, f"the {name} process {how}{details}")
        job_error = f"the engine stopped: its process {how}"
        self._dispatcher.fail(error, job_error=job_error, cause=process_exit.cause)

    async def _follow_worker(
        self, name: str, get_status: GetStatus, stream_events: StreamEvents, watchdog: Watchdog
    ) -> None:
        """Waits for the load, then reads the events of the process until the stream ends."""
        try:
            ready = await self._wait_until_loaded(name, get_status)
            if ready is None:
                return
            watchdog.note_activity()  # from now on, a missing heartbeat means a hang
            async with aclosing(stream_events()) as events:
                await self._read_events(ready, events, watchdog)
        except ConnectionError as error:
            log.debug("%s: %s", name, error)
        except Exception:
            log.exception("%s: cannot decode a message from its process", name)
            self._fail_and_kill(
                AppError(
                    ErrorKind.ENGINE, f"the {name} process sent a message that cannot be decoded"
                )
            )

    async def _wait_until_loaded(self, name: str, get_status: GetStatus) -> EngineReady | None:
        """Polls the process until the model is loaded. If the load fails, reports the failure to
        the dispatcher and returns None. A process that does not respond for `watchdog` seconds is
        hung or suspended, and fails before `load_timeout` expires."""
        last, limit = None, self._settings.load_timeout
        now = asyncio.get_running_loop().time
        moved = now()

        async def look() -> worker_protocol.WorkerStatus:
            timeout = self._settings.watchdog
            async with asyncio.timeout(timeout if last else max(timeout, _STARTUP_TIMEOUT)):
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

    async def _read_events(
        self, ready: EngineReady, events: AsyncIterator[WorkerEvent], watchdog: Watchdog
    ) -> None:
        """Passes events to the dispatcher. The model counts as loaded from the first event on,
        because a process that sends nothing cannot run jobs."""
        joiner = StepJoiner()
        is_first = True
        async for one in events:
            watchdog.note_activity()
            if is_first:
                self._dispatcher.receive(ready)
                is_first = False
            match one:
                case StepOutput():
                    self._dispatcher.receive(joiner.join(one))
                case PromptScoresChunk():
                    joiner.add(one)
                case Heartbeat():
                    watchdog.note_heartbeat(one)
                case JobReceived():
                    self._dispatcher.mark_received(one.job)
                case EngineFailed():
                    self._dispatcher.receive(one)
                    self._fail_and_kill(AppError(one.kind, one.message))
                    return
                case _:
                    assert_never(one)

    async def _run_watchdog(self, watchdog: Watchdog, interval: float) -> None:
        """Returns when the process is hung."""
        while True:
            await asyncio.sleep(interval)
            if (stall := watchdog.check()) is not None:
                break
        self._stall_message = stall.message
        self._fail_and_kill(
            AppError(ErrorKind.ENGINE, stall.message), stuck_since_ns=stall.stuck_since_ns
        )

    async def _run_probes(self, name: str, probe: Callable[[], Awaitable[None]]) -> None:
        """Checks that jobs can reach the engine, because heartbeats use a separate connection.
        Returns when the engine has not accepted a command for too long, also if the process cannot
        be reached, for example because the path of its socket was removed. Exhausted resources of
        this process, such as file descriptors, do not count, because the model process may still be
        serving other requests."""
        await self._dispatcher.wait_until_ready()
        limit = self._settings.watchdog
        delay = min(_PROBE_RETRY_DELAY, limit / 4)
        # Adding up seconds, rather than reading a clock, excludes a suspension of this process.
        missed, reason = 0.0, ""
        while missed < _MAX_MISSED_PROBES * limit:
            try:
                async with asyncio.timeout(limit):
                    await probe()
                missed, self._unreachable = 0.0, None
                await asyncio.sleep(min(_PROBE_INTERVAL, limit / 4))
            except TimeoutError:
                missed, reason = missed + limit, ""
            except OSError as error:
                reason = f": {error}"
                self._unreachable = f"the {name} process cannot be reached{reason}"
                if isinstance(error, ConnectionError) and self._is_expected_to_run():
                    missed += delay
                await asyncio.sleep(delay)
        self._stall_message = (
            f"the {name} process has accepted no requests for {missed:.0f} s{reason}"
        )
        self._fail_and_kill(AppError(ErrorKind.ENGINE, self._stall_message))

    def _is_expected_to_run(self) -> bool:
        """Returns whether the process has not exited and is not being stopped."""
        return not self._stopping and self._process is not None and self._process.alive

    def _fail_disconnected(self, name: str, output: str) -> None:
        message = f"the {name} process closed its connection but did not exit"
        error = AppError(ErrorKind.ENGINE, f"{message}: {output}" if output else message)
        self._fail_and_kill(
            error, job_error="the engine stopped: its process closed its connection"
        )

    def _stop_grace(self) -> float:
        """Returns the number of seconds that the process gets to exit."""
        status = self._dispatcher.status()
        return stop_grace(status.capacity, status.stats.ledger)

    def _fail_and_kill(
        self,
        error: AppError,
        *,
        job_error: str | None = None,
        stuck_since_ns: int | None = None,
    ) -> None:
        """Fails all jobs and ends the process, which has become unusable. A process that wires
        memory first gets the time to unwire it; others are killed immediately. For the options, see
        `Dispatcher.fail`."""
        assert self._process is not None
        self._dispatcher.fail(error, job_error=job_error, stuck_since_ns=stuck_since_ns)
        capacity = self._dispatcher.status().capacity
        if capacity is None or not capacity.wirable:
            self._process.kill()
        elif self._termination is None:
            self._termination = asyncio.create_task(self._process.terminate(self._stop_grace()))
