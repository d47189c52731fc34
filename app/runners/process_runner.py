"""A runner whose engine runs in a separate process.

Knows: the process, the messages on its channel, the dispatcher, the watchdog. Must not know:
tensors, text, the worker. Nothing is computed here; only token IDs, numbers and strings are
exchanged with the process.

One task, `_run_process`, owns the process from start to exit. However the process exits, the
dispatcher notifies all waiting tasks, and all resources are closed. `Watchdog` detects a hung
process, which does not answer probes, makes no progress or does not take commands.
"""

import asyncio
import logging
import math
import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from typing import assert_never, cast

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.core.jobs import (
    IDLE,
    AnyEngineCall,
    CallResult,
    EngineCall,
    EngineFailed,
    EngineReady,
    EngineReply,
    Heartbeat,
    Job,
    LoadProgress,
    StepOutput,
)
from app.core.model_files import ModelFiles
from app.core.ports import RunnerFailure, RunnerStatus
from app.core.requests import EmbedJob
from app.core.settings import Settings
from app.runners import worker_protocol
from app.runners.channel import Channel, MessageTooLargeError
from app.runners.child_process import ChildProcess, ProcessExit
from app.runners.dispatcher import UNLOADING_MESSAGE, Dispatcher, RequestStream
from app.runners.restart_policy import RUNNER_CRASHED, stop_grace
from app.runners.spawn import Spawn, spawn
from app.runners.worker_protocol import (
    Call,
    CallReply,
    Cancel,
    Command,
    Embed,
    Embedded,
    EventJoiner,
    JobAccepted,
    JobReceived,
    Probe,
    ProbeReply,
    PromptScoresChunk,
    ProvideImages,
    Rejected,
    Submit,
    WorkerEvent,
    WorkerInit,
)

log = logging.getLogger(__name__)

# The timeout in seconds for the start of a process. On an idle machine, it takes one or two
# seconds.
_STARTUP_TIMEOUT = 30.0

# The timeout in seconds for the exit of a process that has closed its channel, and for its last
# messages after its exit.
_EXIT_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A hung process. message: one sentence. stuck_since_ns: see `RunnerFailure`."""

    message: str
    stuck_since_ns: int | None = None


class Watchdog:
    """Detects a process that is hung or suspended, or whose load makes no progress. Counting
    checks, rather than reading a clock, excludes a suspension of this process.

    name: the name of the model.
    watchdog: the number of seconds without progress after which a process is considered hung. It
        may take twice as long to take a command, because a step may be running.
    load_timeout: the same for a load.
    interval: the number of seconds between two probes, and between two checks.
    """

    def __init__(self, *, name: str, watchdog: float, load_timeout: float, interval: float) -> None:
        self._name = name
        self._watchdog = watchdog
        self._load_timeout = load_timeout
        self._interval = interval
        self._has_started = False
        self._load: LoadProgress | None = LoadProgress(progress=0, allocated_bytes=0)
        self._silent_checks = 0  # since the last message
        self._load_checks = 0  # since the last progress of the load
        self._unchanged_beats = 0  # consecutive heartbeats without progress
        self._untaken_probes = 0  # consecutive replies without a taken command
        self._last_heartbeat: Heartbeat | None = None

    def note_message(self) -> None:
        """Records a message. Called for every message from the process."""
        self._has_started = True
        self._silent_checks = 0

    def note_load_progress(self, progress: LoadProgress) -> None:
        if progress != self._load:
            self._load, self._load_checks = progress, 0

    def note_ready(self) -> None:
        """Records that the model is loaded."""
        self._load = None

    def note_probe_reply(self, reply: ProbeReply) -> None:
        if self._load is not None:
            return  # during a load, the engine does no steps and takes no commands
        beat = reply.heartbeat
        unchanged = beat == self._last_heartbeat and beat.stage != IDLE
        self._unchanged_beats = self._unchanged_beats + 1 if unchanged else 0
        self._untaken_probes = 0 if reply.takes_commands else self._untaken_probes + 1
        self._last_heartbeat = beat

    def check(self) -> Stall | None:
        """Returns a description if the process is hung, otherwise None. Must be called once per
        interval."""
        self._silent_checks += 1
        silence = self._silent_checks * self._interval
        if self._load is not None:
            return self._check_load(silence)
        # A reply may arrive just after a check.
        if silence > math.ceil(self._watchdog / self._interval) * self._interval:
            return Stall(message=f"the engine process has sent nothing for {silence:.0f} s")
        beat, still = self._last_heartbeat, self._unchanged_beats * self._interval
        if beat is not None and still >= self._watchdog:
            message = f"the engine has made no progress for {still:.0f} s ({beat.stage})"
            return Stall(message=message, stuck_since_ns=beat.timestamp_ns)
        untaken = self._untaken_probes * self._interval
        if untaken >= 2 * self._watchdog:
            message = f"the {self._name} process has accepted no requests for {untaken:.0f} s"
            return Stall(message=message)
        return None

    def _check_load(self, silence: float) -> Stall | None:
        assert self._load is not None
        self._load_checks += 1
        still = self._load_checks * self._interval
        patience = self._watchdog if self._has_started else max(self._watchdog, _STARTUP_TIMEOUT)
        if silence <= patience and still < self._load_timeout:
            return None
        return Stall(
            message=f"{self._name} could not be loaded: no progress for {still:.0f} s at "
            f"{self._load.progress} %"
        )


class WorkerClient:
    """Implements `EngineClient` for a model process. `receive` handles its replies."""

    def __init__(self, channel: Channel[WorkerEvent], dispatcher: Dispatcher) -> None:
        self._channel = channel
        self._dispatcher = dispatcher
        self._replies: dict[str, asyncio.Future[EngineReply]] = {}  # by job or call
        self._num_calls = 0
        self._joiner = EventJoiner()
        channel.closed.add_done_callback(lambda _: self._end_replies())

    async def submit(self, job: Job) -> None:
        await self._request(job.id, Submit(job=job))

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        self._num_calls += 1
        id = f"call {self._num_calls}"
        command = Call(id=id, call=cast("AnyEngineCall", call))
        return cast("CallResult", await self._request(id, command))

    async def _request(self, id: str, command: Submit | Call) -> EngineReply:
        """Sends a command and returns its reply. Raises AppError."""
        reply = self._replies[id] = asyncio.get_running_loop().create_future()
        try:
            self._send_job(command)
            return await reply
        except ConnectionError:
            raise await self._dispatcher.get_failure() from None
        finally:
            del self._replies[id]

    def embed(self, job: EmbedJob) -> None:
        with suppress(ConnectionError):  # the dispatcher ends the job
            self._send_job(Embed(job=job))

    def provide_images(self, job: str, images: Sequence[ImagePixels]) -> None:
        with suppress(ConnectionError):  # the dispatcher ends the job
            # one message per image, because a message has a maximum size
            for image in images:
                self._send_job(ProvideImages(job=job, images=(image,)))

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        self._channel.send(Cancel(job=job, keep=keep))

    def receive(
        self,
        reply: JobReceived
        | JobAccepted
        | Rejected
        | CallReply
        | PromptScoresChunk
        | Embedded
        | StepOutput,
    ) -> None:
        match reply:
            case StepOutput():
                self._dispatcher.receive(self._joiner.join_step(reply))
            case JobReceived():
                self._dispatcher.mark_received(reply.job)
            case JobAccepted():
                self._dispatcher.mark_received(reply.job)
                self._end_reply(reply.job, None)
            case Rejected():
                self._dispatcher.mark_received(reply.id)
                self._end_reply(reply.id, reply.to_error())
            case CallReply():
                self._end_reply(reply.id, reply.reply)
            case PromptScoresChunk():
                self._joiner.add_scores(reply)
            case Embedded():
                if (result := self._joiner.join_embeddings(reply)) is not None:
                    self._dispatcher.finish_embedding(result)
            case _:
                assert_never(reply)

    def _send_job(self, command: Command) -> None:
        """Raises AppError for a job that is too large, and ConnectionError."""
        if self._channel.closed.done():
            raise ConnectionError("the channel is closed")
        try:
            self._channel.send(command)
        except MessageTooLargeError as error:
            raise AppError(ErrorKind.TOO_LARGE, f"the request is too large: {error}") from error

    def _end_reply(self, id: str, value: EngineReply | AppError) -> None:
        # If the client has disconnected, no call waits for the reply.
        reply = self._replies.get(id)
        if reply is None or reply.done():
            return
        if isinstance(value, AppError):
            reply.set_exception(value)
        else:
            reply.set_result(value)

    def _end_replies(self) -> None:
        """Ends all calls that wait for a reply, because the channel is closed."""
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ConnectionError("the process has closed its channel"))


class ProcessRunner:
    """Implements `Runner`. `settings` contains the engine's settings, `watchdog` and
    `load_timeout`. `spawn` starts the process."""

    def __init__(self, settings: Settings, spawn: Spawn = spawn) -> None:
        self._settings = settings
        self._spawn = spawn
        self._dispatcher = Dispatcher()
        self._process: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None
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
        status, process = self._dispatcher.status(), self._process
        return replace(status, pid=process.pid) if process and process.alive else status

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        return await self._dispatcher.call(call)

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
            self._process = ChildProcess(files.name, self._spawn(files.name))
            if self._stopping:
                self._process.kill()
            await self._supervise(files, self._process)
        except Exception as error:
            if not isinstance(error, OSError):  # OSError does not indicate a bug
                log.exception("%s: managing its process failed", files.name)
            message = f"the {files.name} process could not be started: {error}"
            self._dispatcher.fail(AppError(ErrorKind.ENGINE, message))
            if self._process is not None:
                self._process.kill()
                await self._process.wait()

    async def _supervise(self, files: ModelFiles, process: ChildProcess) -> None:
        name, settings = files.name, self._settings
        interval = worker_protocol.probe_interval(settings)
        watchdog = Watchdog(
            name=name,
            watchdog=settings.watchdog,
            load_timeout=settings.load_timeout,
            interval=interval,
        )
        channel: Channel[WorkerEvent] = Channel(
            process.channel_end,
            worker_protocol.WORKER_EVENT,
            lambda event: self._handle_event(event, client, watchdog),
        )
        client = self._dispatcher.engine = WorkerClient(channel, self._dispatcher)
        gone = asyncio.create_task(process.wait())
        watchdog_task = asyncio.create_task(self._run_watchdog(watchdog, channel, interval))
        try:
            channel.send(WorkerInit(parent_pid=os.getpid(), settings=settings, files=files))
            await asyncio.wait(
                {gone, channel.closed, watchdog_task}, return_when=asyncio.FIRST_COMPLETED
            )
            if channel.closed.done() and (error := channel.closed.result()) is not None:
                log.error("%s: cannot decode a message from its process", name, exc_info=error)
                message = f"the {name} process sent a message that cannot be decoded"
                self._fail_and_kill(AppError(ErrorKind.ENGINE, message))
            if not self._stopping:
                # The channel was closed. The process may be about to exit with a reason.
                await asyncio.wait({gone}, timeout=_EXIT_TIMEOUT)
                if not gone.done():
                    self._fail_disconnected(name, process.last_output)
            process_exit = await gone
            # Read the last events before the failure is reported, because they show which jobs the
            # process had received.
            await asyncio.wait({channel.closed}, timeout=_EXIT_TIMEOUT)
            self._report_exit(name, process_exit)
        finally:
            watchdog_task.cancel()
            await asyncio.gather(watchdog_task, return_exceptions=True)
            channel.close()

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

    def _handle_event(self, event: WorkerEvent, client: WorkerClient, watchdog: Watchdog) -> None:
        watchdog.note_message()
        match event:
            case ProbeReply():
                watchdog.note_probe_reply(event)
            case LoadProgress():
                watchdog.note_load_progress(event)
                self._dispatcher.receive(event)
            case EngineReady():
                watchdog.note_ready()
                self._dispatcher.receive(event)
            case EngineFailed():
                self._dispatcher.receive(event)
                self._fail_and_kill(AppError(event.kind, event.message))
            case _:
                client.receive(event)

    async def _run_watchdog(
        self, watchdog: Watchdog, channel: Channel[WorkerEvent], interval: float
    ) -> None:
        """Probes the process. Returns when it is hung."""
        while True:
            channel.send(Probe())
            await asyncio.sleep(interval)
            if (stall := watchdog.check()) is not None:
                break
        loading = self._dispatcher.status().state == "loading"
        kind = ErrorKind.MODEL_FILES if loading else ErrorKind.ENGINE
        self._fail_and_kill(AppError(kind, stall.message), stuck_since_ns=stall.stuck_since_ns)

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
