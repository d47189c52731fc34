"""Reading of long request bodies: connections take turns, and all of them together get a share of
the event loop's time.

Knows: asyncio's transports, uvicorn's flow control, time. Must not know: HTTP, what is read.

A body costs time on the event loop for each byte, before anything can be known of the request, and
sockets that are ready to be read are read in each turn of the loop, however many there are. Without
a bound, a few clients that send long bodies make each turn take as long as they like.
"""

import asyncio
from collections import deque

from uvicorn.protocols.http.flow_control import FlowControl

from app.core.loop_share import LoopShare

# Bytes of one body that are read without waiting for a turn: most requests are shorter.
FREE = 16 * 1024

# 8 KiB take 0.03 ms here, and as long again outside of what is measured: 50 MB/s at most.
_SHARE = 0.2


class ReadingFlow(FlowControl):
    """uvicorn's flow control, with a second reason not to read: it is another connection's turn."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._held = self._stopped = False

    def pause_reading(self) -> None:
        self.read_paused = True
        self._apply()

    def resume_reading(self) -> None:
        self.read_paused = False
        self._apply()

    def hold_reading(self) -> None:
        self._held = True
        self._apply()

    def release_reading(self) -> None:
        self._held = False
        self._apply()

    def _apply(self) -> None:
        stop = self._held or self.read_paused
        if stop != self._stopped:
            self._stopped = stop
            if stop:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()


class BodyReads:
    """The connections of one server that read long bodies, in the order of their turns."""

    def __init__(self) -> None:
        self._share = LoopShare(_SHARE)
        self._waiting: deque[ReadingFlow] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def queue(self, flow: ReadingFlow, seconds: float) -> None:
        """A piece of a long body was read, which took so long: the next one waits for its turn."""
        self._share.charge(seconds)
        flow.hold_reading()
        self._waiting.append(flow)
        self._schedule()

    def remove(self, flow: ReadingFlow) -> None:
        """Its connection is closed, or reads no body any more."""
        if flow in self._waiting:
            self._waiting.remove(flow)
            flow.release_reading()

    def _schedule(self) -> None:
        if self._timer is None and self._waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._share.delay, self._release)

    def _release(self) -> None:
        """What is released is read in the loop's next turn, before timers are looked at again."""
        self._timer = None
        if not self._share.delay and self._waiting:
            self._waiting.popleft().release_reading()
        self._schedule()
