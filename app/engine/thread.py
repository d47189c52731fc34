"""The engine thread: loads the model, runs the engine loop, and frees all device memory at the end.
No other thread uses MLX.

Knows: a function that loads the model, a function that receives messages. Must not know: asyncio,
HTTP, the process in which it runs.

Arrays and streams belong to the thread that created them. Therefore only plain data and compiled
grammars, which contain no tensors, are passed to and from the thread. Commands are received through
a queue. Messages are sent through `post`, which is called on this thread. Other threads can read
the current stage at any time, even if this thread hangs; see `Heartbeat`.
"""

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.core.jobs import (
    IDLE,
    CallResult,
    Capacity,
    EngineCall,
    EngineFailed,
    EngineMessage,
    EngineReady,
    EngineStats,
    Heartbeat,
    Job,
    LoadProgress,
    StepOutput,
)
from app.core.requests import EmbedJob
from app.engine.memory_profile import clear_allocator_cache
from app.engine.wired_memory import unwire_memory
from app.grammar.compiler import Matcher
from models import kernels

log = logging.getLogger(__name__)

# The interval in seconds between two calls to `EngineLoop.maintain_memory`.
MAINTENANCE_INTERVAL = 5.0


def release_device_memory() -> None:
    """Unwires and frees the device memory of a thread that is about to end. No references to its
    arrays may remain."""
    unwire_memory()
    gc.collect()
    clear_allocator_cache()
    mx.clear_streams()
    kernels.trim_memory()


class EngineLoop(Protocol):
    """The interface of the engine loop: either a single loop, or a loop that runs in lockstep with
    other ranks. The methods are the same as in `app.engine.loop.Loop`."""

    @property
    def on_stage(self) -> Callable[[str], None]: ...

    @on_stage.setter
    def on_stage(self, callback: Callable[[str], None]) -> None: ...

    @property
    def capacity(self) -> Capacity: ...

    @property
    def idle(self) -> bool: ...

    def submit(self, job: Job, matcher: Matcher | None = None) -> None: ...

    def embed(self, job: EmbedJob) -> None: ...

    def provide_images(self, job: str, images: Sequence[ImagePixels]) -> None: ...

    def cancel(self, job: str, *, keep: int | None = None) -> None: ...

    def step(self) -> StepOutput: ...

    def stats(self) -> EngineStats: ...

    def maintain_memory(self, idle_seconds: float) -> bool: ...

    def call(self, call: EngineCall[Any]) -> Any: ...

    def check(self) -> None: ...


LoadEngine = Callable[[Callable[[int, int], None]], EngineLoop]

# What another thread has asked for, handled between two steps.
_Command = Callable[[EngineLoop], None]


class _Probe:
    """A command without an effect on the loop. done: called when it is handled."""

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done

    def __call__(self, loop: EngineLoop) -> None:
        self.done()


class EngineThread:
    """The thread of one engine.

    load: loads the model. It is called on the thread, with a function that reports (percent,
        bytes).
    post: receives every message. It must not block.
    check_invariants: whether to assert all invariants of the prefix cache whenever the loop is
        idle. A violation ends the engine.
    maintenance_interval: the number of seconds between two calls to `EngineLoop.maintain_memory`.
    """

    def __init__(
        self,
        load: LoadEngine,
        post: Callable[[EngineMessage], None],
        *,
        check_invariants: bool = False,
        maintenance_interval: float = MAINTENANCE_INTERVAL,
    ) -> None:
        self._maintenance_interval = maintenance_interval
        self._check_invariants = check_invariants
        self._load = load
        self._post = post
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._stopping = False  # written only by the engine thread, like the heartbeat
        self._heartbeat = Heartbeat(timestamp_ns=time.monotonic_ns(), stage=IDLE)
        self._thread = threading.Thread(target=self._run, name="mlx-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job, matcher: Matcher | None = None) -> None:
        """Submits a job. The thread owns `matcher`, the compiled grammar of the job."""
        self._commands.put(lambda loop: loop.submit(job, matcher))

    def embed(self, job: EmbedJob) -> None:
        self._commands.put(lambda loop: loop.embed(job))

    def provide_images(self, job: str, images: Sequence[ImagePixels]) -> None:
        """Provides pixels that a job has requested, which may have ended."""
        self._commands.put(lambda loop: loop.provide_images(job, images))

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        self._commands.put(lambda loop: loop.cancel(job, keep=keep))

    def probe(self, done: Callable[[], None]) -> None:
        """Calls `done` on the thread when it handles this command, which shows that the thread is
        responsive and would accept a job."""
        self._commands.put(_Probe(done))

    def call(
        self, call: EngineCall[CallResult], done: Callable[[CallResult | AppError], None]
    ) -> None:
        """Handles a call between two steps. Calls `done` on the thread with the reply, or with the
        AppError that the call has raised, after changed statistics or capacities were posted."""
        self._commands.put(lambda loop: self._handle_call(call, done, loop))

    def stop(self) -> None:
        """Asks the thread to end. It ends between two steps."""
        self._commands.put(self._end)

    def join(self, timeout: float) -> bool:
        """Waits for up to `timeout` seconds, and returns whether the thread has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def heartbeat(self) -> Heartbeat:
        """Returns the current stage of the thread and the time at which it began. Any thread may
        call this method without locking, because the thread never modifies a heartbeat."""
        return self._heartbeat

    def _run(self) -> None:
        try:
            self._run_loop()
        except AppError as error:
            self._post(EngineFailed(kind=error.kind, message=error.message))
        except BaseException as error:  # must be reported, or callers would wait forever
            log.exception("the engine thread crashed")
            self._post(
                EngineFailed(
                    kind=ErrorKind.ENGINE, message=format_exception(error), is_internal_error=True
                )
            )
        finally:
            release_device_memory()

    def _run_loop(self) -> None:
        loop = self._load(
            lambda done, memory: self._post(LoadProgress(progress=done, allocated_bytes=memory))
        )
        loop.on_stage = self._set_heartbeat
        self._post(EngineReady(stats=loop.stats(), capacity=loop.capacity))
        due = time.monotonic() + self._maintenance_interval
        while True:
            self._handle_commands(loop)
            if self._stopping:
                # Before the buffers are freed, which is then faster, and even if that fails.
                unwire_memory()
                return
            self._set_heartbeat("a step")
            self._post(loop.step())
            if time.monotonic() >= due:
                self._set_heartbeat("memory maintenance")
                loop.maintain_memory(0.0)
                due = time.monotonic() + self._maintenance_interval

    def _set_heartbeat(self, doing: str) -> None:
        self._heartbeat = Heartbeat(timestamp_ns=time.monotonic_ns(), stage=doing)

    def _handle_commands(self, loop: EngineLoop) -> None:
        """Handles all queued commands. If the loop is idle, waits for the next command."""
        while loop.idle and not self._stopping:  # some commands leave it idle, without a step
            if self._check_invariants:
                loop.check()
            self._set_heartbeat(IDLE)
            command = self._wait_for_command(loop)
            self._set_heartbeat("handling commands")
            command(loop)
        while not self._commands.empty():
            self._commands.get()(loop)

    def _wait_for_command(self, loop: EngineLoop) -> _Command:
        """Waits for a command, and maintains the memory of the idle loop in the meantime. A probe
        does not end the idle time, or the memory of an idle engine would stay wired."""
        since = time.monotonic()
        due = since + self._maintenance_interval
        while True:
            try:
                command = self._commands.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                if loop.maintain_memory(time.monotonic() - since):
                    self._post(StepOutput(updates=(), stats=loop.stats()))
                due = time.monotonic() + self._maintenance_interval
            else:
                if not isinstance(command, _Probe):
                    return command
                command.done()

    def _end(self, loop: EngineLoop) -> None:
        self._stopping = True

    def _handle_call(
        self, call: EngineCall[Any], done: Callable[[Any], None], loop: EngineLoop
    ) -> None:
        capacity, stats = loop.capacity, loop.stats()
        try:
            reply = loop.call(call)
        except AppError as error:
            reply = error
        if loop.capacity != capacity:
            self._post(EngineReady(stats=loop.stats(), capacity=loop.capacity))
        elif loop.stats() != stats:
            self._post(StepOutput(updates=(), stats=loop.stats()))
        done(reply)


def format_exception(error: BaseException) -> str:
    """Returns the type and the message of an exception on one line. Python's MemoryError has no
    message."""
    message = str(error) or ("out of memory" if isinstance(error, MemoryError) else "")
    return f"{type(error).__name__}: {message}"
