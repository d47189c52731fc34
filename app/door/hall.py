"""What all connections of one server have in common.

Knows: who is here, what is counted and complained of. Must not know: HTTP, sockets.
"""

import logging
import time
from typing import Protocol

from app.core.settings import MEBIBYTE, Settings
from app.core.traffic import CloseReason, ConnectionStats
from app.door.body_reads import BodyReadScheduler
from app.door.complaints import LogThrottle
from app.door.crowd import ConnectionTable

log = logging.getLogger(__name__)

# What is read and thrown away behind an answer that came early, at least: a body that might have
# been taken is never too long to be thrown away.
_MIN_DISCARD_BYTES = 16 * MEBIBYTE

# Seconds that a connection may wait for a request though others wait to be accepted, and how many
# leave for them at once.
_EVICTION_GRACE_SECONDS, _MAX_EVICTIONS = 1.0, 16


class EvictableConnection(Protocol):
    """A connection, as others see it."""

    def evict(self, *, notify: bool) -> None:
        """Leave, in order. notify: say why, even if nothing was asked."""
        ...

    def abort(self) -> None: ...


class ConnectionLimiter:
    """settings: those that bound a connection."""

    def __init__(self, settings: Settings, traffic: ConnectionStats) -> None:
        self.header_timeout = settings.header_timeout
        self.body_timeout = settings.body_timeout
        self.max_discard_bytes = max(_MIN_DISCARD_BYTES, settings.max_body)
        self.table = ConnectionTable[EvictableConnection](settings.max_connections)
        self.body_reads = BodyReadScheduler()
        self.traffic = traffic
        self._invalid_requests = LogThrottle()

    def add(self, connection: EvictableConnection) -> None:
        """Others may have to leave for it, or it has to go itself."""
        self.traffic.accepted_connections += 1
        leaver = self.table.add(connection)
        if leaver is not None:
            self.count_rejected("too_many_connections")
            leaver.evict(notify=leaver is connection)
        late = self.table.pop_overdue()
        if late is not None:
            late.abort()
        self.traffic.open_connections = len(self.table)

    def has_room(self, max_sockets: int) -> bool:
        """Whether fewer than so many sockets are open. Where not, those leave that have waited for
        a while: others wait to be accepted. Those that came just now have perhaps asked already,
        and nobody has read it."""
        if len(self.table) < max_sockets:
            return True
        for leaver in self.table.waiting_since(time.monotonic() - _EVICTION_GRACE_SECONDS)[
            :_MAX_EVICTIONS
        ]:
            self.count_rejected("too_many_connections")
            leaver.evict(notify=False)
        return False

    def remove(self, connection: EvictableConnection) -> None:
        """Its socket is closed. May be told again."""
        self.table.remove(connection)
        self.traffic.open_connections = len(self.table)

    def count_rejected(self, reason: CloseReason) -> None:
        self.traffic.closed_by_reason[reason] += 1

    def log_invalid_request(self, client: tuple[str, int] | None, reason: str) -> None:
        """A request could not be read. client: address and port. reason: may hold what it sent."""
        times = self._invalid_requests.record(time.monotonic())
        address = "an unknown address" if client is None else client[0]
        if times == 1:
            log.warning("rejected a request from %s: %s", address, reason)
        elif times:
            log.warning("rejected %d requests; the last one, from %s: %s", times, address, reason)
