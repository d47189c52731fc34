"""Reading of long request bodies: connections take turns, and all of them together get a share of
the event loop's time.

Knows: asyncio's transports, uvicorn's flow control, time. Must not know: HTTP, what is read.

A body costs time on the event loop for each byte, before anything can be known of the request, and
sockets that are ready to be read are read in each turn of the loop, however many there are. Without
a bound, a few clients that send long bodies make each turn take as long as they like.

A share of the event loop's time, for work that clients can ask for without end.
"""

import asyncio
import time
from collections import deque

from uvicorn.protocols.http.flow_control import FlowControl

# Seconds of work that may be done at once after a pause. Timers of an event loop fire up to a
# millisecond late, so without it short pieces of work would get less than their share.
_BURST_SECONDS = 0.002


class LoopTimeBudget:
    """All work of one kind takes `share` of the time at most, but for short bursts. Each piece
    waits for `delay_seconds`, and `charge` counts it afterwards."""

    def __init__(self, share: float) -> None:
        assert 0 < share <= 1
        self._share = share
        self._available_at = 0.0

    @property
    def delay_seconds(self) -> float:
        """Seconds until there is time for more of the work; 0 if there is now."""
        return max(0.0, self._available_at - time.monotonic())

    def consume(self, seconds: float) -> None:
        """The work took so long."""
        earliest = time.monotonic() - seconds - _BURST_SECONDS / self._share
        self._available_at = max(self._available_at, earliest) + seconds / self._share


# Bytes of one body that are read without waiting for a turn: most requests are shorter.
UNSCHEDULED_BYTES = 16 * 1024

# 8 KiB take 0.03 ms here, and as long again outside of what is measured: 50 MB/s at most.
_LOOP_SHARE = 0.2


class ScheduledFlowControl(FlowControl):
    """uvicorn's flow control, with a second reason not to read: it is another connection's turn."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._held = self._transport_paused = False

    def pause_reading(self) -> None:
        self.read_paused = True
        self._update_transport()

    def resume_reading(self) -> None:
        self.read_paused = False
        self._update_transport()

    def hold_reading(self) -> None:
        self._held = True
        self._update_transport()

    def release_reading(self) -> None:
        self._held = False
        self._update_transport()

    def _update_transport(self) -> None:
        stop = self._held or self.read_paused
        if stop != self._transport_paused:
            self._transport_paused = stop
            if stop:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()


class BodyReadScheduler:
    """The connections of one server that read long bodies, in the order of their turns."""

    def __init__(self) -> None:
        self._share = LoopTimeBudget(_LOOP_SHARE)
        self._queue: deque[ScheduledFlowControl] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def enqueue(self, flow: ScheduledFlowControl, seconds: float) -> None:
        """A piece of a long body was read, which took so long: the next one waits for its turn."""
        self._share.consume(seconds)
        flow.hold_reading()
        self._queue.append(flow)
        self._schedule()

    def remove(self, flow: ScheduledFlowControl) -> None:
        """Its connection is closed, or reads no body any more."""
        if flow in self._queue:
            self._queue.remove(flow)
            flow.release_reading()

    def _schedule(self) -> None:
        if self._timer is None and self._queue:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._share.delay_seconds, self._release_next)

    def _release_next(self) -> None:
        """What is released is read in the loop's next turn, before timers are looked at again."""
        self._timer = None
        if not self._share.delay_seconds and self._queue:
            self._queue.popleft().release_reading()
        self._schedule()
