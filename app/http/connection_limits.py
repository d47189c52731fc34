"""How many connections may be open, and which of them makes room for one more.

Knows: that some have brought a whole request and others have not, and that some are on their way
out. Must not know: HTTP, how one is told to leave.

Accepting connections where the process may open fewer files than they would take.

asyncio accepts whatever comes. When no file can be opened any more it logs a hundred errors at a
time, and whatever else needs one fails: a connection to a model's process, an import, a template.
So a server with few files accepts no more connections than it has files for: the next ones wait
in the system's queue until others leave.

What all connections of one server have in common.

Lines of the log that a client can cause as often as it likes.
"""

import asyncio
import logging
import math
import resource
import socket
import time
from collections.abc import Callable
from itertools import chain
from typing import Generic, Protocol, TypeVar

from app.core.server_stats import CloseReason, ConnectionStats
from app.core.settings import MEBIBYTE, Settings
from app.http.body_read_scheduler import BodyReadScheduler

log = logging.getLogger(__name__)

# connections that are accepted in one turn of the event loop
_MAX_ACCEPTS_PER_TICK = 16

# seconds until it is tried again, where there was no room, and where the system refused
_RETRY_SECONDS, _ERROR_BACKOFF_SECONDS = 0.05, 0.5


class Acceptor:
    """Accepts in place of an asyncio server.

    listener: the server's, or what it gives out in its place. protocol_factory: makes a
    connection's protocol. has_room: whether one more may be accepted, called with the number of
    those that were accepted and have not begun."""

    def __init__(
        self,
        listener: socket.socket,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        has_room: Callable[[int], bool],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._protocol_factory = protocol_factory
        self._has_room = has_room
        self._starting: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._accept_errors = LogThrottle()
        # the server's own socket must not be accepted from by anybody else
        self._loop.remove_reader(listener.fileno())
        self._socket = listener.dup()
        self._socket.setblocking(False)
        self._resume()

    def close(self) -> None:
        self._pause(None)
        self._socket.close()

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._socket, self._accept)

    def _pause(self, seconds: float | None) -> None:
        self._loop.remove_reader(self._socket)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._resume)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS_PER_TICK):
            if not self._has_room(len(self._starting)):
                self._pause(_RETRY_SECONDS)
                return
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if self._accept_errors.record(time.monotonic()):
                    log.warning("cannot accept connections: %s", error)
                self._pause(_ERROR_BACKOFF_SECONDS)
                return
            accepted.setblocking(False)
            task = self._loop.create_task(self._start_protocol(accepted))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start_protocol(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol_factory, accepted)
        except OSError:  # it is gone already
            accepted.close()


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


# Seconds between two words about the same thing.
_LOG_INTERVAL = 60.0


class LogThrottle:
    """One thing that is told of when it first happens, and then once in a while."""

    def __init__(self) -> None:
        self._logged_at = -math.inf
        self._occurrences = 0

    def record(self, now: float) -> int:
        """How often it happened since it was last told of, this time included; 0 if it was told of
        a moment ago. now: seconds, never less than before."""
        self._occurrences += 1
        if now - self._logged_at < _LOG_INTERVAL:
            return 0
        times, self._occurrences, self._logged_at = self._occurrences, 0, now
        return times


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
