"""SIGHUP, which asks for a reload of the settings and never ends the process.

Knows: signals, the event loop. Must not know: settings.

The handler is installed before the event loop runs, because a server may download and verify its
models for minutes before. A signal that arrives then causes a reload as soon as the loop runs.
"""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any] | int | None


class ReloadSignal:
    """Runs a reload after each signal, one at a time. Signals that arrive during a reload cause one
    more."""

    def __init__(self) -> None:
        self._requested = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._before: _Handler = None

    @contextmanager
    def handled(self) -> Generator[None]:
        """Handles the signal until the context exits. Has no effect outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # a handler rather than SIG_IGN, which child processes would inherit
        self._before = signal.signal(signal.SIGHUP, self._handle)
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Handles the signal as before. May be called again."""
        if self._before is not None:
            signal.signal(signal.SIGHUP, self._before)
            self._before = None

    async def run(self, reload: Callable[[], Awaitable[None]]) -> None:
        """Calls `reload` after each signal, until this call is cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._requested:
                    await self._wake.wait()
                self._wake.clear()
                self._requested = False
                await reload()
        finally:
            self._loop = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)
