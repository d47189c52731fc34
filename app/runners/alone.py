"""Jobs that run one at a time, whatever else runs beside them.

Knows: asyncio, submissions. Must not know: why (see `app.runners.suspects`), whose runner it is.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Self

from app.core.errors import AppError, ErrorKind
from app.core.jobs import Ended, Job, JobUpdate
from app.core.ports import Submission

# seconds after which the next one's turn comes, though the one before is still at it: most of what
# a prompt can break is broken by then, and a long answer must not keep others waiting for minutes
_MAX_TURN = 30.0

SubmitJob = Callable[[Job], AbstractAsyncContextManager[Submission]]


class SerialTurns:
    """Turns. max_waiting: who may wait for one."""

    def __init__(self, max_waiting: int, max_turn: float = _MAX_TURN) -> None:
        self._max_waiting = max_waiting
        self._max_turn = max_turn
        self._waiting = 0
        self._free = asyncio.Semaphore(1)

    @asynccontextmanager
    async def take_turn(self) -> AsyncGenerator[None]:
        """Raises AppError(BUSY) when too many wait."""
        if self._waiting >= self._max_waiting:
            raise AppError(
                ErrorKind.BUSY,
                "prompts that were running when the model failed are retried one at a "
                "time, and too "
                "many are already waiting; try again later",
                retry_after=round(self._max_turn),
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        over = False

        def end() -> None:
            nonlocal over
            if not over:
                over = True
                self._free.release()

        timer = asyncio.get_running_loop().call_later(self._max_turn, end)
        try:
            yield
        finally:
            timer.cancel()
            end()


class IsolatedSubmission:
    """A job that waits for its turn. It is read by a task of its own, so that the turn ends with
    the job and not with a client that is slow to read. What `submit` raises is raised where it is
    iterated: nobody may be kept from entering, since a request enters all of its jobs before it
    reads the first, and would wait for itself.

    on_success: told of a job that came to its end."""

    def __init__(
        self, job: Job, submit: SubmitJob, turns: SerialTurns, on_success: Callable[[Job], None]
    ) -> None:
        self._job = job
        self._submit = submit
        self._turns = turns
        self._on_success = on_success
        self._updates: asyncio.Queue[JobUpdate | Exception] = asyncio.Queue()
        self._submission: Submission | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[JobUpdate]:
        while True:
            update = await self._updates.get()
            if isinstance(update, Exception):
                raise update
            yield update
            if isinstance(update, Ended):
                return

    @property
    def started_ns(self) -> int | None:
        return None if self._submission is None else self._submission.started_ns

    @property
    def ended_ns(self) -> int | None:
        return None if self._submission is None else self._submission.ended_ns

    def limit_cached_tokens(self, tokens: int) -> None:
        # nothing is seen of a job before it is submitted
        assert self._submission is not None
        self._submission.limit_cached_tokens(tokens)

    async def _read(self) -> None:
        try:
            async with self._turns.take_turn(), self._submit(self._job) as submission:
                self._submission = submission
                async for update in submission:
                    self._updates.put_nowait(update)
                    if isinstance(update, Ended) and update.reason in ("stop", "length"):
                        self._on_success(self._job)
        except Exception as error:
            self._updates.put_nowait(error)
