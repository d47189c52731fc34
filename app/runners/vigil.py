"""When a runner that says nothing, or always the same, counts as hung.

Knows: heartbeats, looks. Must not know: clocks, tasks. What is counted is looks and heartbeats, not
seconds: a machine that slept, or a parent that was stopped for a while, must not take that for
silence of its runners.
"""

import math

from app.core.messages import IDLE, Heartbeat


class Vigil:
    """watchdog: seconds; interval: seconds between two heartbeats, and between two looks."""

    def __init__(self, *, watchdog: float, interval: float) -> None:
        self._enough = math.ceil(watchdog / interval)
        self._interval = interval
        self._silent: int | None = None  # looks since something was heard, once anything was
        self._same = 0  # heartbeats that told of one and the same stage
        self._stage: Heartbeat | None = None

    def heard(self) -> None:
        """Anything at all."""
        self._silent = 0

    def beat(self, heartbeat: Heartbeat) -> None:
        stands = heartbeat == self._stage and heartbeat.doing != IDLE
        self._same = self._same + 1 if stands else 0
        self._stage = heartbeat

    def look(self) -> str | None:
        """To be called once in an interval: a sentence when it hangs."""
        if self._silent is None:
            return None
        self._silent += 1
        if self._silent > self._enough:
            return f"the engine's process has sent nothing for {self._seconds(self._silent)} s"
        if self._same >= self._enough and self._stage is not None:
            seconds = self._seconds(self._same)
            return f"the engine has made no progress for {seconds} s ({self._stage.doing})"
        return None

    def _seconds(self, count: int) -> str:
        return f"{count * self._interval:.0f}"
