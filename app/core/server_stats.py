"""What comes to the door of one server, counted.

Knows: names of figures. Must not know: sockets, HTTP's rules, who reads the figures. All of it is
written on the event loop: `open`, `opened` and `turned_away` by app/door, `answered` by
app/http/request_id.py.

How late the event loop is, counted.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

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


# Why a connection was ended by us before it got the answer that it came for, or had read it.
CloseReason = Literal[
    "handshake_timeout",
    "head_timeout",
    "body_timeout",
    "unread_answer",
    "too_many_connections",
    "head_too_large",
    "invalid_http",
]
CLOSE_REASONS: Sequence[CloseReason] = get_args(CloseReason)

# An answer's method, route template and class of status (2xx).
ResponseKey = tuple[str, str, str]


@dataclass(slots=True)
class ConnectionStats:
    """open_connections: sockets at this moment, of whatever standing. accepted_connections: since
    the start."""

    open_connections: int = 0
    accepted_connections: int = 0
    closed_by_reason: dict[CloseReason, int] = field(
        default_factory=lambda: dict.fromkeys(CLOSE_REASONS, 0)
    )
    responses: dict[ResponseKey, int] = field(default_factory=dict[ResponseKey, int])

    def count_response(self, method: str, route: str, status: int) -> None:
        """method, route: of a route of ours, so that their number is bounded; status: 100-599."""
        key = (method, route, f"{status // 100}xx")
        self.responses[key] = self.responses.get(key, 0) + 1
