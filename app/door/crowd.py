"""How many connections may be open, and which of them makes room for one more.

Knows: that some have brought a whole request and others have not. Must not know: HTTP, how one is
told to leave.
"""

import logging
import math
import resource
import time
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Member = TypeVar("Member")

# Files that a server opens besides its connections: models, children, logs.
_OTHER_FILES = 256

# Seconds between two words about a server that is full: whoever fills it must not fill the log.
_COMPLAIN_EVERY = 60.0


def allow_files(connections: int) -> None:
    """Raise the number of files that this process may open to what so many connections take: a Mac
    begins with 256."""
    wanted = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    if allowed < wanted:
        log.warning(
            "%d connections take up to %d open files, and this process may have %d: give it more "
            "(ulimit -n) or the server a smaller --max-connections",
            connections,
            wanted,
            allowed,
        )


class Crowd(Generic[Member]):
    """The connections of one server that were not told to leave, and among them, longest first,
    those that have not brought a whole request."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._here: set[Member] = set()
        self._unheard: dict[Member, None] = {}
        self._complained = -math.inf

    def join(self, newcomer: Member) -> Member | None:
        """Who must leave for it: perhaps itself, perhaps nobody."""
        leaver = None
        if len(self._here) >= self._most:
            self._complain()
            leaver = next(iter(self._unheard), newcomer)
        self._here.add(newcomer)
        self._unheard[newcomer] = None
        return leaver

    def wait(self, connection: Member) -> None:
        """It waits for a request, since now unless it did already."""
        self._unheard.setdefault(connection)

    def heard(self, connection: Member) -> None:
        self._unheard.pop(connection, None)

    def leave(self, connection: Member) -> None:
        self._here.discard(connection)
        self.heard(connection)

    def _complain(self) -> None:
        now = time.monotonic()
        if now - self._complained < _COMPLAIN_EVERY:
            return
        self._complained = now
        log.warning(
            "%d connections are open, as many as may be (--max-connections): for each new one the "
            "one that has waited longest without a whole request is closed, if there is one",
            len(self._here),
        )
