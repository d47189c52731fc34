"""Scheduling of long request body reads: connections take turns, and their share of the event
loop's time is limited.

Knows: asyncio's transports, uvicorn's flow control, time. Must not know: HTTP, the content of
bodies.

Each byte of a body costs time on the event loop before the request can be authenticated or parsed,
and the loop reads every ready socket in each iteration. Without a limit, a few clients with long
bodies could make each iteration arbitrarily long.
"""

import asyncio
import time
from collections import deque

from app.http.uvicorn_internals import HookedFlowControl

# The burst allowance after a pause, in seconds of work. Event loop timers fire up to a millisecond
# late, so short work items would otherwise get less than their share.
_BURST_SECONDS = 0.002

# The number of bytes of each body that are read without scheduling. Most bodies are shorter.
UNSCHEDULED_BYTES = 16 * 1024

# Reading 8 KiB takes 0.03 ms here, and another 0.03 ms outside of the measured code. This limits
# reading to 50 MB/s.
_LOOP_SHARE = 0.2


class LoopTimeBudget:
    """Limits one type of work to `share` of the time, except for short bursts. Before each work
    item, wait for `delay_seconds`; after it, call `consume`."""

    def __init__(self, share: float) -> None:
        assert 0 < share <= 1
        self._share = share
        self._available_at = 0.0

    @property
    def delay_seconds(self) -> float:
        """Returns the number of seconds until more work is allowed; 0 means now."""
        return max(0.0, self._available_at - time.monotonic())

    def consume(self, seconds: float) -> None:
        """Counts work that took this many seconds."""
        earliest = time.monotonic() - seconds - _BURST_SECONDS / self._share
        self._available_at = max(self._available_at, earliest) + seconds / self._share


class ScheduledFlowControl(HookedFlowControl):
    """uvicorn's flow control, extended to pause reading while it is another connection's turn."""

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
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()


class BodyReadScheduler:
    """The connections of one server that read long bodies, in FIFO order."""

    def __init__(self) -> None:
        self._share = LoopTimeBudget(_LOOP_SHARE)
        self._queue: deque[ScheduledFlowControl] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def enqueue(self, flow: ScheduledFlowControl, seconds: float) -> None:
        """Queues a connection for its next read. seconds: the duration of the last read."""
        self._share.consume(seconds)
        flow.hold_reading()
        self._queue.append(flow)
        self._schedule()

    def remove(self, flow: ScheduledFlowControl) -> None:
        """Removes a connection that is closed or has finished its body."""
        if flow in self._queue:
            self._queue.remove(flow)
            flow.release_reading()

    def _schedule(self) -> None:
        if self._timer is None and self._queue:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._share.delay_seconds, self._release_next)

    def _release_next(self) -> None:
        """Resumes the next connection. The loop reads from it in its next iteration, before it
        checks timers again."""
        self._timer = None
        if not self._share.delay_seconds and self._queue:
            self._queue.popleft().release_reading()
        self._schedule()
