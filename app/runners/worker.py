"""The model process: passes commands from the parent to the engine thread, and the engine's
messages back.

Knows: the protocol, the channel, the engine thread. Must not know: text, clients, other models.

The output of one engine step is one message. The process ends when the parent closes the channel.
"""

import asyncio
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, assert_never, cast

from msgspec.structs import replace

from app.core.errors import AppError, ErrorKind
from app.core.jobs import (
    Capacity,
    EngineCall,
    EngineMessage,
    EngineReady,
    EngineReply,
    EngineStats,
    Job,
    LoadProgress,
    StepOutput,
)
from app.core.requests import EmbedResult, Grammar
from app.engine.loader import load_engine
from app.engine.thread import EngineThread, format_exception
from app.engine.wired_memory import unwire_memory
from app.grammar.compiler import GrammarCompiler
from app.runners import worker_protocol
from app.runners.channel import Channel
from app.runners.restart_policy import stop_grace
from app.runners.snapshot_refresh import call_engine
from app.runners.worker_protocol import (
    Call,
    CallReply,
    Cancel,
    Command,
    Embed,
    JobAccepted,
    JobReceived,
    Probe,
    ProbeReply,
    ProvideImages,
    Rejected,
    Submit,
    WorkerEvent,
    WorkerInit,
)

log = logging.getLogger(__name__)

# The part of the process's grace period in which the engine must finish its step. The rest is for
# its memory to be unwired if it does not.
_ENGINE_SHARE = 0.8


class Worker:
    """The process. All code runs on the event loop, except `_post` and `_note_probe`."""

    def __init__(self, init: WorkerInit, end: socket.socket) -> None:
        files, settings = init.files, init.settings
        self._end = end
        self._thread = EngineThread(
            lambda report: load_engine(files, settings, report),
            self._post,
            check_invariants=settings.debug,
        )
        self._grammars = GrammarCompiler.for_model(files)
        self._compiling: dict[str, asyncio.Task[None]] = {}  # by job
        self._tasks: set[asyncio.Task[None]] = set()
        self._loaded = False
        self._stats = EngineStats()
        self._capacity: Capacity | None = None
        self._probe_taken = True  # set by the engine thread
        # The messages that the event loop has not received yet. Several may be received at once.
        self._messages: deque[EngineMessage] = deque()
        self._receive_scheduled = False
        # Cleared while the parent does not read. The engine then waits.
        self._parent_reads = threading.Event()
        self._parent_reads.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: Channel[Command] | None = None

    def run(self) -> None:
        """Runs until the parent closes the channel."""
        asyncio.run(self._run())

    def stop_engine(self) -> bool:
        """Stops the engine. Returns whether it has stopped well before the parent would kill this
        process. If it has not, the process must unwire its memory and exit."""
        if not self._loaded:
            return False
        self._thread.stop()
        return self._thread.join(_ENGINE_SHARE * stop_grace(self._capacity, self._stats.ledger))

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_handle_loop_exception)
        channel = self._channel = Channel(
            self._end, worker_protocol.COMMAND, self._handle_command, self._set_paused
        )
        self._thread.start()
        self._grammars.preload_tokenizer()
        error = await channel.closed
        if error is not None:
            _exit_failed(error)

    def _post(self, message: EngineMessage) -> None:
        assert self._loop is not None
        self._parent_reads.wait()
        self._messages.append(message)
        # The event loop may already be closed when a stopping engine sends its last message.
        if not self._receive_scheduled and not self._loop.is_closed():
            self._receive_scheduled = True
            self._loop.call_soon_threadsafe(self._receive_all)

    def _set_paused(self, paused: bool) -> None:
        if paused:
            self._parent_reads.clear()
        else:
            self._parent_reads.set()

    def _send(self, *events: WorkerEvent) -> None:
        assert self._channel is not None
        self._channel.send(*events)

    def _receive_all(self) -> None:
        self._receive_scheduled = False  # before reading, so that no message is overlooked
        events: list[WorkerEvent] = []
        try:
            while self._messages:
                events += self._receive(self._messages.popleft())
            self._send(*events)
        except Exception as error:
            _exit_failed(error)  # otherwise, the parent would wait for the lost events

    def _receive(self, message: EngineMessage) -> Iterable[WorkerEvent]:
        """Handles a message of the engine. Returns the events to send."""
        if isinstance(message, StepOutput):
            self._stats = message.stats
            if not message.embed_results:
                return worker_protocol.split_step(message)
            for result in message.embed_results:
                self._start_task(self._send_embeddings(result))
            return worker_protocol.split_step(replace(message, embed_results=()))
        if isinstance(message, EngineReady):
            self._stats, self._capacity = message.stats, message.capacity
        self._loaded = not isinstance(message, LoadProgress)
        return [message]

    async def _send_embeddings(self, result: EmbedResult) -> None:
        assert self._channel is not None
        for chunk in worker_protocol.split_embeddings(result):
            await self._channel.wait_until_sent()
            self._send(chunk)

    def _handle_command(self, command: Command) -> None:
        match command:
            case Submit(job=job):
                self._submit(job)
            case Embed(job=job):
                self._send(JobReceived(job=job.id))
                self._thread.embed(job)
            case ProvideImages():
                self._thread.provide_images(command.job, command.images)
            case Cancel():
                if (compiling := self._compiling.get(command.job)) is not None:
                    compiling.cancel()
                self._thread.cancel(command.job, keep=command.keep)
            case Probe():
                self._probe()
            case Call():
                self._start_task(self._call_engine(command))
            case _:
                assert_never(command)

    def _submit(self, job: Job) -> None:
        if job.grammar is not None:
            self._send(JobReceived(job=job.id))
            task = self._start_task(self._compile_and_submit(job, job.grammar))
            self._compiling[job.id] = task
            task.add_done_callback(lambda _: self._compiling.pop(job.id))
            return
        self._thread.submit(job)
        self._send(JobAccepted(job=job.id))

    async def _compile_and_submit(self, job: Job, grammar: Grammar) -> None:
        try:
            matcher = await self._grammars.compile_async(grammar, job.stop_token_ids, job.caller)
        except AppError as error:
            self._send(Rejected.from_error(job.id, error))
        except MemoryError as error:
            _exit_failed(error)
        except Exception as error:
            log.exception("compiling a grammar failed")
            failure = AppError(ErrorKind.ENGINE, format_exception(error))
            self._send(Rejected.from_error(job.id, failure))
        else:
            self._thread.submit(job, matcher)
            self._send(JobAccepted(job=job.id))

    def _probe(self) -> None:
        self._send(ProbeReply(heartbeat=self._thread.heartbeat(), takes_commands=self._probe_taken))
        if self._probe_taken:
            self._probe_taken = False
            self._thread.probe(self._note_probe)

    def _note_probe(self) -> None:
        self._probe_taken = True

    async def _call_engine(self, command: Call) -> None:
        call = cast("EngineCall[EngineReply]", command.call)
        try:
            reply = await call_engine(partial(self._thread.call, call))
        except AppError as error:
            self._send(Rejected.from_error(command.id, error))
        else:
            self._send(CallReply(id=command.id, reply=reply))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _handle_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exits on a MemoryError of a task. Other errors are passed to asyncio's default handler."""
    if isinstance(error := context.get("exception"), MemoryError):
        _exit_failed(error)
    loop.default_exception_handler(context)


def _exit_failed(error: Exception) -> NoReturn:
    """Exits the process, so that it is restarted. It can no longer communicate with the parent, but
    the watchdog does not detect this as long as the engine is running."""
    with suppress(MemoryError):
        log.critical("the model process failed", exc_info=error)
        unwire_memory()
    os._exit(1)
