"""What comes to the door of one server, counted.

Knows: names of figures. Must not know: sockets, HTTP's rules, who reads the figures. All of it is
written on the event loop: `open`, `opened` and `turned_away` by app/door, `answered` by
app/api/request_id.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

# Why a connection was ended by us before it got the answer that it came for, or had read it.
Reason = Literal[
    "handshake_timeout",
    "head_timeout",
    "body_timeout",
    "unread_answer",
    "too_many_connections",
    "head_too_large",
    "invalid_http",
]
REASONS: Sequence[Reason] = get_args(Reason)

# An answer's method, route template and class of status (2xx).
Answer = tuple[str, str, str]


@dataclass(slots=True)
class Traffic:
    """open: sockets at this moment, of whatever standing. opened: since the start."""

    open: int = 0
    opened: int = 0
    turned_away: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    answered: dict[Answer, int] = field(default_factory=dict[Answer, int])

    def answer(self, method: str, route: str, status: int) -> None:
        """method, route: of a route of ours, so that their number is bounded; status: 100-599."""
        key = (method, route, f"{status // 100}xx")
        self.answered[key] = self.answered.get(key, 0) + 1
