"""The event loop's watchdog: measures how late it is, and reports when it does not run at all.

Knows: asyncio, threads, stacks. Must not know: what runs on the loop.

A task on the loop measures its lag and counts; a thread looks at the count. What blocks the loop is
a defect of ours, and the stack that the log shows names it. A process whose loop stays blocked
serves no request and cannot say so: it ends, so that what supervises it starts another. The thread
counts its own looks, not seconds: a machine that slept, or a process that was stopped, is not hung.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

from app.core.server_stats import EventLoopLag

log = logging.getLogger(__name__)

# Seconds between two measurements, and between two looks at them.
_MEASURE_INTERVAL, _CHECK_INTERVAL = 0.05, 0.25

# Seconds without a turn of the loop after which the log says so.
_WARN_AFTER = 1.0

# The least that a watchdog may be set to: a machine that swaps may stop everything for seconds.
_MIN_TIMEOUT = 30.0

# EX_SOFTWARE of sysexits.h.
_EXIT_STATUS = 70


class EventLoopWatchdog:
    """lag: where measurements go. watchdog: seconds without a turn after which `on_hang` is
    called."""

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
        """Watches the running loop until this is left."""
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
        turns, looks, reported = -1, 0, False
        while not self._ended.wait(_CHECK_INTERVAL):
            if turns != self._ticks:
                if reported:
                    log.warning("the event loop resumed after %.1f s", looks * _CHECK_INTERVAL)
                turns, looks, reported = self._ticks, 0, False
                continue
            looks += 1
            if looks * _CHECK_INTERVAL >= _WARN_AFTER and not reported:
                reported = True
                log.warning(
                    "the event loop has been blocked for %.1f s, at:\n%s",
                    looks * _CHECK_INTERVAL,
                    self._format_loop_stack(),
                )
            if looks * _CHECK_INTERVAL >= self._timeout:
                log.critical(
                    "the event loop was blocked for %.0f s: exiting", looks * _CHECK_INTERVAL
                )
                self._on_hang()
                return

    def _format_loop_stack(self) -> str:
        # public, in spite of its name: documented in `sys`
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        frame = frames.get(self._loop_thread)
        return "" if frame is None else "".join(traceback.format_stack(frame))


def _dump_stacks_and_exit() -> None:
    """With what every thread is at, for the report of the defect. Runners end with their parent."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    with suppress(RuntimeError, OSError, ValueError):  # there may be no stderr
        faulthandler.dump_traceback()
    os._exit(_EXIT_STATUS)
