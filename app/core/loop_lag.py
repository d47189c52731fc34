"""How late the event loop is, counted.

Knows: seconds. Must not know: event loops, who reads the figures.
"""

from bisect import bisect_left
from collections import deque

# Upper bounds of the histogram, in seconds; the last bucket has none.
BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# Measurements that `worst` looks back on: a minute of them.
_REMEMBERED = 1200


class LoopLag:
    """Written by one task, on the event loop. counts: measurements in each bucket. total: their sum
    in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0
        self._lately: deque[float] = deque([0.0], maxlen=_REMEMBERED)

    def note(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds
        self._lately.append(seconds)

    @property
    def last(self) -> float:
        return self._lately[-1]

    @property
    def worst(self) -> float:
        """In the last minute, or as long as there are measurements."""
        return max(self._lately)
