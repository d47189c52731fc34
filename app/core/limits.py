"""Limits on the concurrent choices of a caller and on the duration of a request.

Knows: callers, the number of their running choices, the clock. Must not know: HTTP, models, how
output is generated. All code runs on the event loop.

A caller is the name of an API key. All clients without a key are one caller.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.core.units import pluralize
from app.core.usage import RequestUsage, UsageCounters

Result = TypeVar("Result")


class RequestLimits:
    """The limits of all requests, and the means to end all of them at once. settings: only
    `max_per_key` and `deadline` are used."""

    def __init__(self, settings: Settings, usage: UsageCounters | None = None) -> None:
        """usage: counts requests and tokens per caller; None creates it, without limits."""
        self._usage = usage or UsageCounters()
        self.apply(settings)
        self._active: Counter[str] = Counter()
        self._timeouts: set[asyncio.Timeout] = set()
        self._interrupts: set[Callable[[AppError], None]] = set()
        self._abort_error: AppError | None = None

    def apply(self, settings: Settings) -> None:
        """Applies new limits, to requests that arrive from now on."""
        self._max_per_caller = settings.max_per_key
        self._deadline = settings.deadline

    def abort_all(self, error: AppError) -> None:
        """Fails all running and future requests with this error."""
        self._abort_error = error
        now = asyncio.get_running_loop().time()
        for wait in self._timeouts:
            if not wait.expired():
                wait.reschedule(now)
        for interrupt in self._interrupts:
            interrupt(error)

    def compute_deadline(self) -> float | None:
        """Returns the deadline of a request that arrives now, on the event loop's clock, or None if
        there is no limit."""
        if self._deadline is None:
            return None
        return asyncio.get_running_loop().time() + self._deadline

    @contextmanager
    def admit(self, caller: str, count: int, param: str) -> Generator[RequestUsage]:
        """Counts `count` choices of a caller while the context is active. Returns the counter of
        the request's tokens. Raises AppError(INVALID) if `count` exceeds the caller's limit, and
        AppError(BUSY) if it exceeds what is left of the limit, or if the limits of the caller's key
        on its usage are exceeded."""
        limit, running = self._max_per_caller, self._active[caller]
        if limit is not None and count > limit:
            message = (
                f"the request asks for {pluralize(count, 'choice')}, but an API key can have at "
                f"most {limit} at a time: ask for fewer, or increase --max-per-key"
            )
            raise AppError(ErrorKind.INVALID, message, param=param)
        if limit is not None and running + count > limit:
            message = (
                f"this API key has {pluralize(running, 'choice')} in progress, and the limit is "
                f"{limit}: wait for one of them to finish"
            )
            raise AppError(ErrorKind.BUSY, message, code="too_many_requests", retry_after=1)
        self._usage.admit(caller)
        self._active[caller] += count
        try:
            yield self._usage.count(caller)
        finally:
            self._active[caller] -= count
            if not self._active[caller]:
                del self._active[caller]

    @contextmanager
    def interrupt_at(
        self, deadline: float | None, interrupt: Callable[[AppError], None]
    ) -> Generator[None]:
        """While the context is active, calls `interrupt` with an error at the deadline and on
        `abort_all`."""
        if self._abort_error is not None:
            interrupt(self._abort_error)
        self._interrupts.add(interrupt)
        timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_at(deadline, lambda: interrupt(self._deadline_error()))
        try:
            yield
        finally:
            self._interrupts.discard(interrupt)
            if timer is not None:
                timer.cancel()

    async def wait(
        self, result: Callable[[], Awaitable[Result]], deadline: float | None = None
    ) -> Result:
        """Awaits a result. Raises AppError(DEADLINE) at the deadline, or the error passed to
        `abort_all`."""
        if self._abort_error is not None:
            raise self._abort_error
        if deadline is not None and asyncio.get_running_loop().time() >= deadline:
            raise self._deadline_error()
        wait = asyncio.timeout_at(deadline)
        self._timeouts.add(wait)
        try:
            async with wait:
                return await result()
        except TimeoutError:
            if not wait.expired():
                raise
            raise self._abort_error or self._deadline_error() from None
        finally:
            self._timeouts.discard(wait)

    def _deadline_error(self) -> AppError:
        return AppError(
            ErrorKind.DEADLINE,
            f"the request exceeded the deadline of {self._deadline:g} s: "
            "request a shorter response, or increase --deadline",
        )
