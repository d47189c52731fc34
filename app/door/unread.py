"""Whether a client reads what it is sent.

Knows: how much has not gone out, time, what the system says of a socket. Must not know: what is
sent.

What a client has read shows first in the system's own buffer, which on Linux grows to 4 MB. asyncio
hears nothing until a third of that is free, which at 57 kB/s takes longer than 20 s. So the bytes
in it count as unsent: their number falls whenever the client's system acknowledges some, and that
makes room for more as soon as the client reads.
"""

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Callable

# Bytes that a client must have read of what waits for it to be given more time.
_MIN_PROGRESS_BYTES = 16 * 1024


# bytes in a socket's send buffer, on macOS: <sys/socket.h>, where Python does not have it
_SO_NWRITE = 0x1024


def get_unacked_bytes(transport: asyncio.BaseTransport) -> int:
    """Bytes that the system holds for the other side, which has not acknowledged them; 0 where it
    does not say, or the socket is closed."""
    below: socket.socket | None = transport.get_extra_info("socket")
    if below is None:
        return 0
    with contextlib.suppress(OSError, ValueError):
        if sys.platform == "darwin":
            return below.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        (count,) = struct.unpack("i", fcntl.ioctl(below.fileno(), termios.TIOCOUTQ, bytes(4)))
        return int(count)
    return 0


class WriteStallTimer:
    """seconds: after so many without progress `on_stall` is called, once: a client that reads
    nothing holds memory, and a place for as long as it likes. get_unsent: bytes that wait for it,
    here and in the system."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        get_unsent: Callable[[], int],
        on_stall: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._get_unsent = get_unsent
        self._on_stall = on_stall
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Something has not gone out at once."""
        self.stop()
        self._timer = self._loop.call_later(self._seconds, self._check_progress, self._get_unsent())

    def stop(self) -> None:
        """All has gone out, or never will."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_progress(self, before: int) -> None:
        if self._get_unsent() <= before - _MIN_PROGRESS_BYTES:
            self.start()
        else:
            self._timer = None
            self._on_stall()
