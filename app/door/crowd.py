"""How many connections may be open, and which of them makes room for one more.

Knows: that some have brought a whole request and others have not, and that some are on their way
out. Must not know: HTTP, how one is told to leave.
"""

import logging
import resource
import time
from itertools import chain
from typing import Generic, TypeVar

from app.door.complaints import LogThrottle

log = logging.getLogger(__name__)

Member = TypeVar("Member")

# Files that a server opens besides its connections: models, children, logs.
_RESERVED_FDS = 256

# Connections beyond the bound that were told to leave, and may still read why.
_MAX_CLOSING = 64


def raise_fd_limit(connections: int) -> int | None:
    """Raise the number of files that this process may open to what so many connections take: a Mac
    begins with 256. None if that is enough, else how many sockets of clients may be open at once:
    half of the files at least, because a request that was accepted needs one more to reach its
    model, and modules, templates and pipes need some."""
    wanted = connections + _RESERVED_FDS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    if allowed >= wanted:
        return None
    fewer = max(1, allowed - min(_RESERVED_FDS, allowed // 2))
    log.warning(
        "%d connections need up to %d file descriptors, but the limit is %d: accepting at most %d "
        "connections; raise the limit (ulimit -n) or lower --max-connections",
        connections,
        wanted,
        allowed,
        fewer,
    )
    return fewer


class ConnectionTable(Generic[Member]):
    """The connections of one server, in three orders of waiting, longest first: strangers, who have
    not brought a whole request yet; the idle, whose client may be about to ask again; and those who
    were told to leave and still hold their socket. Nobody waits while a request is answered."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._open: set[Member] = set()
        # since when they wait, monotonic seconds
        self._awaiting_request: dict[Member, float] = {}
        self._idle: dict[Member, float] = {}
        self._closing: dict[Member, None] = {}
        self._limit_warnings = LogThrottle()

    def __len__(self) -> int:
        return len(self._open) + len(self._closing)

    def add(self, connection: Member) -> Member | None:
        """Who must be told to leave for it: perhaps itself, perhaps nobody."""
        leaver = None
        if len(self._open) >= self._max_connections:
            self._warn_limit_reached()
            leaver = next(chain(self._awaiting_request, self._idle), connection)
        self._open.add(connection)
        self._awaiting_request[connection] = time.monotonic()
        return leaver

    def pop_overdue(self) -> Member | None:
        """Who has to be gone at once, if anybody: of those who were told to leave, the first. It is
        forgotten with this. Asked whenever one has joined, and no more than `most` and a few are
        ever open."""
        if len(self) <= self._max_connections + _MAX_CLOSING or not self._closing:
            return None
        first = next(iter(self._closing))
        del self._closing[first]
        return first

    def waiting_since(self, before: float) -> list[Member]:
        """Those that have waited since before that time, in the order in which they give way."""
        waiting = chain(self._awaiting_request.items(), self._idle.items())
        return [member for member, since in waiting if since < before]

    def mark_waiting(self, connection: Member) -> None:
        """It waits for a request, since now unless it did already."""
        if connection in self._open and connection not in self._awaiting_request:
            self._idle.setdefault(connection, time.monotonic())

    def mark_active(self, connection: Member) -> None:
        """It has brought a whole request."""
        self._awaiting_request.pop(connection, None)
        self._idle.pop(connection, None)

    def mark_closing(self, connection: Member) -> None:
        """It was told to leave, or is about to by itself."""
        if connection in self._open:
            self._remove_open(connection)
            self._closing[connection] = None

    def remove(self, connection: Member) -> None:
        """Its socket is gone."""
        self._remove_open(connection)
        self._closing.pop(connection, None)

    def _remove_open(self, connection: Member) -> None:
        self._open.discard(connection)
        self.mark_active(connection)

    def _warn_limit_reached(self) -> None:
        if self._limit_warnings.record(time.monotonic()):
            log.warning(
                "connection limit reached (%d, --max-connections): each new connection closes one "
                "that has no request in flight, if there is one",
                len(self._open),
            )
