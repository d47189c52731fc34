"""The line to a runner's process: requests down, news up, over loopback HTTP.

Knows: the wire, an HTTP client. Must not know: processes, who may submit how much. Imported when a
process is started and no sooner: the client takes a while to import, in which the process begins.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any
from urllib.parse import quote

import httpx2

from app.core.embeddings import Embedded, EmbedJob
from app.core.errors import AppError, Kind
from app.core.jobs import Job
from app.runners import wire
from app.runners.desk import Desk
from app.runners.wire import News, Status

log = logging.getLogger(__name__)

# they tell of every request, which is nobody's but ours
for _chatty in ("httpx2", "httpcore2"):
    logging.getLogger(_chatty).setLevel(logging.WARNING)

# Nothing here may take longer than the process lives, and whoever watches that ends it: so there is
# no time limit on a request, which may wait behind a long prefill.
_NO_LIMIT = httpx2.Timeout(None)

# One connection for the news, one for each request that is being handed over, and those kept for
# the next ones. Seconds: less than the other side keeps them.
_CONNECTIONS = httpx2.Limits(
    max_connections=None, max_keepalive_connections=16, keepalive_expiry=60.0
)

# seconds in which requests to a process that has ended end
_ENDING = 1.0

# bytes of one line of news: many times what 512 positions and their rivals take (`wire.split`)
_LONGEST_LINE = 1 << 24


class Line:
    """The engine of a desk."""

    def __init__(self, port: int, secret: str, desk: Desk) -> None:
        self._http = httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {secret}"},
            # no proxy of the environment's comes between, no certificates are read
            trust_env=False,
            verify=False,
            timeout=_NO_LIMIT,
            limits=_CONNECTIONS,
        )
        self._desk = desk
        self._hung_up = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submitting: dict[str, asyncio.Task[None]] = {}
        self._embedding: dict[str, asyncio.Task[None]] = {}

    async def status(self) -> Status:
        """Raises ConnectionError."""
        with _hung_up():
            reply = await self._http.get("/v1/status")
            reply.raise_for_status()
        return wire.STATUS.decode(reply.content)

    @asynccontextmanager
    async def news(self) -> AsyncGenerator[AsyncIterator[News]]:
        """May be asked for once; leaving it ends the process. Entering and iterating raise
        ConnectionError."""
        with _hung_up():
            async with self._http.stream("GET", "/v1/updates") as reply:
                reply.raise_for_status()
                async with aclosing(self._lines(reply)) as lines:
                    yield lines

    async def probe(self) -> None:
        """Returns when the engine has taken a command that came the way a job does. Raises
        ConnectionError where that way is broken."""
        with _hung_up():
            reply = await self._http.post("/v1/probe")
            reply.raise_for_status()

    async def hung_up(self) -> None:
        """Returns when the process has broken off one request, or left it without an answer."""
        await self._hung_up.wait()

    async def submit(self, job: Job) -> None:
        """The request goes on when this is cancelled: only then is it known what to cancel."""
        posting = self._submitting[job.id] = self._begin(self._submitted(job))
        posting.add_done_callback(lambda done: self._posted(job.id, done))
        await asyncio.wait({posting})
        if posting.cancelled():
            raise await self._desk.why()
        posting.result()

    def _posted(self, job: str, posting: asyncio.Task[None]) -> None:
        del self._submitting[job]
        if not posting.cancelled():
            posting.exception()  # its client may have left, and then nobody else asks for it

    def embed(self, job: EmbedJob) -> None:
        asking = self._embedding[job.id] = self._begin(self._embedded(job))
        asking.add_done_callback(lambda done: self._asked(job.id, done))

    def _asked(self, job: str, asking: asyncio.Task[None]) -> None:
        del self._embedding[job]
        if asking.cancelled() or (error := asking.exception()) is None:
            return
        if not isinstance(error, AppError):
            log.error("vectors that were asked for cannot be understood", exc_info=error)
        self._desk.hand_over(Embedded(job=job, error=str(error)))

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        self._begin(self._cancelled(job, keep))

    async def close(self) -> None:
        """Nothing more will come, and nobody waits for it. The process has ended, and with it what
        was asked of it: a task that is cancelled instead, while the client's pool closes several
        connections, leaves the rest of them open for good."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_ENDING)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _lines(self, reply: httpx2.Response) -> AsyncGenerator[News]:
        partial = bytearray()
        async for data in reply.aiter_raw():
            *lines, rest = data.split(b"\n")
            for line in lines:
                partial += line
                yield wire.NEWS.decode(partial)
                partial.clear()
            partial += rest
            if len(partial) > _LONGEST_LINE:
                raise ValueError("a line that does not end")
            # what is here already must not keep the others waiting
            await asyncio.sleep(0)

    async def _post(self, path: str, body: bytes) -> httpx2.Response:
        """Raises AppError: the one that was answered, or why nobody did."""
        try:
            reply = await self._http.post(path, content=body)
        except httpx2.HTTPError as error:
            # the socket listens as long as the process lives: who finds no way to it lacks
            # something on this side, say descriptors
            if not isinstance(error, httpx2.ConnectError):
                self._hung_up.set()
            raise await self._desk.why() from error
        if reply.status_code == 422:
            raise wire.app_error(wire.PROBLEM.decode(reply.content))
        if not reply.is_success:
            raise AppError(Kind.ENGINE, f"the engine's process answered {reply.status_code}")
        return reply

    async def _submitted(self, job: Job) -> None:
        await self._post("/v1/jobs", wire.JOB.encode(job))

    async def _embedded(self, job: EmbedJob) -> None:
        """A vector to each input, all of one length."""
        reply = await self._post("/v1/embed", wire.EMBED_JOB.encode(job))
        whole, count = reply.content, len(job.inputs)
        size = len(whole) // count
        vectors = tuple(whole[i * size : (i + 1) * size] for i in range(count))
        self._desk.hand_over(Embedded(job=job.id, vectors=vectors))

    async def _cancelled(self, job: str, keep: int | None) -> None:
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
        with suppress(httpx2.HTTPError):  # it is dead, and the job with it
            await self._http.delete(f"/v1/jobs/{quote(job, safe='')}", params=parameters)


@contextmanager
def _hung_up() -> Generator[None]:
    """The client's errors as one of ours."""
    try:
        yield
    except httpx2.HTTPError as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
