"""How late the event loop is, counted.

Knows: seconds. Must not know: event loops, who reads the figures.
"""

from bisect import bisect_left
from collections import deque

# Upper bounds of the histogram, in seconds; the last bucket has none.
LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# Measurements that `worst` looks back on: a minute of them.
_WINDOW = 1200


class EventLoopLag:
    """Written by one task, on the event loop. bucket_counts: measurements in each bucket.
    sum_seconds: their sum in seconds."""

    def __init__(self) -> None:
        self.bucket_counts = [0] * (len(LAG_BUCKETS) + 1)
        self.sum_seconds = 0.0
        self._recent: deque[float] = deque([0.0], maxlen=_WINDOW)

    def observe(self, seconds: float) -> None:
        self.bucket_counts[bisect_left(LAG_BUCKETS, seconds)] += 1
        self.sum_seconds += seconds
        self._recent.append(seconds)

    @property
    def latest(self) -> float:
        return self._recent[-1]

    @property
    def worst(self) -> float:
        """In the last minute, or as long as there are measurements."""
        return max(self._recent)
