"""What somebody waits for, and how long yet.

Knows: time. Must not know: what is waited for.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

What = TypeVar("What")


class Waiting(Generic[What]):
    """what: waited for at the moment. expire: called when that took too long, while it is still
    known what it was."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[], None]) -> None:
        self._loop = loop
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None
        self.what: What | None = None

    def begin(self, what: What, seconds: float) -> None:
        """Waiting longer for the same thing gives no more time."""
        if what != self.what:
            self.end()
            self.what = what
            self._timer = self._loop.call_later(seconds, self._expire)

    def end(self) -> None:
        self.what = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
