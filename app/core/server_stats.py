"""Counters of a server's connections and responses, and the latency of its event loop.

Knows: the names of the statistics. Must not know: sockets, HTTP, metrics.

All statistics are updated on the event loop: connection statistics by app/http/connection_limits.py
and app/http/connection.py, response statistics by app/http/request_id.py, and the latency by
app/serving/event_loop_watchdog.py.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

# Upper bounds of the histogram, in seconds; the last bucket has no upper bound.
LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# The number of measurements that `worst` covers, equal to one minute.
_WINDOW = 1200


class EventLoopLag:
    """A histogram of the event loop's lag, updated by one task on the event loop. bucket_counts:
    the number of measurements per bucket. sum_seconds: the sum of all measurements in seconds."""

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
        """The maximum lag in the last minute, or since the first measurement."""
        return max(self._recent)


# Reasons why the server closes a connection before the client has received the whole response.
CloseReason = Literal[
    "head_timeout",
    "body_timeout",
    "unread_answer",
    "too_many_connections",
    "head_too_large",
    "invalid_http",
]
CLOSE_REASONS: Sequence[CloseReason] = get_args(CloseReason)

# The method, the route template and the status class (2xx) of a response.
ResponseKey = tuple[str, str, str]


@dataclass(slots=True)
class ConnectionStats:
    """Counters of connections and responses. open_connections: sockets that are currently open, in
    any state. shutting_down: whether the server stops. accepted_connections: connections accepted
    since the start. closed_by_reason: connections that the server closed, by reason. responses:
    responses sent. ignored_fields: unknown request fields that were ignored, by route template."""

    open_connections: int = 0
    shutting_down: bool = False
    accepted_connections: int = 0
    closed_by_reason: dict[CloseReason, int] = field(
        default_factory=lambda: dict.fromkeys(CLOSE_REASONS, 0)
    )
    responses: dict[ResponseKey, int] = field(default_factory=dict[ResponseKey, int])
    ignored_fields: dict[str, int] = field(default_factory=dict[str, int])

    def count_response(self, method: str, route: str, status: int) -> None:
        """Counts a response. method, route: must belong to a known route, so that the number of
        keys is bounded. status: an HTTP status from 100 to 599."""
        key = (method, route, f"{status // 100}xx")
        self.responses[key] = self.responses.get(key, 0) + 1

    def count_ignored_fields(self, route: str, count: int) -> None:
        """Counts the ignored fields of a request. route: as in `count_response`."""
        self.ignored_fields[route] = self.ignored_fields.get(route, 0) + count
