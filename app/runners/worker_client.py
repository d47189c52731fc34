"""The client of a model process, which sends requests over HTTP on a Unix socket, and reads events
from a pipe.

Knows: the protocol, an HTTP client. Must not know: processes, admission.
"""

import asyncio
import errno
import logging
import math
import socket
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
)
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

from app.core.embeddings import EmbedJob, EmbedResult
from app.core.errors import AppError, ErrorKind
from app.core.jobs import Job
from app.core.prefix_snapshot import PrefixSnapshot
from app.runners import worker_protocol
from app.runners.dispatcher import Dispatcher
from app.runners.event_pipe import read_events
from app.runners.worker_protocol import WorkerEvent, WorkerStatus

log = logging.getLogger(__name__)

# These libraries would log every internal request to a model process.
for _chatty in ("httpx2", "httpcore2"):
    logging.getLogger(_chatty).setLevel(logging.WARNING)

# There is no timeout, because a request may wait for a long prefill. A request ends with the
# process at the latest, and ProcessRunner's watchdog kills a hung process.
_NO_TIMEOUT = httpx2.Timeout(None)

# The connection pools. Each connection uses a file descriptor, and each request in progress uses a
# connection; further requests wait. Slow requests, which
# compile a grammar or compute embeddings, have a separate pool, so that other requests do not wait
# for them. keepalive_expiry is less than the worker's keep-alive timeout.
_FAST_POOL = httpx2.Limits(max_connections=32, max_keepalive_connections=16, keepalive_expiry=60.0)
_SLOW_POOL = httpx2.Limits(max_connections=64, max_keepalive_connections=4, keepalive_expiry=60.0)

# A probe opens a new connection, like a job that finds no idle one.
_PROBE_POOL = httpx2.Limits(max_keepalive_connections=0)

# System errors that mean that the resources for a connection are exhausted: the file descriptors of
# this process or of the machine, the memory for a socket, or ports.
_EXHAUSTION_ERRNOS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN}
)

# How long to retry when resources are exhausted, and the delay between two attempts, in seconds.
_EXHAUSTION_TIMEOUT, _RETRY_DELAY = 2.0, 0.05

# The timeout in seconds for requests to finish after the process has exited.
_CLOSE_TIMEOUT = 1.0


class WorkerClient:
    """Implements `EngineClient` for a model process.

    socket_path: the path of its Unix socket.
    events: the parent's end of its event pipe, which is closed with the client.
    dispatcher: receives the results of embedding jobs.
    """

    def __init__(self, socket_path: Path, events: socket.socket, dispatcher: Dispatcher) -> None:
        self._http, self._slow_http, self._probe_http = (
            httpx2.AsyncClient(
                base_url="http://worker",
                transport=httpx2.AsyncHTTPTransport(
                    uds=str(socket_path), verify=False, trust_env=False, limits=limits
                ),
                # Ignore proxies from the environment, and do not load certificates.
                trust_env=False,
                timeout=_NO_TIMEOUT,
            )
            for limits in (_FAST_POOL, _SLOW_POOL, _PROBE_POOL)
        )
        self._events = events
        self._dispatcher = dispatcher
        self._disconnected = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submitting: dict[str, asyncio.Task[None]] = {}
        self._embedding: dict[str, asyncio.Task[None]] = {}

    async def status(self) -> WorkerStatus:
        """Requests the status of the process. Raises ConnectionError if the request fails."""
        with _as_connection_error():
            reply = await _request_with_retry(lambda: self._http.get("/v1/status"), math.inf)
            reply.raise_for_status()
        return worker_protocol.WORKER_STATUS.decode(reply.content)

    def stream_events(self) -> AsyncGenerator[WorkerEvent]:
        """Yields the events of the process. May be called only once. The process exits when the
        iterator is closed. Iterating may raise ConnectionError."""
        return read_events(self._events)

    async def probe(self) -> None:
        """Sends a command on the same path as a job over a new connection, and returns when the
        engine has accepted it. Raises ConnectionError if the connection fails, and another OSError
        if the resources for a connection are exhausted."""
        with _as_connection_error():
            reply = await _request_with_retry(lambda: self._probe_http.post("/v1/probe"), 0)
            reply.raise_for_status()

    async def get_prefix_snapshot(self) -> PrefixSnapshot:
        """Implements `EngineClient.get_prefix_snapshot`."""
        with _as_connection_error():
            reply = await self._http.get("/v1/prefix")
            reply.raise_for_status()
        return worker_protocol.PREFIX_SNAPSHOT.decode(reply.content)

    async def wait_until_disconnected(self) -> None:
        """Returns when the process has closed a connection without a complete response."""
        await self._disconnected.wait()

    async def submit(self, job: Job) -> None:
        """Submits a job. If this call is cancelled, the request still completes, so that the job
        can be cancelled reliably afterwards."""
        posting = self._submitting[job.id] = self._start_task(self._post_job(job))
        posting.add_done_callback(lambda done: self._on_submitted(job.id, done))
        await asyncio.wait({posting})
        if posting.cancelled():
            raise await self._dispatcher.get_failure()
        posting.result()

    def _on_submitted(self, job: str, posting: asyncio.Task[None]) -> None:
        del self._submitting[job]
        if not posting.cancelled():
            posting.exception()  # marks it as retrieved, because `submit` may have been cancelled

    def embed(self, job: EmbedJob) -> None:
        asking = self._embedding[job.id] = self._start_task(self._post_embed_job(job))
        asking.add_done_callback(lambda done: self._on_embedded(job.id, done))

    def _on_embedded(self, job: str, asking: asyncio.Task[None]) -> None:
        del self._embedding[job]
        if asking.cancelled() or (error := asking.exception()) is None:
            return
        if not isinstance(error, AppError):
            log.error("cannot decode the response to an embedding job", exc_info=error)
            error = AppError(ErrorKind.ENGINE, str(error))
        self._dispatcher.fail_embedding(job, error)

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        self._start_task(self._cancel_job(job, keep))

    async def close(self) -> None:
        """Closes all connections after the process has exited. Requests first get time to finish.
        If a task were cancelled while the connection pool closes several connections, the remaining
        connections would stay open forever."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()
        await self._slow_http.aclose()
        await self._probe_http.aclose()
        self._events.close()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _post(self, path: str, body: bytes, *, slow: bool) -> httpx2.Response:
        """Sends a POST request. `slow` selects the connection pool for slow requests. Raises the
        AppError of the response, or an AppError with the reason why there is no response."""
        http = self._slow_http if slow else self._http
        try:
            reply = await _request_with_retry(
                lambda: http.post(path, content=body), _EXHAUSTION_TIMEOUT
            )
        except OSError as error:
            message = (
                "the server is out of file descriptors and cannot run the request: try again in a "
                "moment, or raise its limit on open files (ulimit -n)"
            )
            raise AppError(
                ErrorKind.OVERLOADED, message, code="out_of_resources", retry_after=1
            ) from error
        except httpx2.HTTPError as error:
            # The socket listens as long as the process runs. A failed connect therefore means that
            # the process has exited, or that the path of the socket was removed, which probes
            # detect. Any other error means that the process has just closed the connection.
            if not isinstance(error, httpx2.ConnectError):
                self._disconnected.set()
            raise await self._dispatcher.get_failure() from error
        if reply.status_code == 422:
            raise worker_protocol.build_app_error(worker_protocol.ERROR_BODY.decode(reply.content))
        if not reply.is_success:
            raise AppError(
                ErrorKind.ENGINE, f"the engine process returned HTTP {reply.status_code}"
            )
        return reply

    async def _post_job(self, job: Job) -> None:
        await self._post("/v1/jobs", worker_protocol.JOB.encode(job), slow=job.grammar is not None)

    async def _post_embed_job(self, job: EmbedJob) -> None:
        """Posts an embedding job. The response contains one embedding per input, all with the same
        size."""
        reply = await self._post("/v1/embed", worker_protocol.EMBED_JOB.encode(job), slow=True)
        data, count = reply.content, len(job.inputs)
        size = len(data) // count
        vectors = tuple(data[i * size : (i + 1) * size] for i in range(count))
        self._dispatcher.finish_embedding(EmbedResult(job_id=job.id, vectors=vectors))

    async def _cancel_job(self, job: str, keep: int | None) -> None:
        if (posting := self._submitting.get(job)) is not None and not posting.done():
            # The grammar may still be compiling, or the process may not have read the job yet.
            await self._delete(job, early=1)
            await asyncio.wait({posting})
            if posting.cancelled() or posting.exception() is not None:
                return
        if (asking := self._embedding.get(job)) is not None:
            asking.cancel()
        await self._delete(job, **({} if keep is None else {"keep": keep}))

    async def _delete(self, job: str, **parameters: int) -> None:
        path = f"/v1/jobs/{quote(job, safe='')}"
        with suppress(httpx2.HTTPError):  # the process has exited, so the job has ended
            # Retry without limit, because otherwise the job would continue without a reader.
            await _request_with_retry(lambda: self._http.delete(path, params=parameters), math.inf)


async def _request_with_retry(
    send: Callable[[], Awaitable[httpx2.Response]], limit: float
) -> httpx2.Response:
    """Sends a request. While the resources for a connection are exhausted, retries for up to
    `limit` seconds, and then raises OSError. Raises HTTPError for any other error."""
    until = time.monotonic() + limit
    while True:
        try:
            return await send()
        except (httpx2.HTTPError, OSError) as error:
            exhausted = _find_exhaustion(error)
            if exhausted is None:
                raise
            if time.monotonic() >= until:
                raise exhausted from error
        await asyncio.sleep(_RETRY_DELAY)


def _find_exhaustion(error: BaseException | None) -> OSError | None:
    """Returns the OSError for exhausted resources in the chain of an exception, or None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _EXHAUSTION_ERRNOS:
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def _as_connection_error() -> Generator[None]:
    """Converts errors of the HTTP client to ConnectionError."""
    try:
        yield
    except httpx2.HTTPError as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
