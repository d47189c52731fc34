"""Lines of the log that a client can cause as often as it likes.

Knows: time. Must not know: what is complained of, how it is written.
"""

import math

# Seconds between two words about the same thing.
_LOG_INTERVAL = 60.0


class LogThrottle:
    """One thing that is told of when it first happens, and then once in a while."""

    def __init__(self) -> None:
        self._logged_at = -math.inf
        self._occurrences = 0

    def record(self, now: float) -> int:
        """How often it happened since it was last told of, this time included; 0 if it was told of
        a moment ago. now: seconds, never less than before."""
        self._occurrences += 1
        if now - self._logged_at < _LOG_INTERVAL:
            return 0
        times, self._occurrences, self._logged_at = self._occurrences, 0, now
        return times
