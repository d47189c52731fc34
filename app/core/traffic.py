"""What comes to the door of one server, counted.

Knows: names of figures. Must not know: sockets, HTTP's rules, who reads the figures. All of it is
written on the event loop: `open`, `opened` and `turned_away` by app/door, `answered` by
app/api/request_id.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

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
