"""Lines of the log that a client can cause as often as it likes.

Knows: time. Must not know: what is complained of, how it is written.
"""

import math

# Seconds between two words about the same thing.
_EVERY = 60.0


class Complaint:
    """One thing that is told of when it first happens, and then once in a while."""

    def __init__(self) -> None:
        self._told = -math.inf
        self._times = 0

    def due(self, now: float) -> int:
        """How often it happened since it was last told of, this time included; 0 if it was told of
        a moment ago. now: seconds, never less than before."""
        self._times += 1
        if now - self._told < _EVERY:
            return 0
        times, self._times, self._told = self._times, 0, now
        return times
