"""The HTTP server inside a model process, which passes requests from the parent to the engine
thread.

Knows: the protocol, starlette, uvicorn, the engine thread. Must not know: text, clients, other
models.

Only the parent can open the server's Unix socket. The engine's messages are sent through a pipe,
with one line per engine step (not per token), one per received job, and heartbeats in between. The
server stops when the parent closes the pipe.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from app.core.embeddings import EmbedResult
from app.core.errors import AppError, ErrorKind
from app.core.jobs import (
    Capacity,
    EngineFailed,
    EngineMessage,
    EngineReady,
    EngineStats,
    Job,
    LoadProgress,
    StepOutput,
)
from app.core.requests import Grammar
from app.engine.loader import load
from app.engine.thread import EngineThread
from app.engine.wired_memory import unwire_memory
from app.grammar.compiler import GrammarCompiler, Matcher
from app.runners import worker_protocol
from app.runners.event_pipe import EventWriter
from app.runners.restart_policy import stop_grace
from app.runners.snapshot_refresh import take_snapshot
from app.runners.worker_protocol import JobReceived, WorkerEvent, WorkerInit, WorkerStatus

log = logging.getLogger(__name__)

# The values of Ollama's llm.ServerStatus.
_READY, _LOADING, _ERROR = 0, 3, 5

# The maximum number of stored IDs of jobs that were cancelled before they arrived. If an ID was
# dropped, the job must be cancelled again after it arrives.
_MAX_EARLY_CANCELLED = 1024

# The idle timeout of a connection in seconds. It is longer than the idle timeout of the parent's
# pool, so that the parent never uses a connection that is being closed.
_KEEP_ALIVE = 3600

# The part of the process's grace period in which the engine must finish its step. The rest is for
# its memory to be unwired if it does not.
_ENGINE_SHARE = 0.8


class WorkerServer:
    """The server. All code runs on the event loop, except `_post`."""

    def __init__(self, init: WorkerInit) -> None:
        files, settings = init.files, init.settings
        self._thread = EngineThread(
            lambda report: load(files, settings, report),
            self._post,
            check_invariants=settings.debug,
        )
        self._grammars = GrammarCompiler.for_model(files)
        # The jobs whose grammar is being compiled, and the jobs that were cancelled before they
        # arrived.
        self._compiling: dict[str, asyncio.Task[Matcher]] = {}
        self._early_cancelled: OrderedDict[str, None] = OrderedDict()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=init.socket_fd)
        self._heartbeat_interval = worker_protocol.heartbeat_interval(settings)
        self._state: LoadProgress | EngineReady | EngineFailed = LoadProgress(
            progress=0, allocated_bytes=0
        )
        self._stats = EngineStats()
        self._capacity: Capacity | None = None
        self._stop_requested_at = 0.0
        self._embedding: dict[str, asyncio.Future[EmbedResult]] = {}
        # The messages that the event loop has not received yet. Several may be received at once.
        self._messages: deque[EngineMessage] = deque()
        self._receive_scheduled = False
        self._events = EventWriter(
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=init.events_fd),
            on_close=self._stop,
        )
        self._heartbeats: asyncio.Task[None] | None = None  # once the model is loaded
        self._server = _UvicornServer(self._application(), on_exit=self._request_stop)
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        """Runs until a stop signal, or until the parent closes the event pipe."""
        asyncio.run(self._serve())
        self._stop_requested_at = self._stop_requested_at or time.monotonic()

    def stop_engine(self) -> bool:
        """Stops the engine. Returns whether it has stopped well before the parent would kill this
        process. If it has not, the process must unwire its memory and exit."""
        if isinstance(self._state, LoadProgress):
            return False
        self._thread.stop()
        grace = stop_grace(self._capacity, self._stats.ledger)
        return self._thread.join(
            max(0.0, self._stop_requested_at + _ENGINE_SHARE * grace - time.monotonic())
        )

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_handle_loop_exception)
        await self._events.open()
        self._thread.start()
        self._grammars.preload_tokenizer()
        await self._server.serve(sockets=[self._socket])
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        self._events.close()

    def _application(self) -> ASGIApp:
        routes = [
            Route("/v1/status", self._get_status, methods=["GET"]),
            Route("/v1/jobs", self._submit, methods=["POST"]),
            Route("/v1/jobs/{id}", self._cancel, methods=["DELETE"]),
            Route("/v1/embed", self._embed, methods=["POST"]),
            Route("/v1/prefix", self._get_prefix_snapshot, methods=["GET"]),
            Route("/v1/probe", self._probe, methods=["POST"]),
        ]
        errors = {AppError: _handle_app_error, MemoryError: _handle_memory_error}
        return Starlette(routes=routes, exception_handlers=errors)

    def _post(self, message: EngineMessage) -> None:
        assert self._loop is not None
        self._messages.append(message)
        # The event loop may already be closed when a stopping engine sends its last message.
        if not self._receive_scheduled and not self._loop.is_closed():
            self._receive_scheduled = True
            self._loop.call_soon_threadsafe(self._receive_all)

    def _receive_all(self) -> None:
        self._receive_scheduled = False  # before reading, so that no message is overlooked
        events: list[WorkerEvent] = []
        try:
            while self._messages:
                events += self._receive(self._messages.popleft())
            self._events.write(events)
        except BaseException:
            self._events.close()  # otherwise, the parent would wait for the lost events
            raise

    def _receive(self, message: EngineMessage) -> Iterable[WorkerEvent]:
        """Handles a message. Returns the events to send."""
        if isinstance(message, StepOutput):
            self._stats = message.stats
            for embedded in message.embed_results:
                self._finish_embedding(embedded)
            # Embeddings are sent in the response to /v1/embed, because megabytes of data must not
            # delay tokens.
            return worker_protocol.split_step(
                replace(message, embed_results=()) if message.embed_results else message
            )
        self._state = message
        if isinstance(message, EngineReady):
            self._stats, self._capacity = message.stats, message.capacity
            self._heartbeats = asyncio.create_task(self._send_heartbeats())
        if isinstance(message, EngineFailed):
            for job in self._embedding:
                self._finish_embedding(
                    EmbedResult(job_id=job, error=f"the engine stopped: {message.message}")
                )
            return [message]
        return []

    def _finish_embedding(self, embedded: EmbedResult) -> None:
        over = self._embedding.get(embedded.job_id)
        if over is not None and not over.done():
            over.set_result(embedded)

    def _request_stop(self) -> None:
        """Closes the event pipe. Must be reentrant, because it is called from a signal handler."""
        assert self._loop is not None
        self._stop_requested_at = time.monotonic()
        self._loop.call_soon_threadsafe(self._events.close)

    def _stop(self) -> None:
        """Stops the server, because the event pipe is closed."""
        self._server.should_exit = True

    async def _get_status(self, request: Request) -> Response:
        match self._state:
            case LoadProgress(progress=progress, allocated_bytes=memory):
                code, context = _LOADING, 0
            case EngineReady(capacity=capacity):
                code, context = _READY, capacity.context_length
                progress, memory = 100, self._stats.allocated_bytes
            case EngineFailed():
                code, progress, context, memory = _ERROR, 0, 0, 0
        status = WorkerStatus(
            Status=code,
            Progress=progress,
            ContextLength=context,
            Memory=memory,
            State=self._state,
        )
        return Response(worker_protocol.WORKER_STATUS.encode(status), media_type="application/json")

    async def _send_heartbeats(self) -> None:
        while True:
            # A heartbeat is redundant while other events wait. If the parent does not read,
            # heartbeats would accumulate in memory.
            if not self._events.has_unsent:
                self._events.write([self._thread.heartbeat()])
            await asyncio.sleep(self._heartbeat_interval)

    async def _submit(self, request: Request) -> Response:
        job = worker_protocol.JOB.decode(await request.body())
        self._events.write([JobReceived(job=job.id)])
        if job.id in self._early_cancelled:
            del self._early_cancelled[job.id]
            return Response(status_code=409)
        matcher = None
        if job.grammar is not None:
            matcher = await self._compile_grammar(job, job.grammar)
            if matcher is None:
                return Response(status_code=409)
        self._thread.submit(job, matcher)
        return Response(status_code=202)

    async def _compile_grammar(self, job: Job, grammar: Grammar) -> Matcher | None:
        """Compiles the grammar. Returns None if the job is cancelled before compilation finishes.
        Raises AppError if the grammar cannot be compiled."""
        work = self._grammars.compile_async(grammar, job.stop_token_ids, job.caller)
        compiling = self._compiling[job.id] = asyncio.create_task(work)
        try:
            await asyncio.wait({compiling})
            return None if compiling.cancelled() else compiling.result()
        finally:
            compiling.cancel()
            del self._compiling[job.id]

    async def _cancel(self, request: Request) -> Response:
        job, keep = request.path_params["id"], request.query_params.get("keep")
        compiling = self._compiling.get(job)
        if compiling is not None:
            compiling.cancel()
        elif "early" in request.query_params:
            self._early_cancelled[job] = None
            while len(self._early_cancelled) > _MAX_EARLY_CANCELLED:
                self._early_cancelled.popitem(last=False)
        self._thread.cancel(job, keep=None if keep is None else int(keep))
        self._finish_embedding(EmbedResult(job_id=job, error="the job was cancelled"))
        return Response(status_code=204)

    async def _probe(self, request: Request) -> Response:
        """Responds when the engine has accepted a command, on the same path as a job."""
        assert self._loop is not None
        loop, taken = self._loop, asyncio.Event()

        def done() -> None:
            loop.call_soon_threadsafe(taken.set)

        self._thread.probe(done)
        await taken.wait()
        return Response(status_code=204)

    async def _get_prefix_snapshot(self, request: Request) -> Response:
        body = worker_protocol.PREFIX_SNAPSHOT.encode(await take_snapshot(self._thread.inspect))
        return Response(body, media_type="application/json")

    async def _embed(self, request: Request) -> Response:
        """Responds with the concatenated embeddings of the inputs."""
        job = worker_protocol.EMBED_JOB.decode(await request.body())
        self._events.write([JobReceived(job=job.id)])
        over = self._embedding[job.id] = asyncio.get_running_loop().create_future()
        try:
            self._thread.embed(job)
            embedded = await over
        finally:
            del self._embedding[job.id]
        if embedded.error is not None:
            raise AppError(ErrorKind.ENGINE, embedded.error)
        return Response(b"".join(embedded.vectors), media_type="application/octet-stream")


async def _handle_app_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)
    body = worker_protocol.ERROR_BODY.encode(worker_protocol.build_error_body(error))
    return Response(body, status_code=422, media_type="application/json")


async def _handle_memory_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MemoryError)
    _exit_out_of_memory(error)


def _handle_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exits on a MemoryError of a task. Other errors are passed to asyncio's default handler."""
    if isinstance(error := context.get("exception"), MemoryError):
        _exit_out_of_memory(error)
    loop.default_exception_handler(context)


def _exit_out_of_memory(error: MemoryError) -> NoReturn:
    """Exits the process, so that it is restarted. Without memory, the process cannot read requests,
    but the watchdog does not detect this as long as the engine is running."""
    with suppress(MemoryError):
        log.critical("out of memory", exc_info=error)
        unwire_memory()
    os._exit(1)


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that stops on SIGINT, which the parent sends. `on_exit` is then called as
    well. SIGTERM is ignored."""

    def __init__(self, app: ASGIApp, on_exit: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                date_header=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=1,
            )
        )
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT:
            self.should_exit = True
            self._on_exit()
