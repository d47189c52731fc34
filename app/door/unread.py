"""Whether a client reads what it is sent.

Knows: how much has not gone out, time. Must not know: what it is.
"""

import asyncio
from collections.abc import Callable

# Bytes that a client must have read of what waits for it to be given more time.
_PROGRESS = 16 * 1024


class Unread:
    """seconds: after so many without progress `give_up` is called, once: a client that reads
    nothing holds memory, and a place for as long as it likes. unsent: bytes that wait for it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        unsent: Callable[[], int],
        give_up: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._unsent = unsent
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Something has not gone out at once."""
        self.stop()
        self._timer = self._loop.call_later(self._seconds, self._look, self._unsent())

    def stop(self) -> None:
        """All has gone out, or never will."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, before: int) -> None:
        if self._unsent() <= before - _PROGRESS:
            self.watch()
        else:
            self._timer = None
            self._give_up()
