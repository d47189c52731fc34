"""How many connections may be open, and which of them makes room for one more.

Knows: that some have brought a whole request and others have not, and that some are on their way
out. Must not know: HTTP, how one is told to leave.
"""

import logging
import resource
import time
from itertools import chain
from typing import Generic, TypeVar

from app.door.complaints import Complaint

log = logging.getLogger(__name__)

Member = TypeVar("Member")

# Files that a server opens besides its connections: models, children, logs.
_OTHER_FILES = 256

# Connections beyond the bound that were told to leave, and may still read why.
_LEAVING = 64


def allow_files(connections: int) -> int | None:
    """Raise the number of files that this process may open to what so many connections take: a Mac
    begins with 256. None if that is enough, else how many sockets of clients may be open at once:
    half of the files at least, because a request that was accepted needs one more to reach its
    model, and modules, templates and pipes need some."""
    wanted = connections + _OTHER_FILES
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
    fewer = max(1, allowed - min(_OTHER_FILES, allowed // 2))
    log.warning(
        "%d connections need up to %d file descriptors, but the limit is %d: accepting at most %d "
        "connections; raise the limit (ulimit -n) or lower --max-connections",
        connections,
        wanted,
        allowed,
        fewer,
    )
    return fewer


class Crowd(Generic[Member]):
    """The connections of one server, in three orders of waiting, longest first: strangers, who have
    not brought a whole request yet; the idle, whose client may be about to ask again; and those who
    were told to leave and still hold their socket. Nobody waits while a request is answered."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._here: set[Member] = set()
        # since when they wait, monotonic seconds
        self._strangers: dict[Member, float] = {}
        self._idle: dict[Member, float] = {}
        self._leaving: dict[Member, None] = {}
        self._full = Complaint()

    def __len__(self) -> int:
        return len(self._here) + len(self._leaving)

    def join(self, newcomer: Member) -> Member | None:
        """Who must be told to leave for it: perhaps itself, perhaps nobody."""
        leaver = None
        if len(self._here) >= self._most:
            self._complain()
            leaver = next(chain(self._strangers, self._idle), newcomer)
        self._here.add(newcomer)
        self._strangers[newcomer] = time.monotonic()
        return leaver

    def overdue(self) -> Member | None:
        """Who has to be gone at once, if anybody: of those who were told to leave, the first. It is
        forgotten with this. Asked whenever one has joined, and no more than `most` and a few are
        ever open."""
        if len(self) <= self._most + _LEAVING or not self._leaving:
            return None
        first = next(iter(self._leaving))
        del self._leaving[first]
        return first

    def waiting_since(self, before: float) -> list[Member]:
        """Those that have waited since before that time, in the order in which they give way."""
        waiting = chain(self._strangers.items(), self._idle.items())
        return [member for member, since in waiting if since < before]

    def wait(self, connection: Member) -> None:
        """It waits for a request, since now unless it did already."""
        if connection in self._here and connection not in self._strangers:
            self._idle.setdefault(connection, time.monotonic())

    def heard(self, connection: Member) -> None:
        """It has brought a whole request."""
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)

    def part(self, connection: Member) -> None:
        """It was told to leave, or is about to by itself."""
        if connection in self._here:
            self._leave_line(connection)
            self._leaving[connection] = None

    def leave(self, connection: Member) -> None:
        """Its socket is gone."""
        self._leave_line(connection)
        self._leaving.pop(connection, None)

    def _leave_line(self, connection: Member) -> None:
        self._here.discard(connection)
        self.heard(connection)

    def _complain(self) -> None:
        if self._full.due(time.monotonic()):
            log.warning(
                "connection limit reached (%d, --max-connections): each new connection closes one "
                "that has no request in flight, if there is one",
                len(self._here),
            )
