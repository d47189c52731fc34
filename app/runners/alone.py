"""Jobs that run one at a time, whatever else runs beside them.

Knows: asyncio, submissions. Must not know: why (see `app.runners.suspects`), whose runner it is.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Self

from app.core.errors import AppError, Kind
from app.core.jobs import Ended, Job, Update
from app.core.ports import Submission

# seconds after which the next one's turn comes, though the one before is still at it: most of what
# a prompt can break is broken by then, and a long answer must not keep others waiting for minutes
_LONGEST_TURN = 30.0

Submit = Callable[[Job], AbstractAsyncContextManager[Submission]]


class Alone:
    """Turns. most: who may wait for one."""

    def __init__(self, most: int, longest: float = _LONGEST_TURN) -> None:
        self._most = most
        self._longest = longest
        self._waiting = 0
        self._free = asyncio.Semaphore(1)

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Raises AppError(BUSY) when too many wait."""
        if self._waiting >= self._most:
            raise AppError(
                Kind.BUSY,
                "prompts that were running when the model failed are retried one at a "
                "time, and too "
                "many are already waiting; try again later",
                retry_after=round(self._longest),
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

        timer = asyncio.get_running_loop().call_later(self._longest, end)
        try:
            yield
        finally:
            timer.cancel()
            end()


class Apart:
    """A job that waits for its turn. It is read by a task of its own, so that the turn ends with
    the job and not with a client that is slow to read. What `submit` raises is raised where it is
    iterated: nobody may be kept from entering, since a request enters all of its jobs before it
    reads the first, and would wait for itself.

    ended_well: told of a job that came to its end."""

    def __init__(
        self, job: Job, submit: Submit, alone: Alone, ended_well: Callable[[Job], None]
    ) -> None:
        self._job = job
        self._submit = submit
        self._alone = alone
        self._ended_well = ended_well
        self._updates: asyncio.Queue[Update | Exception] = asyncio.Queue()
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

    async def __aiter__(self) -> AsyncIterator[Update]:
        while True:
            update = await self._updates.get()
            if isinstance(update, Exception):
                raise update
            yield update
            if isinstance(update, Ended):
                return

    @property
    def started(self) -> int | None:
        return None if self._submission is None else self._submission.started

    @property
    def ended(self) -> int | None:
        return None if self._submission is None else self._submission.ended

    def keep(self, tokens: int) -> None:
        # nothing is seen of a job before it is submitted
        assert self._submission is not None
        self._submission.keep(tokens)

    async def _read(self) -> None:
        try:
            async with self._alone.turn(), self._submit(self._job) as submission:
                self._submission = submission
                async for update in submission:
                    self._updates.put_nowait(update)
                    if isinstance(update, Ended) and update.reason in ("stop", "length"):
                        self._ended_well(self._job)
        except Exception as error:
            self._updates.put_nowait(error)
