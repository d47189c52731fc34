"""What all connections of one server have in common.

Knows: who is here, what is counted and complained of. Must not know: HTTP, sockets.
"""

import logging
import time
from typing import Protocol

from app.core.settings import MEBIBYTE, Settings
from app.core.traffic import Reason, Traffic
from app.door.body_reads import BodyReads
from app.door.complaints import Complaint
from app.door.crowd import Crowd

log = logging.getLogger(__name__)

# What is read and thrown away behind an answer that came early, at least: a body that might have
# been taken is never too long to be thrown away.
_REST_BYTES = 16 * MEBIBYTE

# Seconds that a connection may wait for a request though others wait to be accepted, and how many
# leave for them at once.
_GRACE, _MAKE_ROOM = 1.0, 16


class Guest(Protocol):
    """A connection, as others see it."""

    def give_way(self, *, tell: bool) -> None:
        """Leave, in order. tell: say why, even if nothing was asked."""
        ...

    def cut(self) -> None: ...


class Hall:
    """settings: those that bound a connection."""

    def __init__(self, settings: Settings, traffic: Traffic) -> None:
        self.header_timeout = settings.header_timeout
        self.body_timeout = settings.body_timeout
        self.rest = max(_REST_BYTES, settings.max_body)
        self.crowd = Crowd[Guest](settings.max_connections)
        self.body_reads = BodyReads()
        self.traffic = traffic
        self._invalid = Complaint()

    def enter(self, guest: Guest) -> None:
        """Others may have to leave for it, or it has to go itself."""
        self.traffic.opened += 1
        leaver = self.crowd.join(guest)
        if leaver is not None:
            self.turned_away("too_many_connections")
            leaver.give_way(tell=leaver is guest)
        late = self.crowd.overdue()
        if late is not None:
            late.cut()
        self.traffic.open = len(self.crowd)

    def has_room(self, sockets: int) -> bool:
        """Whether fewer than so many sockets are open. Where not, those leave that have waited for
        a while: others wait to be accepted. Those that came just now have perhaps asked already,
        and nobody has read it."""
        if len(self.crowd) < sockets:
            return True
        for leaver in self.crowd.waiting_since(time.monotonic() - _GRACE)[:_MAKE_ROOM]:
            self.turned_away("too_many_connections")
            leaver.give_way(tell=False)
        return False

    def leave(self, guest: Guest) -> None:
        """Its socket is closed. May be told again."""
        self.crowd.leave(guest)
        self.traffic.open = len(self.crowd)

    def turned_away(self, why: Reason) -> None:
        self.traffic.turned_away[why] += 1

    def invalid(self, client: tuple[str, int] | None, why: str) -> None:
        """A request could not be read. client: address and port. why: may hold what it sent."""
        times = self._invalid.due(time.monotonic())
        address = "an unknown address" if client is None else client[0]
        if times == 1:
            log.warning("rejected a request from %s: %s", address, why)
        elif times:
            log.warning("rejected %d requests; the last one, from %s: %s", times, address, why)
