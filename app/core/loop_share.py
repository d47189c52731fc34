"""A share of the event loop's time, for work that clients can ask for without end.

Knows: seconds. Must not know: event loops, what the work is.
"""

import time

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
