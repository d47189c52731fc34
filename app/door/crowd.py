"""How many connections may be open, and which of them makes room for one more.

Knows: that some have brought a whole request and others have not. Must not know: HTTP, how one is
told to leave.
"""

import logging
import math
import resource
import time
from itertools import chain
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
    """The connections of one server that were not told to leave. Those which wait for a request, or
    for the rest of one, are kept in the order in which they began to wait; strangers, who have not
    brought a whole one yet, apart from those whose client may be about to ask again."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._here: set[Member] = set()
        self._strangers: dict[Member, None] = {}
        self._idle: dict[Member, None] = {}
        self._complained = -math.inf

    def join(self, newcomer: Member) -> Member | None:
        """Who must leave for it: perhaps itself, perhaps nobody."""
        leaver = None
        if len(self._here) >= self._most:
            self._complain()
            leaver = next(chain(self._strangers, self._idle), newcomer)
        self._here.add(newcomer)
        self._strangers[newcomer] = None
        return leaver

    def wait(self, connection: Member) -> None:
        """It waits for a request, since now unless it did already."""
        if connection not in self._strangers:
            self._idle.setdefault(connection)

    def heard(self, connection: Member) -> None:
        """It has brought a whole request."""
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)

    def leave(self, connection: Member) -> None:
        self._here.discard(connection)
        self.heard(connection)

    def _complain(self) -> None:
        now = time.monotonic()
        if now - self._complained < _COMPLAIN_EVERY:
            return
        self._complained = now
        log.warning(
            "%d connections are open, as many as may be (--max-connections): for each new one, one "
            "that is not being answered is closed, if there is any",
            len(self._here),
        )
