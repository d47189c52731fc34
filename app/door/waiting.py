"""What somebody waits for, and how long yet.

Knows: time. Must not know: what is waited for.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Phase = TypeVar("Phase")


class PhaseTimer(Generic[Phase]):
    """phase: waited for at the moment. on_expire: called when that took too long, while it is still
    known what it was."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expire: Callable[[], None]) -> None:
        self._loop = loop
        self._on_expire = on_expire
        self._timer: asyncio.TimerHandle | None = None
        self.phase: Phase | None = None

    def start(self, phase: Phase, seconds: float) -> None:
        """Waiting longer for the same thing gives no more time."""
        if phase != self.phase:
            self.stop()
            self.phase = phase
            self._timer = self._loop.call_later(seconds, self._on_expire)

    def stop(self) -> None:
        self.phase = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
