"""The event loop watchdog: measures the event loop lag, and reports when the loop is blocked.

Knows: asyncio, threads, stacks. Must not know: the code that runs on the loop.

A task on the loop measures the lag and increments a counter, and a thread checks the counter. Code
that blocks the loop is a bug; the log contains its stack trace. If the loop stays blocked, the
process cannot respond to requests or health checks. It then exits, so that its supervisor restarts
it. The thread counts its own checks rather than seconds, so that a suspended machine or process is
not considered hung.
"""

import asyncio
import faulthandler
import gc
import logging
import os
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

from app.core.usage import EventLoopLag

log = logging.getLogger(__name__)

# The number of seconds between two measurements, and between two checks of the counter.
_MEASURE_INTERVAL, _CHECK_INTERVAL = 0.05, 0.25

# The number of seconds without an iteration of the loop after which a warning is logged.
_WARN_AFTER = 1.0

# The minimum timeout in seconds. On a machine that is swapping, any code may block for seconds.
_MIN_TIMEOUT = 30.0

# EX_SOFTWARE of sysexits.h.
_EXIT_STATUS = 70


class EventLoopWatchdog:
    """Watches one event loop. lag: receives the measurements. watchdog: the number of seconds
    without an iteration of the loop after which `on_hang` is called; at least 30. on_hang: the
    function to call; None dumps all stacks and exits the process."""

    def __init__(
        self, lag: EventLoopLag, *, watchdog: float, on_hang: Callable[[], None] | None = None
    ) -> None:
        self._lag = lag
        self._timeout = max(_MIN_TIMEOUT, watchdog)
        self._on_hang = on_hang or _dump_stacks_and_exit
        self._ticks = 0  # written by the loop, read by the thread
        self._loop_thread = 0
        self._ended = threading.Event()

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Watches the running loop until the context exits."""
        self._loop_thread = threading.get_ident()
        thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)
        measuring = asyncio.create_task(self._measure())
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)

    async def _measure(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            due = now() + _MEASURE_INTERVAL
            await asyncio.sleep(_MEASURE_INTERVAL)
            self._lag.observe(max(0.0, now() - due))
            self._ticks += 1

    def _watch(self) -> None:
        turns, num_checks, reported = -1, 0, False
        while not self._ended.wait(_CHECK_INTERVAL):
            if turns != self._ticks:
                if reported:
                    log.warning("the event loop resumed after %.1f s", num_checks * _CHECK_INTERVAL)
                turns, num_checks, reported = self._ticks, 0, False
                continue
            num_checks += 1
            if num_checks * _CHECK_INTERVAL >= _WARN_AFTER and not reported:
                reported = True
                self._report_blocked(num_checks * _CHECK_INTERVAL)
            if num_checks * _CHECK_INTERVAL >= self._timeout:
                log.critical(
                    "the event loop was blocked for %.0f s: exiting", num_checks * _CHECK_INTERVAL
                )
                self._on_hang()
                return

    def _report_blocked(self, seconds: float) -> None:
        if not log.isEnabledFor(logging.WARNING):
            return
        # `log.warning` could only add the stack of this thread
        message, stack = "the event loop has been blocked for %.1f s", self._format_loop_stack()
        record = log.makeRecord(
            log.name, logging.WARNING, __file__, 0, message, (seconds,), None, sinfo=stack
        )
        log.handle(record)

    def _format_loop_stack(self) -> str:
        # A collection during the call may free a threading.local and wait for the lock that the
        # call holds, which stops the process forever (python/cpython#106883, seen with 3.11.7).
        collects = gc.isenabled()
        gc.disable()
        try:
            # the `sys` documentation describes this function, so it is public in spite of its name
            frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        finally:
            if collects:
                gc.enable()
        frame = frames.get(self._loop_thread)
        if frame is None:
            return ""
        return "Stack (most recent call last):\n" + "".join(traceback.format_stack(frame))


def _dump_stacks_and_exit() -> None:
    """Prints the stacks of all threads, for a bug report, and exits. Model processes exit with
    their parent process."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    with suppress(RuntimeError, OSError, ValueError):  # the process may have no stderr
        faulthandler.dump_traceback()
    os._exit(_EXIT_STATUS)
