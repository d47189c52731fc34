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

from app.core.loop_lag import LoopLag

log = logging.getLogger(__name__)

# Seconds between two measurements, and between two looks at them.
_MEASURE, _LOOK = 0.05, 0.25

# Seconds without a turn of the loop after which the log says so.
_STALL = 1.0

# The least that a watchdog may be set to: a machine that swaps may stop everything for seconds.
_LEAST = 30.0

# EX_SOFTWARE of sysexits.h.
_STATUS = 70


class LoopMonitor:
    """lag: where measurements go. watchdog: seconds without a turn after which `hung` is called."""

    def __init__(
        self, lag: LoopLag, *, watchdog: float, hung: Callable[[], None] | None = None
    ) -> None:
        self._lag = lag
        self._limit = max(_LEAST, watchdog)
        self._hung = hung or _end_process
        self._turns = 0  # written by the loop, read by the thread
        self._loop_thread = 0
        self._ended = threading.Event()

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None]:
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
            due = now() + _MEASURE
            await asyncio.sleep(_MEASURE)
            self._lag.note(max(0.0, now() - due))
            self._turns += 1

    def _watch(self) -> None:
        turns, looks, reported = -1, 0, False
        while not self._ended.wait(_LOOK):
            if turns != self._turns:
                if reported:
                    log.warning("the event loop resumed after %.1f s", looks * _LOOK)
                turns, looks, reported = self._turns, 0, False
                continue
            looks += 1
            if looks * _LOOK >= _STALL and not reported:
                reported = True
                log.warning(
                    "the event loop has been blocked for %.1f s, at:\n%s", looks * _LOOK, self._at()
                )
            if looks * _LOOK >= self._limit:
                log.critical("the event loop was blocked for %.0f s: exiting", looks * _LOOK)
                self._hung()
                return

    def _at(self) -> str:
        # public, in spite of its name: documented in `sys`
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        frame = frames.get(self._loop_thread)
        return "" if frame is None else "".join(traceback.format_stack(frame))


def _end_process() -> None:
    """With what every thread is at, for the report of the defect. Runners end with their parent."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    with suppress(RuntimeError, OSError, ValueError):  # there may be no stderr
        faulthandler.dump_traceback()
    os._exit(_STATUS)
