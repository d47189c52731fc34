"""Snapshots of a model's prefix cache for clients that watch an engine, and calls to an engine
thread.

Knows: functions that call back, the clock. Must not know: the runner, the engine, HTTP. All
code runs on the event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from app.core.errors import AppError
from app.core.jobs import CallResult, PrefixSnapshot

# The minimum number of seconds between two snapshots, however many clients watch.
REFRESH_SECONDS = 1.0

# The timeout in seconds of a fetch. A step of the engine may take this long.
_FETCH_TIMEOUT = 30.0


async def call_engine(
    command: Callable[[Callable[[CallResult | AppError], None]], None],
) -> CallResult:
    """Returns the value that `command` passes to its argument, which it may call on another thread,
    or raises it if it is an AppError. Waits forever if `command` never calls it."""
    loop = asyncio.get_running_loop()
    reply: asyncio.Future[CallResult] = loop.create_future()

    def set_result(value: CallResult | AppError) -> None:
        if reply.done():
            return
        if isinstance(value, AppError):
            reply.set_exception(value)
        else:
            reply.set_result(value)

    def post(value: CallResult | AppError) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result, value)

    command(post)
    return await reply


class SnapshotRefresh:
    """The last snapshot of one runner. fetch: gets a snapshot from the engine. It may raise
    AppError, for example if the engine has ended."""

    def __init__(self, fetch: Callable[[], Awaitable[PrefixSnapshot]]) -> None:
        self._fetch = fetch
        self._latest: PrefixSnapshot | None = None
        self._fetched_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def get(self) -> PrefixSnapshot | None:
        """Returns the last snapshot, and starts to fetch a new one unless the last one is recent or
        a fetch runs. Without calls, nothing is fetched."""
        if self._task is None and time.monotonic() - self._fetched_at >= REFRESH_SECONDS:
            self._fetched_at = time.monotonic()
            self._task = asyncio.create_task(self._refresh())
            self._task.add_done_callback(self._forget_task)
        return self._latest

    def cancel(self) -> None:
        """Ends a running fetch. Call this method when the runner ends."""
        if self._task is not None:
            self._task.cancel()

    async def _refresh(self) -> None:
        with suppress(AppError, TimeoutError):
            async with asyncio.timeout(_FETCH_TIMEOUT):
                self._latest = await self._fetch()

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "a snapshot of a prefix cache failed", "exception": error}
            task.get_loop().call_exception_handler(context)
