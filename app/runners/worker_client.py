"""The line to a runner's process: requests down, news up, over loopback HTTP.

Knows: the wire, an HTTP client. Must not know: processes, who may submit how much. Imported when a
process is started and no sooner: the client takes a while to import, in which the process begins.
"""

import asyncio
import errno
import logging
import math
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
)
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any
from urllib.parse import quote

import httpx2

from app.core.embeddings import EmbedJob, EmbedResult
from app.core.errors import AppError, ErrorKind
from app.core.jobs import Job
from app.runners import worker_protocol
from app.runners.dispatcher import Dispatcher
from app.runners.worker_protocol import WorkerEvent, WorkerStatus

log = logging.getLogger(__name__)

# they tell of every request, which is nobody's but ours
for _chatty in ("httpx2", "httpcore2"):
    logging.getLogger(_chatty).setLevel(logging.WARNING)

# Nothing here may take longer than the process lives, and whoever watches that ends it: so there is
# no time limit on a request, which may wait behind a long prefill.
_NO_TIMEOUT = httpx2.Timeout(None)

# Connections at once, of which each takes a file descriptor: one for the news, one for each request
# that is being handed over. One more request waits for one of them. Those whose answer takes long,
# because a grammar is compiled or a vector computed, have their own, so that no other waits behind
# them. Seconds: less than the other side keeps a connection.
_FAST_POOL = httpx2.Limits(max_connections=32, max_keepalive_connections=16, keepalive_expiry=60.0)
_SLOW_POOL = httpx2.Limits(max_connections=64, max_keepalive_connections=4, keepalive_expiry=60.0)

# What the system says when there is nothing left to open a connection with: descriptors of this
# process or of the machine, memory for a socket, a port.
_EXHAUSTION_ERRNOS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)

# seconds for which a request waits for some of that, and between two tries
_EXHAUSTION_TIMEOUT, _RETRY_DELAY = 2.0, 0.05

# seconds in which requests to a process that has ended end
_CLOSE_TIMEOUT = 1.0

# bytes of one line of news: many times what 512 positions and their rivals take (`wire.split`)
_MAX_LINE_BYTES = 1 << 24


class WorkerClient:
    """The engine of a desk."""

    def __init__(self, port: int, secret: str, dispatcher: Dispatcher) -> None:
        self._http, self._slow_http = (
            httpx2.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                headers={"Authorization": f"Bearer {secret}"},
                # no proxy of the environment's comes between, no certificates are read
                trust_env=False,
                verify=False,
                timeout=_NO_TIMEOUT,
                limits=limits,
            )
            for limits in (_FAST_POOL, _SLOW_POOL)
        )
        self._dispatcher = dispatcher
        self._disconnected = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submitting: dict[str, asyncio.Task[None]] = {}
        self._embedding: dict[str, asyncio.Task[None]] = {}

    async def status(self) -> WorkerStatus:
        """Raises ConnectionError."""
        with _as_connection_error():
            reply = await _request_with_retry(lambda: self._http.get("/v1/status"), math.inf)
            reply.raise_for_status()
        return worker_protocol.WORKER_STATUS.decode(reply.content)

    @asynccontextmanager
    async def stream_events(self) -> AsyncGenerator[AsyncIterator[WorkerEvent]]:
        """May be asked for once; leaving it ends the process. Entering and iterating raise
        ConnectionError."""
        with _as_connection_error():
            async with self._http.stream("GET", "/v1/updates") as reply:
                reply.raise_for_status()
                async with aclosing(self._read_events(reply)) as lines:
                    yield lines

    async def probe(self) -> None:
        """Returns when the engine has taken a command that came the way a job does. Raises
        ConnectionError where that way is broken."""
        with _as_connection_error():
            reply = await _request_with_retry(lambda: self._http.post("/v1/probe"), math.inf)
            reply.raise_for_status()

    async def wait_until_disconnected(self) -> None:
        """Returns when the process has broken off one request, or left it without an answer."""
        await self._disconnected.wait()

    async def submit(self, job: Job) -> None:
        """The request goes on when this is cancelled: only then is it known what to cancel."""
        posting = self._submitting[job.id] = self._start_task(self._post_job(job))
        posting.add_done_callback(lambda done: self._on_submitted(job.id, done))
        await asyncio.wait({posting})
        if posting.cancelled():
            raise await self._dispatcher.get_failure()
        posting.result()

    def _on_submitted(self, job: str, posting: asyncio.Task[None]) -> None:
        del self._submitting[job]
        if not posting.cancelled():
            posting.exception()  # its client may have left, and then nobody else asks for it

    def embed(self, job: EmbedJob) -> None:
        asking = self._embedding[job.id] = self._start_task(self._post_embed_job(job))
        asking.add_done_callback(lambda done: self._on_embedded(job.id, done))

    def _on_embedded(self, job: str, asking: asyncio.Task[None]) -> None:
        del self._embedding[job]
        if asking.cancelled() or (error := asking.exception()) is None:
            return
        if not isinstance(error, AppError):
            log.error("cannot decode the response to an embedding job", exc_info=error)
        self._dispatcher.finish_embedding(EmbedResult(job_id=job, error=str(error)))

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        self._start_task(self._cancel_job(job, keep))

    async def close(self) -> None:
        """Nothing more will come, and nobody waits for it. The process has ended, and with it what
        was asked of it: a task that is cancelled instead, while the client's pool closes several
        connections, leaves the rest of them open for good."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()
        await self._slow_http.aclose()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read_events(self, reply: httpx2.Response) -> AsyncGenerator[WorkerEvent]:
        partial = bytearray()
        async for data in reply.aiter_raw():
            *lines, rest = data.split(b"\n")
            for line in lines:
                partial += line
                yield worker_protocol.WORKER_EVENT.decode(partial)
                partial.clear()
            partial += rest
            if len(partial) > _MAX_LINE_BYTES:
                raise ValueError("an event is longer than the maximum line length")
            # what is here already must not keep the others waiting
            await asyncio.sleep(0)

    async def _post(self, path: str, body: bytes, *, slow: bool) -> httpx2.Response:
        """Raises AppError: the one that was answered, or why nobody did. slow: whether the answer
        may take long."""
        http = self._slow_http if slow else self._http
        try:
            reply = await _request_with_retry(
                lambda: http.post(path, content=body), _EXHAUSTION_TIMEOUT
            )
        except OSError as error:
            message = (
                "the server is out of file descriptors and cannot run the request: try again in a "
                "moment, or raise its limit of open files (ulimit -n)"
            )
            raise AppError(
                ErrorKind.OVERLOADED, message, code="out_of_resources", retry_after=1
            ) from error
        except httpx2.HTTPError as error:
            # the socket listens as long as the process lives: a request that does not find it has
            # come after its end, and one that breaks off has come before
            if not isinstance(error, httpx2.ConnectError):
                self._disconnected.set()
            raise await self._dispatcher.get_failure() from error
        if reply.status_code == 422:
            raise worker_protocol.build_app_error(worker_protocol.ERROR_BODY.decode(reply.content))
        if not reply.is_success:
            raise AppError(
                ErrorKind.ENGINE, f"the engine's process returned HTTP {reply.status_code}"
            )
        return reply

    async def _post_job(self, job: Job) -> None:
        await self._post("/v1/jobs", worker_protocol.JOB.encode(job), slow=job.grammar is not None)

    async def _post_embed_job(self, job: EmbedJob) -> None:
        """A vector to each input, all of one length."""
        reply = await self._post("/v1/embed", worker_protocol.EMBED_JOB.encode(job), slow=True)
        whole, count = reply.content, len(job.inputs)
        size = len(whole) // count
        vectors = tuple(whole[i * size : (i + 1) * size] for i in range(count))
        self._dispatcher.finish_embedding(EmbedResult(job_id=job.id, vectors=vectors))

    async def _cancel_job(self, job: str, keep: int | None) -> None:
        if (posting := self._submitting.get(job)) is not None and not posting.done():
            # it may wait for its grammar, or not have been read yet
            await self._delete(job, early=1)
            await asyncio.wait({posting})
            if posting.cancelled() or posting.exception() is not None:
                return
        if (asking := self._embedding.get(job)) is not None:
            asking.cancel()
        await self._delete(job, **({} if keep is None else {"keep": keep}))

    async def _delete(self, job: str, **parameters: int) -> None:
        path = f"/v1/jobs/{quote(job, safe='')}"
        with suppress(httpx2.HTTPError):  # it is dead, and the job with it
            # as long as it takes, or the job would go on, with nobody to read it
            await _request_with_retry(lambda: self._http.delete(path, params=parameters), math.inf)


async def _request_with_retry(
    send: Callable[[], Awaitable[httpx2.Response]], limit: float
) -> httpx2.Response:
    """Asks again as long as there is nothing to open a connection with, for `limit` seconds.
    Raises OSError behind that, and HTTPError for whatever else is wrong."""
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
    """The system's refusal to open a connection, in what the client made of it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _EXHAUSTION_ERRNOS:
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def _as_connection_error() -> Generator[None]:
    """The client's errors as one of ours."""
    try:
        yield
    except httpx2.HTTPError as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
