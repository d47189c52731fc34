"""When a runner that says nothing, or always the same, counts as hung.

Knows: heartbeats, looks. Must not know: clocks, tasks. What is counted is looks and heartbeats, not
seconds: a machine that slept, or a parent that was stopped for a while, must not take that for
silence of its runners.
"""

import math

from app.core.messages import IDLE, Heartbeat


class Watchdog:
    """watchdog: seconds; interval: seconds between two heartbeats, and between two looks."""

    def __init__(self, *, watchdog: float, interval: float) -> None:
        self._limit = math.ceil(watchdog / interval)
        self._interval = interval
        self._silent_checks: int | None = None  # looks since something was heard, once anything was
        self._unchanged_beats = 0  # heartbeats that told of one and the same stage
        self._last_heartbeat: Heartbeat | None = None

    def note_activity(self) -> None:
        """Anything at all."""
        self._silent_checks = 0

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        stands = heartbeat == self._last_heartbeat and heartbeat.stage != IDLE
        self._unchanged_beats = self._unchanged_beats + 1 if stands else 0
        self._last_heartbeat = heartbeat

    def check(self) -> str | None:
        """To be called once in an interval: a sentence when it hangs."""
        if self._silent_checks is None:
            return None
        self._silent_checks += 1
        if self._silent_checks > self._limit:
            return (
                f"the engine's process has sent nothing for {self._seconds(self._silent_checks)} s"
            )
        if self._unchanged_beats >= self._limit and self._last_heartbeat is not None:
            seconds = self._seconds(self._unchanged_beats)
            return f"the engine has made no progress for {seconds} s ({self._last_heartbeat.stage})"
        return None

    def _seconds(self, count: int) -> str:
        return f"{count * self._interval:.0f}"
