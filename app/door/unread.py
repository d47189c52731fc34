"""Whether a client reads what it is sent.

Knows: a transport's buffer, time. Must not know: what is in it.
"""

import asyncio
from collections.abc import Callable

# Bytes that a client must have read of what waits for it to be given more time.
_PROGRESS = 16 * 1024


class Unread:
    """seconds: after so many without progress `give_up` is called, once: a client that reads
    nothing holds memory, and a place for as long as it likes."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, give_up: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """Whether something lies here that has not gone out."""
        return self._timer is not None

    def watch(self, transport: asyncio.WriteTransport) -> None:
        """Something has not gone out at once."""
        self.stop()
        size = transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._seconds, self._look, transport, size)

    def stop(self) -> None:
        """All has gone out, or never will."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, transport: asyncio.WriteTransport, before: int) -> None:
        if transport.get_write_buffer_size() <= before - _PROGRESS:
            self.watch(transport)
        else:
            self._timer = None
            self._give_up()
